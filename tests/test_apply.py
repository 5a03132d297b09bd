"""What `apply` puts on a model, what it leaves alone, and that it comes off again."""

import copy
import inspect
import io
import pickle
from dataclasses import replace
from functools import cache

import pytest
import torch
from small_models import (
    ConvNet,
    OpCounter,
    TinyGPT,
    adamw,
    allocator_peak,
    grads_of,
    held_bytes,
    mlp,
    one_thread,
    plan_dropping,
    profile_of,
    same_bits,
    square_loss,
    token_loss,
    train_step,
)
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.flop_counter import FlopCounterMode

import memopt
from memopt import tape
from memopt.apply import attachment_of, decisions_of
from memopt.errors import UnsupportedError
from memopt.policies.plan import Drop
from memopt.profiler.profile import OpKey


def ids_of(rows=3, length=19):
    return torch.randint(0, 157, (rows, length), generator=torch.Generator().manual_seed(7))


def gpt():
    torch.manual_seed(0)
    return TinyGPT(layers=2)


@cache
def gpt_profile():
    return profile_of(gpt(), (ids_of(),), token_loss)


@cache
def gpt_plan():
    return plan_dropping(gpt_profile())


def gradients(model, ids=None, *, seed=3):
    """Gradients of one forward and backward from the same place in the generator."""
    model.zero_grad()
    torch.manual_seed(seed)
    token_loss(model(ids_of() if ids is None else ids)).backward()
    return grads_of(model)


@cache
def plain_gradients():
    return gradients(gpt())


def num_replayed(model, ids=None):
    """Ops of a backward beyond those of plain torch."""
    plain = gpt().train(model.training)
    counts = []
    for m in (plain, model):
        torch.manual_seed(3)
        loss = token_loss(m(ids_of() if ids is None else ids))
        m.zero_grad()
        with OpCounter() as counter:
            loss.backward()
        counts.append(counter.counts)
    return (counts[1] - counts[0]).total()


# On


def test_first_forward_is_under_the_plan_already():
    model = gpt()

    with memopt.apply(gpt_plan(), model):
        assert num_replayed(model) > 0


def test_first_step_is_within_the_budget():
    with one_thread():
        torch.manual_seed(0)
        model, ids = TinyGPT(layers=4), ids_of(5, 97)
        optimizer = adamw(model)
        profile = profile_of(model, (ids,), token_loss, optimizer=optimizer)
        plan = memopt.plan(profile, "min")
        # States and gradients as in any later step, without a forward under the plan.
        train_step(model, (ids,), token_loss, optimizer)
        optimizer.zero_grad()
        with memopt.apply(plan, model, optimizer):
            base = held_bytes(model, optimizer, (ids,))
            peak = base + allocator_peak(lambda: train_step(model, (ids,), token_loss, optimizer))

    assert peak <= plan.budget_bytes + 4096


def test_step_after_a_new_plan_is_under_it():
    model = gpt()
    for _ in range(2):
        session = memopt.apply(replace(gpt_plan(), notes=("another",)), model)
        assert num_replayed(model) > 0
        session.remove()


def test_numbers_are_those_of_plain_torch():
    model = gpt()

    with memopt.apply(gpt_plan(), model):
        assert all(same_bits(plain_gradients(), gradients(model)) for _ in range(3))
        assert num_replayed(model) > 0


def test_plan_with_nothing_to_do_installs_nothing():
    model = gpt()
    before = dict(model.__dict__)

    session = memopt.apply(memopt.plan(gpt_profile(), "1TiB"), model)

    assert model.__dict__ == before
    assert "nothing to do" in session.report()
    session.remove()
    assert model.__dict__ == before


def test_second_apply_is_refused_until_the_first_is_removed():
    model = gpt()
    session = memopt.apply(gpt_plan(), model)

    for plan in (gpt_plan(), memopt.plan(gpt_profile(), "1TiB")):
        with pytest.raises(UnsupportedError, match="already"):
            memopt.apply(plan, model)

    session.remove()
    memopt.apply(gpt_plan(), model).remove()


@pytest.mark.parametrize(("plan", "model"), [(None, nn.Linear(2, 2)), ("24GiB", nn.Linear(2, 2)), ("plan", object())])
def test_wrong_arguments_are_refused(plan, model):
    with pytest.raises(ValueError, match="apply takes"):
        memopt.apply(gpt_plan() if plan == "plan" else plan, model)


