"""Find the fastest plan that the simulator finds within the budget.

For each way to divide the forward into segments (graph.py) every segment has a convex hull of options. Starting from
the least memory, the steps along all hulls are taken in the order of seconds saved per byte, as far as the simulator
accepts (a bisection), and what is left of the budget is spent on single values. The best division wins. A Lagrangian
bound over the whole forward says how far from the best any plan could be.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace

from memopt.errors import InfeasibleBudgetError
from memopt.policies.graph import ForwardGraph, Segment, lower_bound_s
from memopt.policies.plan import Drop, Forecast, Plan
from memopt.policies.simulate import Outcome, Simulator
from memopt.profiler.profile import Kind, Profile

Progress = Callable[[str], None]

_NUM_TOGGLES = 24  # single values tried for the least peak
_NUM_FILL_TRIES = 48  # single values tried when a budget is almost spent
_NOTHING: frozenset[int] = frozenset()
_MODEL_STATE = {Kind.PARAMETER.value, Kind.GRADIENT.value, Kind.OPTIMIZER_STATE.value}


@dataclass(frozen=True, slots=True)
class Found:
    """A choice of values to drop, and what the simulator says of it."""

    dropped: frozenset[int]
    outcome: Outcome
    moved: frozenset[int] = frozenset()
    gap: float = 0.0


@dataclass(frozen=True, slots=True)
class _Step:
    """One move along a segment's hull, from one option to the next one that keeps more."""

    segment: int
    option: int  # that it leads to
    seconds_per_byte: float


