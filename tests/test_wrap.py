"""`wrap_model` and `wrap_optimizer`: planned at the first training forward, and invisible otherwise."""

import copy
import inspect
import pickle
from functools import cache

import pytest
import torch
from small_models import (
    Everything,
    OpCounter,
    TinyGPT,
    adamw,
    allocator_peak,
    grads_of,
    held_bytes,
    one_thread,
    profile_of,
    same_bits,
    token_loss,
    train_step,
)
from torch import nn

import memopt
from memopt.errors import BudgetError, InfeasibleBudgetError, UnsupportedError
from memopt.session import Session


def ids_of(rows=3, length=19):
    return torch.randint(0, 157, (rows, length), generator=torch.Generator().manual_seed(7))


def gpt():
    torch.manual_seed(0)
    return TinyGPT(layers=2)


def gradients(model, ids=None, *, seed=3):
    model.zero_grad()
    torch.manual_seed(seed)
    token_loss(model(ids_of() if ids is None else ids)).backward()
    return grads_of(model)


@cache
def plain_gradients():
    return gradients(gpt())


def num_replayed(model, seed=3):
    counts = []
    for m in (gpt(), model):
        m.zero_grad()
        torch.manual_seed(seed)
        loss = token_loss(m(ids_of()))
        with OpCounter() as counter:
            loss.backward()
        counts.append(counter.counts)
    return (counts[1] - counts[0]).total()


# Wrapping


def test_wrap_model_returns_the_same_object():
    model = gpt()

    assert memopt.wrap_model(model, budget="24GiB") is model
    assert isinstance(memopt.session_of(model), Session)


def test_decorator_on_a_class():
    @memopt.wrap_model(budget="min")
    class Net(TinyGPT):
        """A net."""

    class Sub(Net):
        pass

    torch.manual_seed(0)
    net = Net(layers=2)

    assert inspect.isclass(Net)
    assert Net.__doc__ == "A net."
    assert isinstance(net, Net)
    assert "layers" in inspect.signature(Net).parameters
    assert memopt.session_of(net) is not None
    assert memopt.session_of(Sub(layers=1)) is None
    assert same_bits(plain_gradients(), gradients(net))
    assert memopt.session_of(net).plan.levers == ("recompute",)


def test_decorator_on_a_factory():
    @memopt.wrap_model(budget="min")
    def build(layers):
        """Builds."""
        torch.manual_seed(0)
        return TinyGPT(layers=layers)

    model = build(2)

    assert (build.__name__, build.__doc__) == ("build", "Builds.")
    assert same_bits(plain_gradients(), gradients(model))


def test_model_looks_as_before():
    model, plain = memopt.wrap_model(gpt(), budget="min"), gpt()
    gradients(model)

    assert type(model) is TinyGPT
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert repr(model) == repr(plain)


def test_second_wrap_is_refused():
    model = memopt.wrap_model(gpt(), budget="min")

    with pytest.raises(UnsupportedError, match="already"):
        memopt.wrap_model(model, budget="min")


@pytest.mark.parametrize("budget", ["24", "8G", "120%", -1, 0, True, None, 1.5, "much"])
def test_bad_budget_is_refused_at_once(budget):
    model = gpt()
    before = dict(model.__dict__)

    with pytest.raises(ValueError, match=r"budget|number of bytes|share|%"):
        memopt.wrap_model(model, budget=budget)
    with pytest.raises(ValueError, match=r"budget|number of bytes|share|%"):
        memopt.wrap_model(budget=budget)
    assert model.__dict__ == before


def test_bad_budget_is_a_budget_error():
    with pytest.raises(BudgetError):
        memopt.wrap_model(gpt(), budget="24")


@pytest.mark.parametrize(
    ("allow", "kind"), [({"magic"}, ValueError), ({"offload"}, ValueError), ("shard", UnsupportedError)]
)
def test_lever_that_is_not_there_is_refused(allow, kind):
    model = gpt()
    with pytest.raises(kind) as caught:
        memopt.wrap_model(model, budget="min", allow=allow)
    assert isinstance(caught.value, UnsupportedError) is (kind is UnsupportedError)
    assert memopt.session_of(model) is None


@pytest.mark.parametrize("options", [{"nvme": "/tmp", "allow": {"recompute"}}, {"host_budget": "1GiB"}])
def test_wishes_that_contradict_each_other_are_an_error(options):
    model = gpt()
    with pytest.raises(ValueError, match="offload"):
        memopt.wrap_model(model, budget="min", **options)
    assert memopt.session_of(model) is None


@pytest.mark.parametrize("given", [TinyGPT, gpt, 3, "model"])
def test_what_is_no_module_is_refused(given):
    with pytest.raises(ValueError, match="wrap_model takes"):
        memopt.wrap_model(given, budget="min")


