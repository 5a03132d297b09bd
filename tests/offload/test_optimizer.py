"""The user's optimizer in buckets, with states, gradients and parameters on a disk: plain torch, bit for bit."""

import copy
import gc
import io
import pickle
import random
import warnings

import numpy as np
import pytest
import torch
from small_models import same
from torch import nn
from torch.optim import Optimizer

import memopt.offload.nvme
from memopt.offload import sizes
from memopt.offload.gradients import OffloadedGradients
from memopt.offload.nvme import NVMeStore
from memopt.offload.optimizer import BucketedOptimizer
from memopt.offload.parameters import OffloadedParameters
from memopt.offload.sizes import PAGE_BYTES
from memopt.stepping import why_not_in_parts

BUCKET_BYTES = 11 * PAGE_BYTES  # two parameters with AdamW, whose tensors take a page each


@pytest.fixture(autouse=True)
def _tensors_of_any_size_go(monkeypatch):
    monkeypatch.setattr(sizes, "LEAST_STORED_BYTES", 1)
    monkeypatch.setattr(memopt.offload.nvme, "CHUNK_BYTES", 2**20)


@pytest.fixture
def store(tmp_path):
    store = NVMeStore(tmp_path, num_threads=2)
    yield store
    store.close()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))


def loss_of(model, i):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(i))
    return model(x).square().mean()


def train(model, optimizer, steps=range(4), before_step=lambda: None):
    """Losses of some steps."""
    losses = []
    for i in steps:
        optimizer.zero_grad()
        loss = loss_of(model, i)
        loss.backward()
        before_step()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Away:
    """All that belongs to an optimizer, on a store."""

    def __init__(self, model, optimizer, store, bucket_bytes=BUCKET_BYTES, num_buckets=3):
        self.notes = []
        parameters = list(model.parameters())
        self.parameters = OffloadedParameters(parameters, store, 2**20, self.notes.append)
        self.gradients = OffloadedGradients(parameters, store, 2**20, self.notes.append)
        self.optimizer = BucketedOptimizer(
            optimizer,
            {id(p) for p in parameters},
            store,
            bucket_bytes,
            num_buckets,
            self.parameters,
            self.gradients,
            self.notes.append,
        )
        self.optimizer.install()

    def remove(self):
        self.optimizer.remove()
        self.gradients.take_back()
        self.parameters.take_back()

    @property
    def num_buckets(self):
        return len(self.optimizer._buckets(lambda p: p.grad is not None))

    @property
    def all_is_away(self):
        items = [*self.parameters.items.values(), *self.optimizer.items.values()]
        return all(item.is_ours and item.is_away for item in items)


def pair(make, store, build=net, **options):
    """The same model and optimizer twice: plain, and with all of its state away."""
    plain_model, model = build(), build()
    plain, ours = make(plain_model.parameters()), make(model.parameters())
    return plain_model, plain, model, ours, Away(model, ours, store, **options)


def everything(model, optimizer):
    """Copies of weights and gradients, and the optimizer's state_dict."""
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return copy.deepcopy([dict(model.state_dict()), gradients, optimizer.state_dict()])


# Every optimizer