def test_scripted_module_is_refused():
    with pytest.warns(), pytest.raises(UnsupportedError, match="script"):
        memopt.apply(gpt_plan(), torch.jit.script(nn.Linear(3, 3)))


# Looks as before


def test_model_looks_as_before():
    model, plain = gpt(), gpt()
    with memopt.apply(gpt_plan(), model):
        assert isinstance(model, TinyGPT)
        assert type(model) is TinyGPT
        assert model.state_dict().keys() == plain.state_dict().keys()
        assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        assert inspect.signature(model.forward) == inspect.signature(plain.forward)
        assert model.forward.__name__ == "forward"
        assert model.forward.__doc__ == plain.forward.__doc__
        assert repr(model) == repr(plain)
        plain.load_state_dict(model.state_dict())


def test_pickle_gives_the_plain_model():
    model = gpt()
    with memopt.apply(gpt_plan(), model):
        again = pickle.loads(pickle.dumps(model))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        saved = torch.load(file, weights_only=False)

    for copied in (again, saved):
        assert "forward" not in copied.__dict__ or copied.forward.__func__ is TinyGPT.forward
        assert attachment_of(copied) is None
        assert same_bits(plain_gradients(), gradients(copied))


def test_deepcopy_trains_on_its_own_weights_under_its_own_plan():
    model = gpt()
    with memopt.apply(gpt_plan(), model):
        own = copy.deepcopy(model)
        with torch.no_grad():
            for p in own.parameters():
                p.mul_(0.5)
        expected = gpt()
        expected.load_state_dict(own.state_dict())

        model.zero_grad()
        assert same_bits(gradients(expected), gradients(own))
        assert all(p.grad is None for p in model.parameters())
        assert num_replayed(own) > 0
        assert attachment_of(own) is not attachment_of(model)
        assert same_bits(plain_gradients(), gradients(model))

    assert attachment_of(own) is not None  # removing the original leaves the copy
    assert same_bits(gradients(expected), gradients(own))


# Off


def test_remove_restores_the_model():
    model = gpt()
    before = dict(model.__dict__)

    session = memopt.apply(gpt_plan(), model)
    gradients(model)
    session.remove()
    session.remove()

    assert model.__dict__ == before
    assert num_replayed(model) == 0
    assert same_bits(plain_gradients(), gradients(model))


def test_remove_restores_a_forward_of_the_instances_own():
    model = gpt()
    calls = []
    original = model.forward

    def forward(ids):
        calls.append(1)
        return original(ids)

    model.forward = forward
    with memopt.apply(gpt_plan(), model):
        assert same_bits(plain_gradients(), gradients(model))
        assert calls == [1]
    assert model.forward is forward


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_leaving_by_an_exception_restores_the_model(kind):
    model = gpt()
    before = dict(model.__dict__)

    def train():
        with memopt.apply(gpt_plan(), model):
            model(ids_of())
            raise kind("stop")

    with pytest.raises(kind):
        train()

    assert model.__dict__ == before


def test_remove_while_a_graph_is_pending_leaves_backward_right():
    model = gpt()
    session = memopt.apply(gpt_plan(), model)
    gradients(model)
    model.zero_grad()
    torch.manual_seed(3)
    loss = token_loss(model(ids_of()))

    session.remove()
    loss.backward()

    assert same_bits(plain_gradients(), grads_of(model))


def test_exception_in_forward_can_be_followed_by_remove():
    model = gpt()
    before = dict(model.__dict__)
    session = memopt.apply(gpt_plan(), model)
    with pytest.raises((RuntimeError, IndexError)):
        model(torch.full((3, 19), 10**6))  # no such token

    assert same_bits(plain_gradients(), gradients(model))
    session.remove()
    assert model.__dict__ == before


def test_session_does_not_keep_the_model_alive():
    import gc
    import weakref

    model = gpt()
    session = memopt.apply(gpt_plan(), model)
    ref = weakref.ref(model)
    del model
    gc.collect()

    assert ref() is None
    session.remove()


# Left alone


@pytest.fixture
def nothing_recorded(monkeypatch):
    """Fails when a recording begins."""

    def enter(self):
        raise AssertionError("a recording began")

    monkeypatch.setattr(tape.Recording, "__enter__", enter)


@pytest.mark.usefixtures("nothing_recorded")
def test_forward_without_gradients_is_untouched():
    model, plain = gpt().eval(), gpt().eval()
    ids = ids_of()
    with memopt.apply(gpt_plan(), model):
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert same_bits(model(ids), plain(ids))