def test_wrap_optimizer_returns_the_same_object_and_counts_its_states():
    model, alone = memopt.wrap_model(gpt(), budget="24GiB"), memopt.wrap_model(gpt(), budget="24GiB")
    optimizer = adamw(model)

    assert memopt.wrap_optimizer(optimizer, model) is optimizer
    gradients(model)
    gradients(alone)

    ours, theirs = (memopt.session_of(m).profile for m in (model, alone))
    parameters = sum(s.num_bytes for s in ours.storages if s.kind.value == "parameter")
    assert ours.peak_bytes > theirs.peak_bytes + parameters


def test_wrap_optimizer_after_the_first_forward_plans_again():
    model = memopt.wrap_model(gpt(), budget="24GiB")
    gradients(model)
    first = memopt.session_of(model).profile

    memopt.wrap_optimizer(adamw(model), model)
    gradients(model)

    assert memopt.session_of(model).profile is not first
    assert memopt.session_of(model).profile.peak_bytes > first.peak_bytes


def test_wrap_optimizer_refuses_an_unwrapped_model_and_what_is_none():
    model = gpt()

    with pytest.raises(UnsupportedError, match="wrap_model"):
        memopt.wrap_optimizer(adamw(model), model)
    with pytest.raises(ValueError, match=r"torch\.optim\.Optimizer"):
        memopt.wrap_optimizer("adamw", memopt.wrap_model(model, budget="min"))


# Training


@pytest.mark.parametrize("budget", ["min", "24GiB", lambda p: (p.min_bytes + p.peak_bytes) // 2])
def test_training_gives_the_numbers_of_plain_torch(budget):
    model, plain = memopt.wrap_model(gpt(), budget=budget), gpt()
    optimizers = [memopt.wrap_optimizer(adamw(model), model), adamw(plain)]
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        torch.manual_seed(9)
        for _ in range(4):
            train_step(m, (ids_of(),), token_loss, optimizer)

    assert same_bits(plain.state_dict(), model.state_dict())


def test_planning_draws_no_random_number_and_calls_no_forward():
    torch.manual_seed(0)
    net = Everything()
    calls = []
    net.enter.register_forward_hook(lambda *_: calls.append(1))
    plain, x = copy.deepcopy(net), torch.randn(31, 12)
    memopt.wrap_model(net, budget="min")
    found = []
    for m in (plain, net):
        calls.clear()
        torch.manual_seed(4)
        m(x).sum().backward()
        found.append({"rng": torch.get_rng_state(), **grads_of(m), **m.state_dict()})
    assert same_bits(*found)
    assert calls == [1]


def test_first_forward_is_under_its_plan():
    model = memopt.wrap_model(gpt(), budget="min")

    assert num_replayed(model) > 0
    assert memopt.session_of(model).plan.levers == ("recompute",)


def test_steps_are_within_the_budget_from_the_second_on():
    with one_thread():
        torch.manual_seed(0)
        ids = ids_of(5, 97)
        model = TinyGPT(layers=4)
        profile = profile_of(model, (ids,), token_loss)
        budget = (2 * profile.min_bytes + profile.peak_bytes) // 3
        memopt.wrap_model(model, budget=budget)
        optimizer = memopt.wrap_optimizer(adamw(model), model)
        for _ in range(2):
            train_step(model, (ids,), token_loss, optimizer)
        optimizer.zero_grad()
        base = held_bytes(model, optimizer, (ids,))
        peak = base + allocator_peak(lambda: train_step(model, (ids,), token_loss, optimizer))

    assert peak <= budget + 4096


def test_larger_inputs_plan_again_and_smaller_ones_do_not():
    model = memopt.wrap_model(gpt(), budget="min")
    session = memopt.session_of(model)
    plain = gpt()
    profiles = []
    for rows, length in ((3, 19), (3, 19), (2, 11), (5, 23), (4, 20), (3, 19), (1, 30)):
        ids = ids_of(rows, length)
        assert same_bits(gradients(plain, ids), gradients(model, ids))
        profiles.append(session.profile)

    is_new = [a is not b for a, b in zip(profiles, [None, *profiles], strict=False)]
    assert is_new == [True, False, False, True, False, False, True]


def test_ample_budget_records_nothing(monkeypatch):
    from memopt import tape

    def enter(self):
        raise AssertionError("a recording began")

    monkeypatch.setattr(tape.Recording, "__enter__", enter)
    model = memopt.wrap_model(gpt(), budget="24GiB")

    assert same_bits(plain_gradients(), gradients(model))
    assert memopt.session_of(model).plan.is_plain


def test_no_plan_is_made_without_gradients():
    model = memopt.wrap_model(gpt(), budget="min")
    with torch.no_grad():
        model(ids_of())
    with torch.inference_mode():
        model.eval()(ids_of())

    assert memopt.session_of(model).plan is None
    assert "no plan yet" in memopt.session_of(model).report()


def test_infeasible_budget_leaves_a_usable_model():
    model = gpt()
    before = dict(model.__dict__)
    memopt.wrap_model(model, budget="1KiB")
    session = memopt.session_of(model)

    for _ in range(2):  # not only the first time
        with pytest.raises(InfeasibleBudgetError, match="no plan fits"):
            model(ids_of())

    session.remove()
    assert model.__dict__ == before
    assert same_bits(plain_gradients(), gradients(model))
    memopt.wrap_model(model, budget="min")
    assert same_bits(plain_gradients(), gradients(model))


class DataDependent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x)) * 1.5
            if x.sum().item() > 1e9:
                x = x * 2
        return x[x[:, 0] > -1e9]