class Lion(Optimizer):
    """As many third-party optimizers are written: through `.data`, the weight decay added to the gradient."""

    def __init__(self, params, lr=1e-2, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad.data, self.state[p]
                if not state:
                    state["step"], state["momentum"] = 0, torch.zeros_like(p.data)
                state["step"] += 1
                grad.add_(p.data, alpha=group["weight_decay"])
                update = torch.sign(state["momentum"] * 0.9 + grad * 0.1)
                p.data.add_(update, alpha=-group["lr"])
                state["momentum"].mul_(0.99).add_(grad, alpha=0.01)
        return loss


class CountsInGroup(Optimizer):
    """As schedule-free optimizers do: the number of steps is a setting of the group."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr, "k": 0, "weight_sum": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] * group["k"]
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone())
                    z.sub_(p.grad, alpha=group["lr"] * group["k"])
                    p.lerp_(z, group["lr"] / group["weight_sum"])


class NewStates(Optimizer):
    """Gives its states new tensors at every step, and its parameters new memory."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["average"] = state.get("average", 0.0) * 0.9 + p.grad
                    p.data = p.data - group["lr"] * state["average"]


optim = torch.optim
OPTIMIZERS = {
    "AdamW loop": lambda p: optim.AdamW(p, lr=1e-2, foreach=False),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW amsgrad, maximize": lambda p: optim.AdamW(p, lr=1e-2, amsgrad=True, maximize=True),
    "AdamW foreach, amsgrad, maximize": lambda p: optim.AdamW(p, lr=1e-2, amsgrad=True, maximize=True, foreach=True),
    "Adam": lambda p: optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "Adam with a tensor lr": lambda p: optim.Adam(p, lr=torch.tensor(1e-2), foreach=False),
    "SGD": lambda p: optim.SGD(p, lr=1e-2),
    "SGD nesterov": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "SGD foreach, nesterov": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True),
    "SGD fused": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1, fused=True),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-2, decoupled_weight_decay=True),
    "NAdam foreach": lambda p: optim.NAdam(p, lr=1e-2, weight_decay=0.1, foreach=True),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-2),
    "RAdam foreach": lambda p: optim.RAdam(p, lr=1e-2, weight_decay=0.1, foreach=True),
    "RMSprop centered": lambda p: optim.RMSprop(p, lr=1e-2, centered=True, momentum=0.9),
    "RMSprop foreach": lambda p: optim.RMSprop(p, lr=1e-2, centered=True, momentum=0.9, foreach=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2, lr_decay=0.1),
    "Adagrad foreach": lambda p: optim.Adagrad(p, lr=1e-2, maximize=True, foreach=True),
    "Adagrad fused": lambda p: optim.Adagrad(p, lr=1e-2, fused=True),
    "Adadelta": lambda p: optim.Adadelta(p),
    "Adadelta foreach": lambda p: optim.Adadelta(p, foreach=True),
    "Adamax": lambda p: optim.Adamax(p),
    "Adamax foreach": lambda p: optim.Adamax(p, foreach=True),
    "Adafactor": lambda p: optim.Adafactor(p),
    "ASGD": lambda p: optim.ASGD(p, t0=2),
    "ASGD foreach": lambda p: optim.ASGD(p, t0=2, foreach=True),
    "Rprop": lambda p: optim.Rprop(p),
    "Rprop foreach": lambda p: optim.Rprop(p, foreach=True),
    "Lion of the user's": Lion,
    "steps counted in the group": CountsInGroup,
    "new states at every step": NewStates,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_steps_in_buckets_to_the_plain_numbers(name, store):
    make = OPTIMIZERS[name]
    plain_model, plain, model, ours, away = pair(make, store)
    assert why_not_in_parts(ours) is None
    for i in range(5):
        assert train(plain_model, plain, [i]) == train(model, ours, [i])
        assert away.num_buckets > 1
        assert same(everything(plain_model, plain), everything(model, ours)), f"after step {i}"
    if name != "new states at every step":
        assert away.all_is_away
    assert away.notes == []


@pytest.mark.parametrize("num_buckets", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 5 * PAGE_BYTES, 2**20], ids=["one each", "some", "all in one"])
def test_number_and_size_of_buckets_change_no_number(num_buckets, bucket_bytes, store):
    plain_model, plain, model, ours, _ = pair(
        OPTIMIZERS["Adam"], store, bucket_bytes=bucket_bytes, num_buckets=num_buckets
    )
    assert train(plain_model, plain) == train(model, ours)
    assert same(everything(plain_model, plain), everything(model, ours))


# Groups and schedules


def grouped(make, **second):
    def with_groups(params):
        params = list(params)
        return make([{"params": params[::2]}, {"params": params[1::2], **second}])

    return with_groups


def test_groups_keep_their_own_settings(store):
    make = grouped(lambda groups: optim.AdamW(groups, lr=1e-2), lr=1e-3, weight_decay=0.3, betas=(0.5, 0.6))
    plain_model, plain, model, ours, _ = pair(make, store)
    assert train(plain_model, plain) == train(model, ours)
    assert same(everything(plain_model, plain), everything(model, ours))


def without_gradient(indices):
    """A step in which some parameters have no gradient."""

    def step(model, optimizer):
        optimizer.zero_grad()
        loss_of(model, 0).backward()
        for i, p in enumerate(model.parameters()):
            if i in indices:
                p.grad = None
        optimizer.step()

    return step


