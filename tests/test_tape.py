"""The tape: whatever is dropped, the numbers, the memory and the process are as plain torch has them."""

import contextlib
import gc
import random
import threading
import weakref
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import (
    ConvNet,
    Everything,
    OpCounter,
    Reused,
    TinyGPT,
    allocator_peak,
    grads_of,
    mlp,
    plan_dropping,
    profile_of,
    same_bits,
    square_loss,
    token_loss,
)
from torch import nn
from torch.nn.modules import module as torch_module
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from memopt import tape
from memopt.apply import decisions_of
from memopt.errors import ReplayError
from memopt.flags import backend_flags, under_flags
from memopt.policies.plan import Drop, Forecast, Plan
from memopt.profiler.frames import paths_of
from memopt.profiler.profile import OpKey
from memopt.tape import Recording

MODELS = {
    "mlp": (mlp, lambda: (torch.randn(23, 29),), square_loss),
    "gpt": (lambda: TinyGPT(layers=2), lambda: (torch.randint(0, 157, (2, 19)),), token_loss),
    "conv": (ConvNet, lambda: (torch.randn(3, 3, 9, 11),), square_loss),
    "tied": (lambda: TinyGPT(layers=2, tied=True), lambda: (torch.randint(0, 157, (2, 19)),), token_loss),
    "reused": (Reused, lambda: (torch.randn(13, 17),), square_loss),
    "everything": (Everything, lambda: (torch.randn(31, 12),), square_loss),
}


def built(name):
    torch.manual_seed(0)
    build, inputs, loss = MODELS[name]
    return build(), inputs(), loss


@cache
def full_plan(name):
    """A plan that drops whatever can be dropped."""
    model, inputs, loss = built(name)
    return plan_dropping(profile_of(model, inputs, loss))


def recording(model, inputs, plan):
    """A recording under the plan; None drops whatever can be replayed."""
    decisions = None if plan is None else decisions_of(plan)
    return Recording(decisions, paths_of(model), inputs=[x for x in inputs if isinstance(x, torch.Tensor)])


def run_forward(model, inputs, plan, *, is_plain=False):
    torch.manual_seed(1)
    with contextlib.nullcontext() if is_plain else recording(model, inputs, plan):
        return model(*inputs)


def both(name, use, plan="full"):
    """What `use(model, output, loss)` gives in plain torch and under the tape."""
    results = []
    for is_plain in (True, False):
        model, inputs, loss = built(name)
        chosen = full_plan(name) if plan == "full" else plan
        out = run_forward(model, inputs, chosen, is_plain=is_plain)
        results.append(use(model, out, loss))
    return results


PLANS = pytest.mark.parametrize("plan", ["full", None], ids=["planned", "drops all"])


# Numbers


@PLANS
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_equal_bit_for_bit(name, plan):
    def use(model, out, loss):
        value = loss(out)
        value.backward()
        return {"loss": value.detach(), "rng": torch.rand(3), **grads_of(model), **dict(model.named_buffers())}

    plain, ours = both(name, use, plan)

    assert same_bits(plain, ours)


@pytest.mark.parametrize("name", MODELS)
def test_something_is_dropped_and_replayed(name):
    # Else the tests here would say nothing.
    model, inputs, loss = built(name)
    with recording(model, inputs, full_plan(name)) as made:
        out = model(*inputs)
    assert made.num_nodes > 0
    assert any(ref() is not None for ref in made.handles)
    with OpCounter() as counter:
        loss(out).backward()
    assert counter.counts.total() > 0


@PLANS
@pytest.mark.parametrize("name", ["gpt", "conv", "everything", "reused"])
@pytest.mark.parametrize("times", [2, 3])
def test_backward_may_come_again_over_a_retained_graph(name, times, plan):
    def use(model, out, loss):
        value = loss(out)
        for i in range(times):
            value.backward(retain_graph=i < times - 1)
        return grads_of(model)

    plain, ours = both(name, use, plan)

    assert same_bits(plain, ours)