def test_forward_that_cannot_be_profiled_trains_with_a_note():
    torch.manual_seed(0)
    plain, x = DataDependent(), torch.randn(7, 13)
    model = memopt.wrap_model(copy.deepcopy(plain), budget="min")
    for m in (plain, model):
        m(x).sum().backward()

    assert same_bits(grads_of(plain), grads_of(model))
    assert "note: no plan for DataDependent" in memopt.session_of(model).report()


# Copies, removal, reports


def test_deepcopy_trains_on_its_own_weights_under_its_own_plan():
    model = memopt.wrap_model(gpt(), budget="min")
    gradients(model)
    own = copy.deepcopy(model)
    with torch.no_grad():
        for p in own.parameters():
            p.mul_(0.5)
    expected = gpt()
    expected.load_state_dict(own.state_dict())
    model.zero_grad()

    assert same_bits(gradients(expected), gradients(own))
    assert all(p.grad is None for p in model.parameters())
    assert memopt.session_of(own) is not memopt.session_of(model)
    assert memopt.session_of(own).plan is not None
    assert memopt.session_of(own).plan is not memopt.session_of(model).plan


def test_optimizer_of_a_deepcopy_is_counted_in_its_plan():
    model = memopt.wrap_model(gpt(), budget="24GiB")
    own = copy.deepcopy(model)
    memopt.wrap_optimizer(adamw(own), own)
    gradients(own)
    gradients(model)
    memopt.session_of(own).measure(lambda: gradients(own))

    assert memopt.session_of(model).profile is not None
    assert memopt.session_of(own).profile is not None
    assert memopt.session_of(own).profile.peak_bytes > memopt.session_of(model).profile.peak_bytes


def test_session_of_a_deepcopy_can_be_removed():
    model = memopt.wrap_model(gpt(), budget="min")
    own = copy.deepcopy(model)

    memopt.session_of(own).remove()

    assert memopt.session_of(own) is None
    assert memopt.session_of(model) is not None


def test_report_of_a_deepcopy_tells_its_own_plan():
    model = memopt.wrap_model(gpt(), budget="min")
    own = copy.deepcopy(model)
    gradients(own)

    assert "forecast peak" in memopt.session_of(own).report()
    assert "no plan yet" in memopt.session_of(model).report()


def test_pickle_gives_the_plain_model():
    model = memopt.wrap_model(gpt(), budget="min")
    gradients(model)

    again = pickle.loads(pickle.dumps(model))

    assert memopt.session_of(again) is None
    assert same_bits(plain_gradients(), gradients(again))


def test_remove_restores_the_model():
    model = gpt()
    before = dict(model.__dict__)
    memopt.wrap_model(model, budget="min")
    session = memopt.session_of(model)
    gradients(model)
    session.remove()
    session.remove()

    assert model.__dict__ == before
    assert same_bits(plain_gradients(), gradients(model))
    assert num_replayed(model) == 0


def test_report_tells_budget_forecast_and_measurement():
    model = memopt.wrap_model(gpt(), budget="min")
    session = memopt.session_of(model)
    optimizer = memopt.wrap_optimizer(adamw(model), model)
    for _ in range(2):
        train_step(model, (ids_of(),), token_loss, optimizer)

    result = session.measure(lambda: gradients(model).keys())

    assert result == plain_gradients().keys()
    assert session.measured.peak_bytes > 0
    report = session.report()
    assert f"({session.plan.budget_bytes} B)" in report
    assert "forecast peak" in report
    assert "measured peak" in report
    assert "measured step" in report


def test_missing_optimizer_is_a_line_in_the_report():
    model = memopt.wrap_model(gpt(), budget="min")
    gradients(model)

    assert "note: no optimizer given" in memopt.session_of(model).report()
