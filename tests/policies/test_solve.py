"""The solver against the exhaustive oracle on tiny profiles, and what every plan promises."""

import itertools
import json
import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import ConvNet, Reused, TinyGPT, mlp, profile_of, square_loss, token_loss
from torch import nn

from memopt.errors import InfeasibleBudgetError
from memopt.policies.plan import Plan
from memopt.policies.simulate import Simulator
from memopt.policies.solve import Solver, least_peak_bytes, solve
from memopt.profiler.profile import Kind, Phase

# [Note: Slack] The solver divides the forward into segments; the oracle takes any subset of values. How much the two
# differ was measured over the profiles below (seen: least peak 1.00 to 1.16 of the oracle's, step time up to 1.02).
LEAST_SLACK = 1.17
TIME_SLACK = 1.05
SHARES = (0.0, 0.05, 0.2, 0.5, 0.8, 0.95, 1.0)

TINY = {
    "gelu": (lambda: mlp((13, 57, 31, 7)), (37, 13)),
    "tanh": (lambda: mlp((13, 101, 53, 29, 7), nn.Tanh), (211, 13)),
    "silu": (lambda: mlp((29, 67, 103, 59, 11), nn.SiLU), (301, 29)),
    "silu, 5 layers": (lambda: mlp((29, 67, 103, 59, 37, 11), nn.SiLU), (301, 29)),
    "sigmoid, narrow in the middle": (lambda: mlp((41, 89, 5, 97, 3), nn.Sigmoid), (257, 41)),
    "gelu, growing": (lambda: mlp((7, 19, 43, 109, 3)), (193, 7)),
    "one op": (lambda: mlp((5, 3)), (4, 5)),
}


@cache
def tiny_profile(name):
    torch.manual_seed(0)
    build, shape = TINY[name]
    return profile_of(build(), (torch.randn(shape),))


@cache
def larger_profile(name):
    torch.manual_seed(0)
    ids = torch.randint(0, 157, (3, 33))
    if name == "gpt":
        return profile_of(TinyGPT(), (ids,), token_loss)
    if name == "conv":
        return profile_of(ConvNet(), (torch.randn(5, 3, 17, 19),))
    return profile_of(Reused(), (torch.randn(71, 17),))


class Oracle:
    """All subsets of the droppable values, played by the simulator."""

    def __init__(self, profile):
        simulator = Simulator(profile)
        values = sorted(simulator.droppable)
        assert len(values) <= 9
        self.outcomes = [
            simulator.run(frozenset(c)) for n in range(len(values) + 1) for c in itertools.combinations(values, n)
        ]
        self.scratch = profile.scratch_bytes
        self.plain = simulator.run(frozenset()).peak_bytes + self.scratch
        self.least = min(o.peak_bytes for o in self.outcomes) + self.scratch

    def best_s(self, budget):
        return min(o.step_s for o in self.outcomes if o.peak_bytes + self.scratch <= budget)

    def budgets(self):
        return [int(self.least + share * (self.plain - self.least)) for share in SHARES]


@cache
def oracle(name):
    return Oracle(tiny_profile(name))


@pytest.mark.parametrize("name", TINY)
def test_plan_is_found_wherever_the_oracle_finds_one(name):
    # Within the slack of [Note: Slack].
    assert least_peak_bytes(tiny_profile(name)) <= LEAST_SLACK * oracle(name).least


@pytest.mark.parametrize("name", TINY)
def test_plan_is_about_as_fast_as_the_oracle_best(name):
    profile, truth = tiny_profile(name), oracle(name)
    solver = Solver(profile)
    for budget in truth.budgets():
        try:
            plan = solver.solve(budget)
        except InfeasibleBudgetError:
            assert budget < LEAST_SLACK * truth.least
            continue
        assert plan.forecast.step_s <= TIME_SLACK * truth.best_s(budget)


@pytest.mark.parametrize("name", TINY)
def test_gap_never_claims_more_than_the_oracle_allows(name):
    profile, truth = tiny_profile(name), oracle(name)
    solver = Solver(profile)
    for budget in truth.budgets():
        try:
            plan = solver.solve(budget)
        except InfeasibleBudgetError:
            continue
        bound = (1 - plan.gap) * plan.forecast.step_s
        assert bound <= truth.best_s(budget) * (1 + 1e-9)
        assert plan.forecast.step_s >= truth.best_s(budget) * (1 - 1e-9)  # or the oracle is none