@PLANS
def test_double_backward_gives_the_same_numbers(plan):
    def use(model, out, loss):
        parameters = [p for p in model.parameters() if p.requires_grad]
        first = torch.autograd.grad(loss(out), parameters, create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        penalty.backward()
        return grads_of(model)

    for name in ("mlp", "reused"):
        plain, ours = both(name, use, plan)
        assert same_bits(plain, ours)


@PLANS
def test_backward_of_a_part_of_the_inputs(plan):
    def use(model, out, loss):
        some = [p for name, p in model.named_parameters() if "norm" in name or "out" in name]
        value = loss(out)
        grads = torch.autograd.grad(value, some, retain_graph=True)
        value.backward(inputs=some[:3], retain_graph=True)
        rest = torch.autograd.grad(value, list(model.parameters()))
        return dict(enumerate([*grads, *(p.grad for p in some), *rest]))

    plain, ours = both("gpt", use, plan)

    assert same_bits(plain, ours)


def test_two_losses_share_one_forward():
    def use(model, out, loss):
        loss(out).backward(retain_graph=True)
        (out.float().mean() * 3).backward()
        return grads_of(model)

    plain, ours = both("gpt", use)

    assert same_bits(plain, ours)


@cache
def everything_keys():
    """All op keys of one small net's profile."""
    model, inputs, loss = built("everything")
    return tuple(op.key for op in profile_of(model, inputs, loss).ops if op.key.op.startswith("aten."))


NONSENSE_OPS = (
    "aten.add_.Tensor", "aten.mul_.Tensor", "aten.relu_.default", "aten.bernoulli_.float",
    "aten.native_dropout.default",
    "aten.detach.default", "aten.view.default", "aten.t.default", "aten.clone.default", "aten.empty_like.default",
    "aten.native_batch_norm.default", "aten.no_such_op.default", "aten.add", "no.such.thing", "", "aten.rand.default",
    "aten._local_scalar_dense.default", "aten.div_.Scalar", "aten.empty.memory_format", "aten.addmm.default",
)  # fmt: skip
DROPS = st.builds(
    lambda key, op, module, call, positions: Drop(
        OpKey(key.module if module is None else module, key.op if op is None else op, call), tuple(positions)
    ),
    st.deferred(lambda: st.sampled_from(everything_keys())),
    st.none() | st.sampled_from(NONSENSE_OPS),
    st.none() | st.sampled_from(["", "enter", "norm", "middle", "drop", "act", "leave", "?", "no.such.module"]),
    st.integers(0, 4) | st.just(-1) | st.just(10**6),
    st.lists(st.integers(-2, 5), max_size=4),
)


def plan_of(drops):
    forecast = Forecast(peak_bytes=1, step_s=1.0, plain_peak_bytes=1, plain_step_s=1.0, recompute_s=0.0, peak_at="")
    return Plan(budget_bytes=1, drops=tuple(drops), forecast=forecast, gap=0.0, levers=("recompute",))


def trained(model, inputs, plan, *, is_plain=False, steps=2):
    """Everything that two training steps leave behind."""
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = {}
    for i in range(steps):
        optimizer.zero_grad()
        with contextlib.nullcontext() if is_plain else recording(model, inputs, plan):
            out = model(*inputs)
        loss = square_loss(out)
        loss.backward()
        found[f"loss {i}"] = loss.detach().clone()
        found.update({f"{n} {i}": g for n, g in grads_of(model).items()})
        optimizer.step()
    found.update({n: t.clone() for n, t in model.state_dict().items()})
    found["rng"] = torch.get_rng_state()
    return found


@cache
def plainly_trained():
    model, inputs, _ = built("everything")
    return trained(model, inputs, None, is_plain=True)


@given(st.lists(DROPS, max_size=40))
@settings(max_examples=150)
def test_no_table_of_decisions_changes_a_number(drops):
    model, inputs, _ = built("everything")

    assert same_bits(plainly_trained(), trained(model, inputs, plan_of(drops)))


@given(st.data())
@settings(max_examples=80)
def test_no_subset_of_the_ops_that_exist_changes_a_number(data):
    keys = everything_keys()
    chosen = data.draw(st.sets(st.sampled_from(keys), min_size=1))
    positions = data.draw(st.sampled_from([(0,), (0, 1), (0, 1, 2), (1, 2), (-1,), ()]))
    model, inputs, _ = built("everything")

    plan = plan_of(Drop(key, positions) for key in sorted(chosen, key=keys.index))

    assert same_bits(plainly_trained(), trained(model, inputs, plan))


@pytest.mark.parametrize("foreign", ["mlp", "gpt", "everything"])
@pytest.mark.parametrize("name", ["conv", "tied", "reused", "everything"])
def test_plan_for_another_model_changes_no_number(name, foreign):
    def use(model, out, loss):
        loss(out).backward()
        return grads_of(model)

    plain, ours = both(name, use, full_plan(foreign))

    assert same_bits(plain, ours)


@given(st.integers(-3, 3), st.integers(-1, 2))
@settings(max_examples=30)
def test_shifted_calls_and_positions_change_no_number(calls, positions):
    plan = plan_of(
        Drop(OpKey(d.key.module, d.key.op, d.key.call + calls), tuple(p + positions for p in d.positions))
        for d in full_plan("everything").drops
    )
    model, inputs, _ = built("everything")

    assert same_bits(plainly_trained(), trained(model, inputs, plan))


# Replays


@pytest.mark.parametrize("name", MODELS)
def test_each_node_replays_at_most_once_per_backward(name, monkeypatch):
    runs = []
    original = tape.Node.run
    monkeypatch.setattr(tape.Node, "run", lambda node: (runs.append(node), original(node))[1])
    model, inputs, loss = built(name)
    value = loss(run_forward(model, inputs, full_plan(name)))

    value.backward(retain_graph=True)
    first = len(runs)
    assert 0 < first == len(set(map(id, runs)))

    runs.clear()
    value.backward()
    assert len(runs) == len(set(map(id, runs))) <= first


@pytest.mark.parametrize("name", ["gpt", "everything"])
def test_random_ops_are_never_replayed(name, monkeypatch):
    names = []
    original = tape.Node.run
    monkeypatch.setattr(tape.Node, "run", lambda node: (names.append(node.func), original(node))[1])
    model, inputs, loss = built(name)

    loss(run_forward(model, inputs, None)).backward()

    assert names
    assert not [f for f in names if torch.Tag.nondeterministic_seeded in f.tags and "scaled_dot" not in str(f)]


class Chain(nn.Module):
    """Very many small ops in a row."""

    def __init__(self, num_ops):
        super().__init__()
        self.weight = nn.Parameter(torch.full((7,), 0.5))
        self.num_ops = num_ops

    def forward(self, x):
        y = x * self.weight
        for i in range(self.num_ops):
            y = torch.sin(y) if i % 2 else y * 1.01
        return y


def test_chain_of_3000_ops_needs_no_recursion_and_frees_its_memory():
    gc.collect()
    gc.disable()
    try:
        x = torch.linspace(-1, 1, 7)
        grads = []
        for is_plain in (True, False):
            model = Chain(3000)
            out = run_forward(model, (x,), None, is_plain=is_plain)
            storage = weakref.ref(out.untyped_storage())
            out.sum().backward()
            grads.append(model.weight.grad)
            del out
            assert storage() is None
        assert same_bits(grads[0], grads[1])
        # Never asked for: the graph goes at once, without recursion either.
        out = run_forward(Chain(3000), (x,), None)
        del out
    finally:
        gc.enable()


def test_custom_function_keeps_what_it_saves():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(x, y)
            return y * 2

        @staticmethod
        def backward(ctx, g):
            _, y = ctx.saved_tensors
            return g * y * 2

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)

        def forward(self, x):
            return self.b(Doubled.apply(torch.tanh(self.a(x))))

    torch.manual_seed(0)
    net, x = Net(), torch.randn(11, 5)
    square_loss(net(x)).backward()
    plain = grads_of(net)
    net.zero_grad()

    with recording(net, (x,), None) as made:
        out = net(x)
    held = [ref() for ref in made.handles]
    square_loss(out).backward()

    assert same_bits(plain, grads_of(net))
    assert all(h is None or h.size != (11, 7) or h.value.node.func is not torch.ops.aten.exp.default for h in held)