@pytest.mark.parametrize("indices", [{1, 3, 5}, {0, 2, 4}, set(range(6))], ids=["second group", "first group", "all"])
def test_group_that_has_no_gradients_counts_its_steps_too(indices, store):
    plain_model, plain, model, ours, _ = pair(grouped(CountsInGroup), store)
    for m, optimizer in ((plain_model, plain), (model, ours)):
        train(m, optimizer, [0])
        without_gradient(indices)(m, optimizer)
        train(m, optimizer, [1, 2])
    assert same(everything(plain_model, plain), everything(model, ours))


def test_parameters_without_gradient_are_neither_stepped_nor_read(store):
    plain_model, plain, model, ours, _ = pair(OPTIMIZERS["AdamW loop"], store)
    for m, optimizer in ((plain_model, plain), (model, ours)):
        train(m, optimizer, [0])
    read_bytes, written_bytes = store.read_bytes, store.written_bytes
    without_gradient({0, 1, 2, 3, 4})(plain_model, plain)
    without_gradient({0, 1, 2, 3, 4})(model, ours)
    assert same(everything(plain_model, plain), everything(model, ours))
    # Weight, gradient and three states of the one that is stepped; six gradients left in backward.
    assert store.read_bytes - read_bytes == 5 * PAGE_BYTES
    assert store.written_bytes - written_bytes == (4 + 6) * PAGE_BYTES


@pytest.mark.parametrize("is_made_before", [True, False])
def test_scheduler_counts_our_steps_without_a_warning(is_made_before, store):
    plain_model, model = net(), net()
    lrs = []
    for m, is_ours in ((plain_model, False), (model, True)):
        optimizer = optim.AdamW(m.parameters(), lr=1e-2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if is_made_before or not is_ours:
                scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
            if is_ours:
                Away(m, optimizer, store)
            if is_ours and not is_made_before:
                scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)
            for i in range(4):
                train(m, optimizer, [i])
                scheduler.step()
                lrs.append((scheduler.get_last_lr(), optimizer.param_groups[0]["betas"]))
    assert lrs[:4] == lrs[4:]
    assert same(dict(plain_model.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("is_made_before", [True, False])
def test_scheduler_goes_on_when_the_optimizer_is_plain_again(is_made_before, store):
    plain_model, model = net(), net()
    for m, is_ours in ((plain_model, False), (model, True)):
        optimizer = optim.SGD(m.parameters(), lr=1e-2, momentum=0.9)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if is_made_before or not is_ours:
                scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            away = Away(m, optimizer, store) if is_ours else None
            if is_ours and not is_made_before:
                scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            for i in range(4):
                train(m, optimizer, [i])
                scheduler.step()
                if i == 1 and away is not None:
                    away.remove()
    assert same(dict(plain_model.state_dict()), dict(model.state_dict()))


def test_group_that_is_added_later_is_stepped_too(store):
    plain_model, plain, model, ours, _ = pair(lambda p: optim.AdamW(list(p)[:3], lr=1e-2), store)
    for m, optimizer in ((plain_model, plain), (model, ours)):
        train(m, optimizer, [0, 1])
        optimizer.add_param_group({"params": list(m.parameters())[3:], "lr": 1e-3})
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        train(m, optimizer, [2, 3])
    assert same(everything(plain_model, plain), everything(model, ours))


# What stands around a step


def test_closure_is_called_once_with_gradients_enabled(store):
    plain_model, plain, model, ours, _ = pair(OPTIMIZERS["AdamW loop"], store)
    values = []
    for m, optimizer in ((plain_model, plain), (model, ours)):
        calls = []

        def closure(m=m, optimizer=optimizer, calls=calls):
            calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            loss = loss_of(m, 0)
            loss.backward()
            return loss

        with torch.no_grad():
            values += [optimizer.step(closure).item(), optimizer.step(closure=closure).item()]
        assert calls == [True, True]
    assert values[:2] == values[2:]
    assert same(everything(plain_model, plain), everything(model, ours))


def test_clipping_between_backward_and_step_sees_and_changes_the_gradients(store):
    plain_model, plain, model, ours, _ = pair(OPTIMIZERS["AdamW foreach"], store)
    norms = []
    for m, optimizer in ((plain_model, plain), (model, ours)):

        def clip(m=m):
            norms.append(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01).item())
            torch.nn.utils.clip_grad_value_(m.parameters(), 0.002)

        train(m, optimizer, before_step=clip)
    assert norms[:4] == norms[4:]
    assert same(everything(plain_model, plain), everything(model, ours))


@pytest.mark.parametrize("name", ["AdamW loop", "AdamW fused", "SGD foreach, nesterov"])
def test_grad_scaler_skips_the_same_steps(name, store):
    plain_model, plain, model, ours, _ = pair(OPTIMIZERS[name], store)
    scales = []
    for m, optimizer in ((plain_model, plain), (model, ours)):
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        for i in range(5):
            optimizer.zero_grad()
            loss = loss_of(m, i)
            scaler.scale(loss * torch.inf if i == 2 else loss).backward()
            if i == 3:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            scales.append((scaler.get_scale(), everything(m, optimizer)))
    assert all(map(same, scales[:5], scales[5:]))


def test_hooks_of_a_step_run_once_and_see_all_parameters(store):
    plain_model, plain, model, ours, away = pair(OPTIMIZERS["SGD nesterov"], store)
    seen = []
    for m, optimizer in ((plain_model, plain), (model, ours)):

        def look(optimizer, args, kwargs):
            seen.append([len(group["params"]) for group in optimizer.param_groups])

        def slow_down(optimizer, args, kwargs):
            optimizer.param_groups[0]["lr"] *= 0.5

        handles = [
            optimizer.register_step_pre_hook(look),
            optimizer.register_step_pre_hook(slow_down),
            optimizer.register_step_post_hook(look),
        ]
        train(m, optimizer, [0, 1])
        for handle in handles:
            handle.remove()
        train(m, optimizer, [2])
    assert away.num_buckets > 1
    assert seen == [[6]] * 8
    assert same(everything(plain_model, plain), everything(model, ours))


class CallsSuper(optim.AdamW):
    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.clamp_(-0.2, 0.2)
        return loss


def test_optimizer_that_calls_the_step_of_its_base_runs_hooks_as_often_as_plainly(store):
    optim.AdamW([torch.zeros(1, requires_grad=True)])  # from its first object on, the class's own step runs the hooks
    plain_model, plain, model, ours, _ = pair(lambda p: CallsSuper(p, lr=1e-2), store)
    counts = []
    for m, optimizer in ((plain_model, plain), (model, ours)):
        seen = []
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append(1))
        train(m, optimizer)
        counts.append(len(seen))
    assert same(everything(plain_model, plain), everything(model, ours))
    assert counts[0] == counts[1]