@pytest.mark.usefixtures("nothing_recorded")
def test_functional_transforms_are_untouched():
    torch.manual_seed(0)
    model, x = mlp(), torch.randn(5, 29)
    parameters = dict(model.named_parameters())

    def loss(ps, row):
        return torch.func.functional_call(model, ps, (row,)).square().sum()

    expected = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    with memopt.apply(replace(gpt_plan()), model):
        found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
        _, tangents = torch.func.jvp(lambda y: model(y), (x,), (torch.ones_like(x),))
    assert same_bits(expected, found)
    assert tangents.shape == (5, 11)


@pytest.mark.parametrize("around", ["hooks", "mode", "forbidden"])
def test_what_is_around_a_forward_is_respected_and_told(around):
    model = gpt()
    contexts = {
        "hooks": save_on_cpu,
        "mode": lambda: FlopCounterMode(display=False),
        "forbidden": lambda: torch.autograd.graph.disable_saved_tensors_hooks("no"),
    }
    with memopt.apply(gpt_plan(), model) as session:
        model.zero_grad()
        torch.manual_seed(3)
        with contexts[around]():
            loss = token_loss(model(ids_of()))
        loss.backward()
        assert same_bits(plain_gradients(), grads_of(model))
        assert "a forward ran without its plan" in session.report()


def test_eval_with_gradients_gives_plain_numbers():
    model, plain = gpt().eval(), gpt().eval()
    with memopt.apply(gpt_plan(), model):
        assert same_bits(gradients(plain), gradients(model))


def test_other_batch_sizes_give_plain_numbers():
    model, plain = gpt(), gpt()
    with memopt.apply(gpt_plan(), model):
        for rows, length in ((1, 1), (2, 19), (7, 31)):
            ids = ids_of(rows, length)
            assert same_bits(gradients(plain, ids), gradients(model, ids))


def test_ops_that_this_torch_does_not_have_are_left_out():
    plan = replace(
        gpt_plan(),
        drops=tuple(
            Drop(OpKey("", op, 0), (0,))
            for op in ("aten.nothing.default", "nothing", "", ".", "aten..", "aten.add.Tensor", "aten.__name__.x")
        ),
    )

    decisions = decisions_of(plan)

    assert decisions == {"": {torch.ops.aten.add.Tensor: {0: tape.Fate(drops=(0,))}}}


# Measuring and telling


def test_measure_gives_the_steps_result_and_sets_the_peak():
    with one_thread():
        model, ids = gpt(), ids_of()
        optimizer = adamw(model)
        plan = memopt.plan(gpt_profile(), "min")
        with memopt.apply(plan, model, optimizer) as session:
            assert session.measured.peak_bytes is None
            train_step(model, (ids,), token_loss, optimizer)
            optimizer.zero_grad()

            result = session.measure(lambda: (train_step(model, (ids,), token_loss, optimizer), "done")[1])

            assert result == "done"
            assert session.measured.peak_bytes is not None
            held = held_bytes(model, optimizer)
            assert held < session.measured.peak_bytes <= plan.budget_bytes + 4096
            assert session.measured.step_s > 0
            report = session.report()
    assert "measured peak" in report
    assert "measured step" in report


def test_report_tells_budget_forecast_and_notes():
    plan = replace(memopt.plan(gpt_profile(), "min"), notes=("something to know",))
    with memopt.apply(plan, gpt()) as session:
        session.note("seen on the way")
        session.note("seen on the way")
        report = session.report()

    assert f"({plan.budget_bytes} B)" in report
    assert "forecast peak" in report
    assert plan.forecast.peak_at in report
    assert "note: something to know" in report
    assert report.count("note: seen on the way") == 1
    assert len(report.splitlines()) < 12


@pytest.mark.parametrize("build", [ConvNet, mlp])
def test_training_ends_at_the_same_weights(build):
    x = torch.randn(5, 3, 9, 11) if build is ConvNet else torch.randn(5, 29)
    torch.manual_seed(0)
    plain = build()
    model = copy.deepcopy(plain)
    plan = plan_dropping(profile_of(model, (x,)))
    with memopt.apply(plan, model):
        for m in (plain, model):
            optimizer = adamw(m)
            for _ in range(4):
                train_step(m, (x,), square_loss, optimizer)
    assert same_bits(plain.state_dict(), model.state_dict())