@st.composite
def disturbed_profiles(draw):
    """A real step's structure with other bytes and other seconds."""
    profile = tiny_profile(draw(st.sampled_from([n for n in TINY if n != "one op"])))
    made = {profile.values[v].storage for op in profile.ops if op.phase is Phase.FORWARD for v in op.makes}
    storages = tuple(
        replace(s, num_bytes=draw(st.integers(1, 200_000)))
        if i in made
        else replace(s, num_bytes=s.num_bytes if s.kind is not Kind.TEMPORARY else draw(st.integers(1, 60_000)))
        for i, s in enumerate(profile.storages)
    )
    ops = tuple(
        replace(op, seconds=draw(st.floats(1e-6, 1e-2)), scratch_bytes=0) if op.phase is Phase.FORWARD else op
        for op in profile.ops
    )
    return replace(profile, storages=storages, ops=ops)


@given(disturbed_profiles(), st.floats(0.0, 1.0))
@settings(max_examples=40)
def test_bound_stays_a_bound_for_any_bytes_and_seconds(profile, share):
    truth = Oracle(profile)
    solver = Solver(profile)
    least = solver.peak_bytes(solver.least().outcome)
    budget = int(least + share * (truth.plain - least))

    plan = solver.solve(budget)

    assert truth.least <= plan.forecast.peak_bytes <= budget
    assert (1 - plan.gap) * plan.forecast.step_s <= truth.best_s(budget) * (1 + 1e-9)


@pytest.mark.parametrize("name", ["gpt", "conv", "reused"])
def test_larger_budget_is_never_slower(name):
    profile = larger_profile(name)
    solver = Solver(profile)
    num = 16
    least, plain = profile.min_bytes, profile.peak_bytes

    times = [solver.solve(int(least + i / num * (plain - least))).forecast.step_s for i in range(num + 1)]

    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(times)), [f"{t:.6f}" for t in times]


@pytest.mark.parametrize("seed", [30, 64, 87, 88])
def test_larger_budget_is_never_slower_for_odd_bytes_and_seconds(seed):
    # Seeds found by search: the greedy steps of one budget are not those of another.
    profile, draw = tiny_profile("silu, 5 layers"), random.Random(seed)
    made = {profile.values[v].storage for op in profile.ops if op.phase is Phase.FORWARD for v in op.makes}
    storages = tuple(
        replace(s, num_bytes=draw.randint(1, 200_000)) if i in made else s for i, s in enumerate(profile.storages)
    )
    ops = tuple(
        replace(op, seconds=draw.uniform(1e-6, 1e-2), scratch_bytes=0) if op.phase is Phase.FORWARD else op
        for op in profile.ops
    )
    solver = Solver(replace(profile, storages=storages, ops=ops))
    least, plain = solver.peak_bytes(solver.least().outcome), solver.peak_bytes(solver.plain)

    times = [solver.solve(int(least + i / 16 * (plain - least))).forecast.step_s for i in range(17)]

    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(times)), times


@pytest.mark.parametrize("name", ["gpt", "conv", "reused", *TINY])
def test_forecast_peak_is_never_over_the_budget(name):
    profile = larger_profile(name) if name not in TINY else tiny_profile(name)
    solver = Solver(profile)
    for share in SHARES:
        budget = int(profile.min_bytes + share * (profile.peak_bytes - profile.min_bytes))
        plan = solver.solve(budget)
        assert plan.budget_bytes == budget
        assert plan.forecast.peak_bytes <= budget
        assert plan.forecast.step_s >= plan.forecast.plain_step_s
        assert sum(plan.forecast.breakdown.values()) == plan.forecast.peak_bytes
        assert 0.0 <= plan.gap < 1.0