def test_sparse_gradients_stay_in_memory_and_train_alike(store):
    def build():
        torch.manual_seed(0)
        return nn.ModuleList([nn.Embedding(11, 5, sparse=True), nn.Linear(5, 3), nn.Linear(3, 2)])

    plain_model, plain, model, ours, _ = pair(lambda p: optim.Adagrad(p, lr=0.1), store, build=build)
    for m, optimizer in ((plain_model, plain), (model, ours)):
        for i in range(4):
            optimizer.zero_grad()
            m[2](m[1](m[0](torch.tensor([i, 3, 7])))).square().sum().backward()
            optimizer.step()
    assert model[0].weight.grad.is_sparse
    assert same(everything(plain_model, plain), everything(model, ours))


# Saving and loading


def saved(optimizer):
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("name", ["AdamW loop", "AdamW fused", "SGD nesterov", "Adafactor", "Lion of the user's"])
def test_checkpoint_of_ours_resumes_plainly_and_back(name, store):
    make = OPTIMIZERS[name]
    plain_model, plain, model, ours, away = pair(make, store)
    train(plain_model, plain, range(3))
    train(model, ours, range(3))
    # from ours to a plain one
    other_model = net()
    other_model.load_state_dict(model.state_dict())
    other = make(other_model.parameters())
    other.load_state_dict(saved(ours))
    # from the plain one to ours, over what is there
    train(model, ours, range(7, 9))
    model.load_state_dict(plain_model.state_dict())
    ours.load_state_dict(saved(plain))
    assert away.all_is_away
    expected = train(plain_model, plain, range(3, 6))
    assert train(other_model, other, range(3, 6)) == expected
    assert train(model, ours, range(3, 6)) == expected
    assert same(everything(plain_model, plain), everything(model, ours))
    assert same(everything(plain_model, plain), everything(other_model, other))