class Solver:
    """Plans for one profile; divisions and hulls are worked out once and serve every budget."""

    def __init__(self, profile: Profile, progress: Progress | None = None, like: Solver | None = None) -> None:
        """`like` solves the same ops with other lifetimes of the model's state: what follows from the ops is shared."""
        self.profile = profile
        self.simulator = Simulator(profile)
        self.graph: ForwardGraph = like.graph if like is not None else ForwardGraph(profile, self.simulator)
        self.scratch_bytes = profile.scratch_bytes
        self.plain = self.simulator.run(_NOTHING)
        self._progress = progress or (lambda text: None)
        self._prices: list[float] = like._prices if like is not None else self.graph.prices()
        self._least: Found | None = None
        self._like = like
        self._divisions: list[list[Segment]] | None = None
        self._outcomes: dict[frozenset[int], Outcome] = {_NOTHING: self.plain}

    @property
    def divisions(self) -> list[list[Segment]]:
        if self._divisions is None and self._like is not None:
            self._divisions = self._like.divisions
        if self._divisions is None:
            self._progress("pricing activations")
            self._divisions = [
                [self.graph.segment(start, stop, self._prices) for start, stop in division]
                for division in self.graph.divisions()
            ]
        return self._divisions

    def run(self, dropped: frozenset[int]) -> Outcome:
        if dropped not in self._outcomes:
            self._outcomes[dropped] = self.simulator.run(dropped)
        return self._outcomes[dropped]

    def peak_bytes(self, outcome: Outcome) -> int:
        return outcome.peak_bytes + self.scratch_bytes

    # The least

    def least(self) -> Found:
        """The choice with the smallest peak that was found."""
        if self._least is None:
            best = Found(_NOTHING, self.plain)
            for segments in self.divisions:
                steps = _steps_of(segments)
                for taken in sorted({len(steps) * share // 8 for share in (0, 1, 2, 4, 6)}):
                    best = self._smaller(best, _dropped_after(segments, steps[:taken]))
            self._least = self._toggled(best)
        return self._least

    def _toggled(self, best: Found) -> Found:
        """Keep or drop single values, the largest first, while the peak falls."""
        sizes = self.simulator.bytes_of
        values = sorted(self.graph.saved | best.dropped, key=lambda v: (-sizes[v], v))[:_NUM_TOGGLES]
        for _ in range(2):
            before = best
            for v in values:
                best = self._smaller(best, best.dropped ^ {v})
            if best is before:
                break
        return best

    def _smaller(self, best: Found, dropped: frozenset[int]) -> Found:
        outcome = self.run(dropped)
        if (outcome.peak_bytes, outcome.step_s) < (best.outcome.peak_bytes, best.outcome.step_s):
            return Found(dropped, outcome)
        return best

    # The fastest within a budget

    def solve(self, budget_bytes: int) -> Plan:
        """The fastest plan found whose simulated peak is at most `budget_bytes`.

        Raises InfeasibleBudgetError with the smallest budget for which a plan was found.
        """
        return self.plan(budget_bytes, self.find(budget_bytes))

    def find(self, budget_bytes: int) -> Found:
        """The choice that `solve` makes a plan of."""
        room = budget_bytes - self.scratch_bytes
        if self.plain.peak_bytes <= room:
            return Found(_NOTHING, self.plain)
        least = self.least()
        if least.outcome.peak_bytes > room:
            raise self._infeasible(budget_bytes, least)
        best = least
        for number, segments in enumerate(self.divisions, 1):
            self._progress(f"planning, division {number} of {len(self.divisions)}")
            found = self._best_in(segments, room)
            if found and found.outcome.step_s < best.outcome.step_s:
                best = found
        best = self._spend_the_rest(best, room)
        # Whatever was tried for this or another budget is a plan too: a larger budget never loses to a smaller one.
        fastest = min((o.step_s, i) for i, o in enumerate(self._outcomes.values()) if o.peak_bytes <= room)
        if fastest[0] < best.outcome.step_s:
            best = Found(*list(self._outcomes.items())[fastest[1]])
        bound = lower_bound_s(self.graph, self.simulator, room, self._prices[::2]) + self.simulator.record_s
        return replace(best, gap=max(0.0, 1 - bound / best.outcome.step_s))

    def solve_without_recompute(self, budget_bytes: int) -> Plan:
        """The plain step if it fits. Raises InfeasibleBudgetError if not."""
        found = Found(_NOTHING, self.plain)
        if self.peak_bytes(self.plain) > budget_bytes:
            raise self._infeasible(budget_bytes, found)
        return self.plan(budget_bytes, found)

    def _best_in(self, segments: list[Segment], room: int) -> Found | None:
        """Take as many steps along the hulls as fit."""
        steps = _steps_of(segments)
        low, high = 0, len(steps)  # low fits, high does not
        dropped = _dropped_after(segments, [])
        best = Found(dropped, self.run(dropped))
        if best.outcome.peak_bytes > room:
            # A replay's own working set can be what is too large: keeping a little more may fit.
            for share in (8, 4, 2):
                low = len(steps) // share
                dropped = _dropped_after(segments, steps[:low])
                best = Found(dropped, self.run(dropped))
                if best.outcome.peak_bytes <= room:
                    break
            else:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            dropped = _dropped_after(segments, steps[:middle])
            outcome = self.run(dropped)
            if outcome.peak_bytes <= room:
                low, best = middle, Found(dropped, outcome)
            else:
                high = middle
        return self._skip_ahead(segments, steps, low, best, room)

    def _skip_ahead(self, segments: list[Segment], steps: list[_Step], taken: int, best: Found, room: int) -> Found:
        """After the first step that does not fit, try smaller ones further on."""
        chosen = steps[:taken]
        blocked = {steps[taken].segment} if taken < len(steps) else set()
        tries = 0
        for step in steps[taken + 1 :]:
            if step.segment in blocked:
                continue
            dropped = _dropped_after(segments, [*chosen, step])
            outcome = self.run(dropped)
            tries += 1
            if outcome.peak_bytes <= room and outcome.step_s < best.outcome.step_s:
                chosen.append(step)
                best = Found(dropped, outcome)
            else:
                blocked.add(step.segment)
            if tries >= 12:
                break
        return best

    def _spend_the_rest(self, best: Found, room: int) -> Found:
        """Keep single values, dearest per byte first, while the simulator says that they fit and save time."""
        profile, sizes = self.profile, self.simulator.bytes_of
        for _ in range(2):
            worth = sorted(
                best.dropped,
                key=lambda v: (-profile.ops[profile.values[v].maker].seconds / max(1, sizes[v]), -v),
            )
            before = best
            tries = 0
            for v in worth:
                slack = room - best.outcome.peak_bytes
                if sizes[v] > max(slack, 0) + self.plain.peak_bytes // 100 or tries >= _NUM_FILL_TRIES:
                    continue
                dropped = self._without(best.dropped, v)
                outcome = self.run(dropped)
                tries += 1
                if outcome.peak_bytes <= room and outcome.step_s < best.outcome.step_s:
                    best = Found(dropped, outcome)
            if best is before:
                break
        return best

    def _without(self, dropped: frozenset[int], v: int) -> frozenset[int]:
        """`dropped` without v, and without what was only dropped to make v again."""
        rest = set(dropped - {v})
        reads = {u for w in rest for u in self.profile.ops[self.profile.values[w].maker].reads}
        stack = [u for u in self.profile.ops[self.profile.values[v].maker].reads if u in rest]
        while stack:
            u = stack.pop()
            if u in rest and u not in self.graph.saved and u not in reads:
                rest.discard(u)
                reads = {x for w in rest for x in self.profile.ops[self.profile.values[w].maker].reads}
                stack.extend(x for x in self.profile.ops[self.profile.values[u].maker].reads if x in rest)
        return frozenset(rest)

    # The answer

    def plan(self, budget_bytes: int, found: Found) -> Plan:
        """A choice written down."""
        return Plan(
            budget_bytes=budget_bytes,
            drops=self._by_op(found.dropped),
            moves=self._by_op(found.moved),
            forecast=self.forecast(found),
            gap=found.gap,
            levers=("recompute",) if found.dropped else (),
            notes=self.profile.notes,
        )

    def _by_op(self, values: Set[int]) -> tuple[Drop, ...]:
        profile = self.profile
        by_op: dict[int, list[int]] = {}
        for v in values:
            op = profile.values[v].maker
            position = profile.ops[op].positions[profile.ops[op].makes.index(v)]
            by_op.setdefault(op, []).append(position)
        return tuple(Drop(profile.ops[op].key, tuple(sorted(by_op[op]))) for op in sorted(by_op))

    def forecast(self, found: Found) -> Forecast:
        outcome = found.outcome
        breakdown = self.simulator.breakdown(found.dropped, outcome, found.moved)
        if self.scratch_bytes:
            breakdown["kernel scratch"] = self.scratch_bytes
        return Forecast(
            peak_bytes=self.peak_bytes(outcome),
            step_s=outcome.step_s,
            plain_peak_bytes=self.peak_bytes(self.plain),
            plain_step_s=self.simulator.plain_s,
            recompute_s=outcome.recompute_s,
            peak_at=self._where(outcome.peak_at),
            breakdown=breakdown,
        )

    def _where(self, moment: int) -> str:
        """Phase and module of the op that runs at an event."""
        name = "start of the step"
        for op in self.profile.ops:
            if op.at > moment:
                break
            name = f"{op.phase.value}, {op.key.module or op.key.op}"
        return name

    def _infeasible(self, budget_bytes: int, least: Found) -> InfeasibleBudgetError:
        breakdown = self.simulator.breakdown(least.dropped, least.outcome)
        if self.scratch_bytes:
            breakdown["kernel scratch"] = self.scratch_bytes
        return InfeasibleBudgetError(
            budget_bytes, self.peak_bytes(least.outcome), breakdown, self._remedies(breakdown), self.profile.device
        )

    def _remedies(self, breakdown: dict[str, int]) -> tuple[str, ...]:
        remedies = []
        if breakdown.get("activation", 0) + breakdown.get("recomputed", 0) + breakdown.get("temporary", 0) > 0:
            remedies.append("use a smaller micro-batch or a shorter sequence")
        if self.profile.device == "cpu" and _MODEL_STATE & breakdown.keys():
            remedies.append('keep model state on a disk: nvme="/path"')
        return tuple(remedies)


def _steps_of(segments: list[Segment]) -> list[_Step]:
    """All moves along the hulls, the most seconds saved per byte first; among equals the later segment first: what it
    keeps is freed earlier in backward."""
    steps = []
    for number, segment in enumerate(segments):
        ratio = float("inf")
        for i in range(1, len(segment.options)):
            a, b = segment.options[i - 1], segment.options[i]
            ratio = min(ratio, (a.seconds - b.seconds) / max(1, b.kept_bytes - a.kept_bytes))
            steps.append(_Step(number, i, ratio))
    return sorted(steps, key=lambda s: (-s.seconds_per_byte, -s.segment, s.option))


def _dropped_after(segments: list[Segment], steps: list[_Step]) -> frozenset[int]:
    chosen = [0] * len(segments)
    for step in steps:
        chosen[step.segment] = max(chosen[step.segment], step.option)
    return frozenset().union(*(s.options[i].dropped for s, i in zip(segments, chosen, strict=True)))


def solve(profile: Profile, budget_bytes: int, progress: Progress | None = None) -> Plan:
    """The fastest plan found for `profile` within `budget_bytes`. Raises InfeasibleBudgetError."""
    return Solver(profile, progress).solve(budget_bytes)


def least_peak_bytes(profile: Profile) -> int:
    """The smallest peak for which `solve` finds a plan: what a profile calls `min_bytes`."""
    solver = Solver(profile)
    return solver.peak_bytes(solver.least().outcome)