def test_value_that_the_user_detached_is_kept():
    # numpy writes into it, unseen: plain torch computes with what was written.
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)

        def forward(self, x):
            y = self.a(x) * 2.0
            y.detach().numpy()[0] = 3.0
            return self.b(torch.sin(y))

    torch.manual_seed(0)
    net, x = Net(), torch.randn(11, 5)
    square_loss(net(x)).backward()
    plain = grads_of(net)
    plan = plan_dropping(profile_of(Net(), (x,)))

    for chosen in (None, plan):
        net.zero_grad()
        square_loss(run_forward(net, (x,), chosen)).backward()
        assert same_bits(plain, grads_of(net))


# Writes


class WrittenAfterUse(nn.Module):
    """`a` is read by a replayable op and written afterwards."""

    def __init__(self, *, writes):
        super().__init__()
        self.enter, self.leave = nn.Linear(5, 7), nn.Linear(7, 3)
        self.writes = writes

    def forward(self, x):
        a = self.enter(x)  # made of the caller's input: kept, a source
        b = torch.sin(a * 2.0)  # the product is dropped; to make it again takes `a`
        if self.writes:
            a.add_(1.0)
        return self.leave(b + a)


@pytest.mark.parametrize("writes", [True, False])
def test_source_is_copied_before_a_write_and_only_then(writes, monkeypatch):
    copies = []
    original = tape.Source.copy_before_write
    monkeypatch.setattr(tape.Source, "copy_before_write", lambda s: (copies.append(s), original(s))[1])
    torch.manual_seed(0)
    net, x = WrittenAfterUse(writes=writes), torch.randn(11, 5)
    square_loss(net(x)).backward()
    plain = grads_of(net)
    net.zero_grad()
    plan = plan_of([Drop(OpKey("", "aten.mul.Tensor", 0), (0,))])

    with recording(net, (x,), plan) as made:
        out = net(x)
    assert made.num_nodes == 1
    square_loss(out).backward()

    assert same_bits(plain, grads_of(net))
    assert len(copies) == int(writes)