def test_states_that_are_loaded_again_and_again_take_no_more_room(store):
    _, _, model, ours, away = pair(OPTIMIZERS["AdamW loop"], store)
    train(model, ours, range(2))
    checkpoint = saved(ours)
    sizes_seen = set()
    for _ in range(60):
        ours.load_state_dict(checkpoint)
        assert away.all_is_away
        sizes_seen.add(store.file_bytes)
    assert len(sizes_seen) == 1


@pytest.mark.parametrize("take", [torch.Tensor.detach, lambda t: t.view(-1), lambda t: t.numpy(), lambda t: t.data[:1]])
def test_view_of_a_state_that_a_checkpoint_replaced_keeps_its_values(take, store):
    plain_model, plain, model, ours, _ = pair(OPTIMIZERS["AdamW loop"], store)
    views = []
    for m, optimizer in ((plain_model, plain), (model, ours)):
        train(m, optimizer, range(2))
        checkpoint = copy.deepcopy(optimizer.state_dict())
        train(m, optimizer, range(2, 3))
        views.append([take(state["exp_avg"]) for state in optimizer.state.values()])
        for _ in range(3):
            optimizer.load_state_dict(checkpoint)
            gc.collect()
            train(m, optimizer, range(2))
    assert same([torch.as_tensor(v) for v in views[0]], [torch.as_tensor(v) for v in views[1]])


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
    ids=["deepcopy", "pickle"],
)
def test_copies_of_model_and_optimizer_are_plain_and_train_alike(copied, store):
    _, _, model, ours, _ = pair(OPTIMIZERS["AdamW loop"], store)
    train(model, ours, range(2))
    other_model, other = copied((model, ours))
    assert "step" not in other.__dict__
    assert not [name for name in other.__dict__ if "memopt" in name]
    assert same(other.state_dict(), ours.state_dict())
    assert train(other_model, other) == train(model, ours)
    assert same(everything(other_model, other), everything(model, ours))


# Coming off