@pytest.mark.parametrize("name", ["gpt", "conv", "reused", *TINY])
def test_forecast_is_what_the_simulator_says_of_the_drops(name):
    profile = larger_profile(name) if name not in TINY else tiny_profile(name)
    plan = solve(profile, (profile.min_bytes + profile.peak_bytes) // 2)
    at = {op.key: op for op in profile.ops if op.phase is Phase.FORWARD}

    dropped = {at[d.key].makes[at[d.key].positions.index(p)] for d in plan.drops for p in d.positions}

    outcome = Simulator(profile).run(dropped)
    assert outcome.peak_bytes + profile.scratch_bytes == plan.forecast.peak_bytes
    assert outcome.step_s == plan.forecast.step_s


@pytest.mark.parametrize("name", ["gpt", "conv", "reused", *TINY])
def test_least_budget_is_feasible_and_one_byte_less_is_not(name):
    profile = larger_profile(name) if name not in TINY else tiny_profile(name)

    plan = solve(profile, profile.min_bytes)
    least = plan.forecast.peak_bytes
    smallest = Solver(profile).least().outcome.peak_bytes + profile.scratch_bytes

    assert least <= profile.min_bytes
    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(profile, smallest - 1)
    assert caught.value.smallest_bytes == smallest
    assert caught.value.budget_bytes == smallest - 1
    assert sum(caught.value.breakdown.values()) == smallest
    # What the error names is a budget that works.
    assert solve(profile, caught.value.smallest_bytes).forecast.peak_bytes <= smallest


def test_smallest_bytes_is_what_the_profile_promised():
    profile = larger_profile("gpt")

    with pytest.raises(InfeasibleBudgetError) as caught:
        solve(profile, profile.min_bytes - 1)

    assert caught.value.smallest_bytes == profile.min_bytes


@pytest.mark.parametrize("budget", [1, 100])
def test_hopeless_budget_is_refused_with_numbers(budget):
    with pytest.raises(InfeasibleBudgetError, match=f"no plan fits {budget} B") as caught:
        solve(tiny_profile("gelu"), budget)
    assert "Raise the budget" in str(caught.value)


def test_ample_budget_gives_a_plan_that_does_nothing():
    profile = larger_profile("gpt")

    plan = solve(profile, profile.peak_bytes)

    assert plan.is_plain
    assert plan.gap == 0.0
    assert plan.levers == ()
    assert plan.forecast.peak_bytes == profile.peak_bytes
    assert plan.forecast.slowdown == 1.0


def test_without_recompute_only_the_plain_step_is_allowed():
    profile = larger_profile("gpt")
    solver = Solver(profile)

    assert solver.solve_without_recompute(profile.peak_bytes).is_plain
    with pytest.raises(InfeasibleBudgetError) as caught:
        solver.solve_without_recompute(profile.peak_bytes - 1)
    assert caught.value.smallest_bytes == profile.peak_bytes


@pytest.mark.parametrize("name", ["gpt", "conv"])
def test_planning_is_deterministic(name):
    profile = larger_profile(name)
    budget = int(0.4 * profile.min_bytes + 0.6 * profile.peak_bytes)
    reused = Solver(profile)
    reused.solve(profile.min_bytes)  # what it worked out before must not matter

    plans = [solve(profile, budget), solve(type(profile).from_json(profile.to_json()), budget), reused.solve(budget)]

    assert plans[0] == plans[1] == plans[2]


def test_plan_survives_json(tmp_path):
    profile = larger_profile("gpt")
    plan = replace(solve(profile, profile.min_bytes), input_shapes=((3, 33),), notes=("a note",))

    plan.save(tmp_path / "plan.json")

    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


@pytest.mark.parametrize(
    "data", [{}, {"format": "memopt.profile", "version": 1}, {"format": "memopt.plan", "version": 99}]
)
def test_what_is_no_plan_is_refused(data):
    with pytest.raises(ValueError, match="not a memopt plan"):
        Plan.from_json(data)


def test_progress_is_told():
    lines = []

    solve(larger_profile("gpt"), larger_profile("gpt").min_bytes, progress=lines.append)

    assert lines


def test_model_without_anything_to_drop_is_plain_or_infeasible():
    profile = tiny_profile("one op")

    assert profile.min_bytes == profile.peak_bytes
    assert solve(profile, profile.peak_bytes).is_plain
    with pytest.raises(InfeasibleBudgetError):
        solve(profile, profile.peak_bytes - 1)


def test_square_loss_belongs_to_no_segment():
    # What is saved outside the model's forward is not a plan's to drop.
    torch.manual_seed(0)
    profile = profile_of(mlp((5, 3)), (torch.randn(4, 5),), square_loss)

    hooked = {s.value for s in profile.saved if s.is_hooked}

    assert not Simulator(profile).droppable & {s.value for s in profile.saved} - hooked