def test_write_from_outside_is_noticed_and_leaves_a_usable_model():
    model, inputs, loss = built("mlp")
    plan = full_plan("mlp")
    out = run_forward(model, inputs, plan)
    with torch.no_grad():
        model[2].bias.add_(1.0)  # plain torch saves no bias

    with pytest.raises(ReplayError, match=r"aten\.addmm.*version") as caught:
        loss(out).backward()
    assert caught.value.op == "aten.addmm.default"
    assert caught.value.shape == (103,)
    assert not getattr(tape._thread, "replaying", False)
    assert not tape.is_recording()

    # Afterwards all is as if nothing had been.
    found = []
    for is_plain in (True, False):
        model.zero_grad()
        loss(run_forward(model, inputs, plan, is_plain=is_plain)).backward()
        found.append(grads_of(model))
    assert same_bits(found[0], found[1])


def test_write_through_data_is_noticed():
    model, inputs, loss = built("mlp")
    out = run_forward(model, inputs, full_plan("mlp"))
    model[2].bias.data.mul_(2.0)

    with pytest.raises(ReplayError, match=r"aten\.addmm"):
        loss(out).backward()


def test_saved_tensor_written_in_place_raises_as_in_plain_torch():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter = nn.Linear(5, 7)

        def forward(self, x):
            y = self.enter(x) * 2.0
            z = torch.sin(y)
            y.add_(1.0)
            return z

    torch.manual_seed(0)
    net, x = Net(), torch.randn(3, 5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        net(x).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_forward(net, (x,), None).sum().backward()


# Memory


@pytest.mark.parametrize("ends", ["backward", "dropped", "retained and dropped", "output kept"])
@pytest.mark.parametrize("name", ["gpt", "everything"])
def test_graph_frees_its_memory_without_the_collector(name, ends):
    model, inputs, loss = built(name)
    seen = []
    for module in model.modules():
        module.register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out.untyped_storage())))
    gc.collect()
    gc.disable()
    try:
        out = run_forward(model, inputs, full_plan(name))
        value = loss(out)
        if ends != "dropped":
            value.backward(retain_graph=ends == "retained and dropped")
        if ends == "output kept":
            out = out.detach()
            del value
            assert {s._cdata for r in seen if (s := r()) is not None} == {out.untyped_storage()._cdata}
            return
        del out, value
        assert [r for r in seen if r() is not None] == []
    finally:
        gc.enable()