@pytest.mark.parametrize("name", ["AdamW foreach", "SGD nesterov", "Lion of the user's", "steps counted in the group"])
def test_removed_optimizer_is_the_plain_one_with_its_states_in_memory(name, store):
    plain_model, plain, model, ours, away = pair(OPTIMIZERS[name], store)
    before = {k: v for k, v in plain.__dict__.items() if k not in ("state", "param_groups")}
    train(plain_model, plain, range(3))
    train(model, ours, range(3))
    tensors = [t for state in ours.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    away.remove()
    away.remove()
    assert "step" not in ours.__dict__
    # what a scheduler that was made meanwhile asks for may stay
    assert ours.__dict__.keys() - {"_opt_called"} == before.keys() | {"state", "param_groups"}
    assert len(ours._optimizer_load_state_dict_post_hooks) == 0
    store.close()
    assert all(
        a is b
        for a, b in zip(
            tensors,
            [t for state in ours.state.values() for t in state.values() if isinstance(t, torch.Tensor)],
            strict=True,
        )
    )
    assert same(everything(plain_model, plain), everything(model, ours))
    assert train(plain_model, plain, range(3, 6)) == train(model, ours, range(3, 6))
    assert same(everything(plain_model, plain), everything(model, ours))


def test_everything_on_the_store_is_free_after_removal(store):
    _, _, model, ours, away = pair(OPTIMIZERS["AdamW loop"], store)
    train(model, ours)
    away.remove()
    gc.collect()
    assert len(store.reserve([PAGE_BYTES] * (store.file_bytes // PAGE_BYTES))) > 0
    assert store.file_bytes == 2**20  # it did not grow for that


class FailsOnNaN(optim.Optimizer):
    """Steps one parameter after the other, and raises at a gradient that is not finite, when the weight is changed."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.add_(momentum, alpha=-group["lr"])
                if not p.grad.isfinite().all():
                    raise ArithmeticError("not finite")
                momentum.mul_(0.9).add_(p.grad)


@pytest.mark.parametrize("num_good", [0, 2])
@pytest.mark.parametrize("k", range(6))
def test_exception_in_the_middle_of_a_step_leaves_what_plain_torch_leaves(k, num_good, store):
    plain_model, plain, model, ours, away = pair(FailsOnNaN, store, bucket_bytes=6 * PAGE_BYTES)
    for m, optimizer in ((plain_model, plain), (model, ours)):
        train(m, optimizer, range(num_good))
        groups, params = optimizer.param_groups, list(optimizer.param_groups[0]["params"])

        def spoil(m=m):
            list(m.parameters())[k].grad.data.fill_(torch.nan)

        with pytest.raises(ArithmeticError):
            train(m, optimizer, [5], before_step=spoil)
        assert optimizer.param_groups is groups
        assert all(a is b for a, b in zip(groups[0]["params"], params, strict=True))
    assert same(everything(plain_model, plain), everything(model, ours))
    assert train(plain_model, plain, range(6, 9)) == train(model, ours, range(6, 9))
    assert same(everything(plain_model, plain), everything(model, ours))
    assert away.all_is_away


# Whether it can be stepped in buckets at all


class KeepsAttributes(Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})
        self.past = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad + self.past.get(p, 0.0), alpha=group["lr"])
                self.past[p] = p.grad.clone()


class ActsEverySevenSteps(Optimizer):
    """As a lookahead: a counter on the object, which the first steps do not show."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * (10 if self.num_steps % 7 == 0 else 1))


class CountsInATensor(Optimizer):
    """A counter in the group that is moved in place."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})
        for group in self.param_groups:
            group["k"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * (10 if group["k"] > 5 else 1))


class RemembersInGroup(Optimizer):
    """A list in the group that grows with each step."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})
        for group in self.param_groups:
            group["history"] = []

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["history"].append(1)
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * (10 if len(group["history"]) > 5 else 1))


class ClipsAllTogether(Optimizer):
    """As LAMB: the norm of all gradients bounds the step."""

    def __init__(self, params, max_norm):
        super().__init__(params, {"lr": 1e-2})
        self.max_norm = max_norm

    @torch.no_grad()
    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        total = torch.stack([g.norm() for g in grads]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * (self.max_norm / total).clamp(max=1.0), alpha=group["lr"])


NOT_PER_PARAMETER = {
    "LBFGS": lambda p: optim.LBFGS(p),
    "a dict on the object": KeepsAttributes,
    "a counter on the object": ActsEverySevenSteps,
    "a counter that is moved in place": CountsInATensor,
    "a list in the group": RemembersInGroup,
    "one norm, small": lambda p: ClipsAllTogether(p, 0.5),
    "one norm, large": lambda p: ClipsAllTogether(p, 50.0),
}


@pytest.mark.parametrize("name", NOT_PER_PARAMETER)
def test_optimizer_that_is_more_than_its_parameters_is_told(name):
    assert why_not_in_parts(NOT_PER_PARAMETER[name](net().parameters())) is not None


def test_step_that_was_replaced_on_the_object_is_told():
    optimizer = OPTIMIZERS["Adam"](net().parameters())
    optimizer.step = lambda closure=None: None
    assert "replaced" in why_not_in_parts(optimizer)


@pytest.mark.parametrize("name", [*NOT_PER_PARAMETER, "AdamW loop", "Adam with a tensor lr", "Lion of the user's"])
def test_probing_an_optimizer_changes_nothing(name):
    model = net()
    optimizer = {**OPTIMIZERS, **NOT_PER_PARAMETER}[name](model.parameters())
    if name != "LBFGS":
        train(model, optimizer, range(2))
    before = (
        everything(model, optimizer),
        copy.deepcopy(
            {k: v for k, v in optimizer.__dict__.items() if isinstance(v, int | float | dict) and k != "state"}
        ),
    )
    objects = [id(t) for state in optimizer.state.values() for t in state.values()]
    generators = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    why_not_in_parts(optimizer)
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert (random.getstate(), str(np.random.get_state())) == generators[1:]
    assert same(everything(model, optimizer), before[0])
    assert [id(t) for state in optimizer.state.values() for t in state.values()] == objects
    now = {k: v for k, v in optimizer.__dict__.items() if isinstance(v, int | float | dict) and k != "state"}
    assert now.keys() == before[1].keys()
    assert all(same(now[k], before[1][k]) for k in now if k not in ("past", "_params"))


def test_probing_an_optimizer_copies_no_parameter(monkeypatch):
    copied = []
    plain = nn.Parameter.__deepcopy__
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", lambda p, memo: copied.append(p) or plain(p, memo))
    assert why_not_in_parts(optim.AdamW(net().parameters())) is None
    assert copied == []


# Views, and writes that nobody sees


@pytest.mark.parametrize(
    "take", [lambda t: t.view(-1), lambda t: t.detach(), lambda t: t.numpy(), lambda t: t.data[1:]]
)
def test_view_of_a_state_that_the_user_keeps_shows_every_step(take, store):
    plain_model, plain, model, ours, _ = pair(OPTIMIZERS["AdamW loop"], store)
    views = []
    for m, optimizer in ((plain_model, plain), (model, ours)):
        train(m, optimizer, [0])
        views.append([take(t) for state in optimizer.state.values() for t in (state["exp_avg"], state["exp_avg_sq"])])
    for i in range(1, 4):
        train(plain_model, plain, [i])
        train(model, ours, [i])
        assert all(same(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*views, strict=True))
    assert same(everything(plain_model, plain), everything(model, ours))


def test_view_that_an_optimizer_keeps_from_the_middle_of_its_step_shows_every_step(store):
    class Keeps(CountsInGroup):
        def step(self, closure=None):
            super().step()
            for group in self.param_groups:
                for p in group["params"]:
                    if group["k"] == 2:
                        kept.setdefault(p, [self.state[p]["z"].view(-1), p.data.view(-1), p.grad.view(-1)])

    kept = {}
    plain_model, plain, model, ours, _ = pair(Keeps, store)
    for i in range(5):
        assert train(plain_model, plain, [i]) == train(model, ours, [i])
        for a, b in zip(plain_model.parameters(), model.parameters(), strict=True):
            assert same(kept.get(a), kept.get(b)), f"after step {i}"
    assert same(everything(plain_model, plain), everything(model, ours))
    kept.clear()
    assert train(plain_model, plain, [5, 6]) == train(model, ours, [5, 6])
    assert same(everything(plain_model, plain), everything(model, ours))


@pytest.mark.parametrize("name", ["AdamW loop", "AdamW fused", "Lion of the user's"])
def test_writes_to_what_is_away_are_honoured(name, store):
    plain_model, plain, model, ours, away = pair(OPTIMIZERS[name], store)
    for m, optimizer in ((plain_model, plain), (model, ours)):

        def write(m=m, optimizer=optimizer):
            for p in m.parameters():
                p.grad.data.mul_(2.0)
                p.data.add_(0.01)
                for t in optimizer.state[p].values():
                    if isinstance(t, torch.Tensor) and t.dim() > 0:
                        t.data.mul_(0.5)

        train(m, optimizer, [0])
        write()
        train(m, optimizer, [1, 2], before_step=write)
    assert same(everything(plain_model, plain), everything(model, ours))
    assert away.all_is_away


@pytest.mark.parametrize("key", ["exp_avg", "step"])
def test_state_that_the_user_replaces_is_the_state_from_then_on(key, store):
    plain_model, plain, model, ours, away = pair(OPTIMIZERS["AdamW loop"], store)
    for m, optimizer in ((plain_model, plain), (model, ours)):
        train(m, optimizer, range(2))
        for p in m.parameters():
            optimizer.state[p][key] = torch.full_like(optimizer.state[p][key], 3.0)
        train(m, optimizer, range(2, 4))
        for p in m.parameters():
            optimizer.state[p][key].data = torch.full_like(optimizer.state[p][key], 5.0)
        train(m, optimizer, range(4, 6))
    assert same(everything(plain_model, plain), everything(model, ours))
    assert away.optimizer.items


def test_state_that_the_user_deletes_is_made_again(store):
    plain_model, plain, model, ours, _ = pair(OPTIMIZERS["AdamW loop"], store)
    for m, optimizer in ((plain_model, plain), (model, ours)):
        train(m, optimizer, range(2))
        optimizer.state.clear()
        train(m, optimizer, range(2, 4))
    assert same(everything(plain_model, plain), everything(model, ours))