def net_bytes(f):
    """Bytes that the allocator has given out more after `f` than before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        f()
    return sum(e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]")


@PLANS
def test_twenty_steps_do_not_grow(plan):
    model, inputs, loss = built("everything")
    chosen = full_plan("everything") if plan == "full" else plan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad(set_to_none=False)
        loss(run_forward(model, inputs, chosen)).backward()
        optimizer.step()

    def steps():
        for _ in range(20):
            step()

    for _ in range(3):
        step()
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        steps()
        assert len(gc.get_objects()) - before < 20  # not one object per step
        assert net_bytes(steps) == 0
    finally:
        gc.enable()


def test_dropping_lowers_the_peak():
    peaks = []
    for is_plain in (True, False):
        torch.manual_seed(0)
        model, inputs = TinyGPT(layers=4), (torch.randint(0, 157, (4, 64)),)
        plan = plan_dropping(profile_of(model, inputs, token_loss))
        peaks.append(allocator_peak(lambda: run_forward(model, inputs, plan, is_plain=is_plain)))  # noqa: B023

    assert peaks[1] < 0.7 * peaks[0]


def test_failed_forward_frees_its_memory_without_the_collector():
    model, inputs, _ = built("gpt")
    seen = []
    model.blocks[0].register_forward_hook(lambda m, a, out: seen.append(weakref.ref(out.untyped_storage())))
    model.norm.register_forward_pre_hook(_fail(RuntimeError))
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(RuntimeError):
            run_forward(model, inputs, full_plan("gpt"))
        assert seen
        assert seen[0]() is None
    finally:
        gc.enable()


# The process


def _fail(kind):
    def hook(*_):
        raise kind("in the middle")

    return hook


def left_on():
    """Modes and hooks that are installed now."""
    return (
        list(_get_current_dispatch_mode_stack()),
        dict(torch_module._global_forward_pre_hooks),
        dict(torch_module._global_forward_hooks),
        dict(torch_module._global_forward_hooks_always_called),
        torch._C._autograd._top_saved_tensors_default_hooks(False),
        tape.is_recording(),
        getattr(tape._thread, "replaying", False),
        torch.is_grad_enabled(),
    )


@PLANS
@pytest.mark.parametrize("where", ["norm", "blocks.1.up"])
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_exception_in_forward_leaves_nothing_on(kind, where, plan):
    model, inputs, loss = built("gpt")
    chosen = full_plan("gpt") if plan == "full" else plan
    clean = left_on()
    handle = model.get_submodule(where).register_forward_hook(_fail(kind))

    with pytest.raises(kind):
        run_forward(model, inputs, chosen)
    assert left_on() == clean

    handle.remove()
    found = []
    for is_plain in (True, False):
        model.zero_grad()
        loss(run_forward(model, inputs, chosen, is_plain=is_plain)).backward()
        found.append(grads_of(model))
    assert same_bits(found[0], found[1])
    assert left_on() == clean


def test_exception_in_a_replay_leaves_nothing_on(monkeypatch):
    model, inputs, loss = built("gpt")
    clean, flags = left_on(), backend_flags()
    value = loss(run_forward(model, inputs, full_plan("gpt")))

    def fail(node):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(tape.Node, "run", fail)
        with pytest.raises(MemoryError):
            value.backward(retain_graph=True)
    assert left_on() == clean
    assert backend_flags() == flags

    # The graph is still good: nothing of it was lost.
    model.zero_grad()
    value.backward()
    ours = grads_of(model)
    model.zero_grad()
    loss(run_forward(model, inputs, None, is_plain=True)).backward()
    assert same_bits(grads_of(model), ours)


def test_two_threads_train_at_once():
    def train(is_plain, result, key):
        build, make, loss = MODELS["reused"]
        with lock:  # the generator is the process's
            torch.manual_seed(key)
            model, inputs = build(), make()
        found = []
        for _ in range(5):
            model.zero_grad()
            with contextlib.nullcontext() if is_plain else recording(model, inputs, full_plan("reused")):
                out = model(*inputs)
            loss(out).backward()
            found.append(grads_of(model))
        result[key] = found

    lock = threading.Lock()
    full_plan("reused")
    plain, ours = {}, {}
    for key in range(4):
        train(True, plain, key)
    threads = [threading.Thread(target=train, args=(False, ours, key)) for key in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(ours) == [0, 1, 2, 3]
    assert all(same_bits(a, b) for key in plain for a, b in zip(plain[key], ours[key], strict=True))
    assert left_on()[:4] == ([], {}, {}, {})


def test_backward_in_another_thread_gives_the_same_numbers():
    def use(model, out, loss):
        thread = threading.Thread(target=lambda: loss(out).backward())
        thread.start()
        thread.join()
        return grads_of(model)

    plain, ours = both("gpt", use)

    assert all(g is not None for g in ours.values())
    assert same_bits(plain, ours)


def test_replay_runs_below_a_mode_that_counts_and_leaves_the_generators():
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    model, inputs, loss = built("gpt")
    value = loss(run_forward(model, inputs, full_plan("gpt")))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with Seen():
        value.backward()

    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_flags_are_put_back_after_an_exception():
    before = backend_flags()
    other = list(before)
    other[0] = before[0] + 1  # threads
    other[1] = not before[1]  # oneDNN

    def fail():
        with under_flags(tuple(other)):
            assert backend_flags() == tuple(other)
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()

    assert backend_flags() == before


def test_replay_runs_under_the_flags_of_its_forward(monkeypatch):
    model, inputs, loss = built("mlp")
    seen = []
    original = tape.Node.run
    monkeypatch.setattr(tape.Node, "run", lambda node: (seen.append(torch.get_num_threads()), original(node))[1])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        value = loss(run_forward(model, inputs, full_plan("mlp")))
        torch.set_num_threads(1)
        value.backward()
        assert set(seen) == {3}
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_empty_and_scalar_tensors_pass_through():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))
            self.enter = nn.Linear(5, 7)

        def forward(self, x):
            y = torch.sin(self.enter(x) * self.scale)
            empty = torch.tanh(y[:0] * 2).sum()
            return F.gelu(y).sum() + empty + torch.exp(self.scale * 2)

    torch.manual_seed(0)
    net = Net()
    for rows in (0, 3):
        x = torch.randn(rows, 5)
        found = []
        for is_plain in (True, False):
            net.zero_grad()
            run_forward(net, (x,), None, is_plain=is_plain).backward()
            found.append(grads_of(net))
        assert same_bits(found[0], found[1])
