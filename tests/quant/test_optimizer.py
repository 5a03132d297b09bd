"""A user's optimizer over 8-bit states: near float32, exact to resume, and plain again when it is taken off."""

import copy
import io
import pickle

import pytest
import torch
from small_models import same
from torch import nn
from torch.optim import Optimizer

import memopt.quant.optimizer
from memopt.errors import NonFiniteGradientError, UnsupportedError
from memopt.quant.codec import Codec
from memopt.quant.optimizer import CodedState, QuantizedOptimizer, codecs_of, compact_state_dict, expanded
from memopt.quant.sizes import BLOCK, coded_bytes

optim = torch.optim


class Lion(Optimizer):
    def __init__(self, params, lr=1e-3, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    update = torch.sign(m * 0.9 + p.grad * 0.1)
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                    m.mul_(0.99).add_(p.grad, alpha=0.01)
        return loss


class CountsInGroup(Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("average", torch.zeros_like(p))
                    m.lerp_(p.grad, 1 / group["k"])
                    p.sub_(m, alpha=group["lr"])


OPTIMIZERS = {
    "Adam": lambda p: optim.Adam(p, lr=1e-3),
    "Adam amsgrad": lambda p: optim.Adam(p, lr=1e-3, amsgrad=True),
    "AdamW loop": lambda p: optim.AdamW(p, lr=1e-3, foreach=False),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=1e-3, fused=True),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: optim.RAdam(p, lr=4e-3),
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.9),
    "Adagrad": lambda p: optim.Adagrad(p, lr=1e-2),
    "SGD": lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "Lion": Lion,
    "counts in its group": lambda p: CountsInGroup(p, lr=0.3),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 150), nn.Tanh(), nn.Linear(150, 3))


def loss_of(model, i):
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(32, 64, generator=generator)
    return nn.functional.cross_entropy(model(x), (x[:, :3] * 3).argmax(1))


def train(model, optimizer, steps):
    losses = []
    for i in steps:
        optimizer.zero_grad()
        loss = loss_of(model, i)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def quantized(model, optimizer, nonfinite="skip", notes=None, keep=()):
    names = {id(p): name for name, p in model.named_parameters() if name not in keep}
    note = (notes if notes is not None else []).append
    made = QuantizedOptimizer(optimizer, codecs_of(optimizer), names, nonfinite, note)
    made.install()
    return made


def pair(make, **options):
    model = net()
    optimizer = make(model.parameters())
    return model, optimizer, quantized(model, optimizer, **options)


def everything(model, optimizer):
    return copy.deepcopy([dict(model.state_dict()), optimizer.state_dict()])


# Training


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_stays_near_float32(name):
    plain_model = net()
    plain = OPTIMIZERS[name](plain_model.parameters())
    model, ours, _ = pair(OPTIMIZERS[name])
    expected, losses = train(plain_model, plain, range(60)), train(model, ours, range(60))
    assert expected[-1] < 0.8 * expected[0]
    assert losses[0] == expected[0]
    assert losses[-1] == pytest.approx(expected[-1], rel=0.06)
    coded = [own for own in ours.state.values() if isinstance(own, CodedState)]
    assert [own.numel for own in coded] == [64 * 200, 200 * 150]  # the others are small
    for own in coded:
        held = sum(t.nbytes for key, t in own.items() if key.endswith((".codes", ".scales")))
        assert held == len(own.kinds) * coded_bytes(own.numel)


def test_states_get_the_codec_that_suits_their_sign():
    parameters = [nn.Parameter(torch.zeros(3))]
    assert codecs_of(optim.AdamW(parameters)) == {"exp_avg": Codec.SIGNED, "exp_avg_sq": Codec.NON_NEGATIVE}
    assert codecs_of(optim.Adagrad(parameters)) == {"sum": Codec.ACCUMULATOR}
    assert codecs_of(optim.SGD(parameters, lr=0.1)) == {}
    assert codecs_of(optim.SGD(parameters, lr=0.1, momentum=0.5)) == {"momentum_buffer": Codec.SIGNED}


@pytest.mark.parametrize("make", [optim.Adafactor, optim.LBFGS], ids=["Adafactor", "LBFGS"])
def test_optimizer_that_looks_beyond_the_element_is_refused(make):
    with pytest.raises(UnsupportedError, match="8-bit states of"):
        codecs_of(make([nn.Parameter(torch.zeros(5, 5))]))


@pytest.mark.parametrize("name", ["AdamW loop", "AdamW fused", "Adagrad", "counts in its group"])
def test_tiles_change_no_bit(name, monkeypatch):
    results = []
    for tile in (2**19, 4 * BLOCK):
        monkeypatch.setattr(memopt.quant.optimizer, "TILE", tile)
        model, ours, _ = pair(OPTIMIZERS[name])
        train(model, ours, range(5))
        results.append(everything(model, ours))
    assert same(*results)


def test_small_and_named_parameters_keep_their_states_in_full():
    model, ours, _ = pair(OPTIMIZERS["AdamW loop"], keep=("2.weight",))
    train(model, ours, range(2))
    is_coded = {name: isinstance(ours.state[p], CodedState) for name, p in model.named_parameters()}
    assert is_coded == {name: name == "0.weight" for name, _ in model.named_parameters()}
    with pytest.raises(KeyError, match="kept in 8 bits"):
        ours.state[model[0].weight]["exp_avg"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_coded_or_left_alone(dtype):
    model = net().to(dtype)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    quantized(model, optimizer)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    own = optimizer.state_dict()["state"][0]
    assert own["exp_avg"].dtype == dtype
    assert isinstance(optimizer.state[model[0].weight], CodedState) == (dtype == torch.bfloat16)


def test_layouts_of_parameters_and_gradients_may_differ():
    torch.manual_seed(0)
    results = []
    for is_ours in (False, True):
        p = nn.Parameter(torch.randn(80, 100, generator=torch.Generator().manual_seed(1)).t())
        optimizer = optim.AdamW([p], lr=1e-2, foreach=False)
        if is_ours:
            QuantizedOptimizer(optimizer, codecs_of(optimizer), {id(p): "p"}, "skip", print).install()
        for i in range(5):
            p.grad = torch.randn(100, 80, generator=torch.Generator().manual_seed(i))
            optimizer.step()
        results.append((p.detach().clone(), optimizer.state_dict()["state"][0]))
    (plain, plain_state), (ours, own) = results
    assert own["exp_avg"].stride() == plain_state["exp_avg"].stride() == (1, 100)
    assert (own["exp_avg"] - plain_state["exp_avg"]).abs().max() < 0.02 * plain_state["exp_avg"].abs().max()
    assert (ours - plain).abs().max() < 0.005


def test_groups_schedules_hooks_and_closures_see_one_step():
    counts = []
    for is_ours in (False, True):
        model = net()
        params = list(model.parameters())
        optimizer = CountsInGroup([{"params": params[:2]}, {"params": params[2:], "lr": 1e-2}])
        seen = []
        if is_ours:
            quantized(model, optimizer)
        optimizer.register_step_pre_hook(lambda o, *_, seen=seen: seen.append(len(o.param_groups[1]["params"])))
        optimizer.register_step_post_hook(lambda o, *_, seen=seen: seen.append(o.param_groups[0]["k"]))
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        train(model, optimizer, range(3))
        scheduler.step()
        counts.append((seen, [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]))
    assert counts[0] == counts[1]

    model, ours, _ = pair(OPTIMIZERS["AdamW fused"])
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    assert ours.step(closure).item() > 0
    assert calls == [True]


def test_parameter_without_gradient_is_left_alone():
    model, ours, _ = pair(OPTIMIZERS["AdamW fused"])
    train(model, ours, range(2))
    before = everything(model, ours)
    loss_of(model, 0).backward()
    model[0].weight.grad = None
    ours.step()
    after = everything(model, ours)
    assert same(before[0]["0.weight"], after[0]["0.weight"])
    assert same(before[1]["state"][0], after[1]["state"][0])
    assert not same(before[0]["2.weight"], after[0]["2.weight"])


def test_odd_shapes_are_coded_or_left_alone():
    shapes = [(), (1,), (257,), (3, 5, 7), (0, 4), (6, 257), (4096,), (4097,), (64, 65)]
    results = []
    for is_ours in (False, True):
        params = [nn.Parameter(torch.randn(s, generator=torch.Generator().manual_seed(1))) for s in shapes]
        params.append(nn.Parameter(torch.randn(6, 6), requires_grad=False))
        optimizer = optim.AdamW(params, lr=1e-2)
        if is_ours:
            names = {id(p): str(i) for i, p in enumerate(params)}
            QuantizedOptimizer(optimizer, codecs_of(optimizer), names, "skip", print).install()
        for i in range(4):
            for j, p in enumerate(params[:-1]):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(31 * i + j))
            optimizer.step()
        results.append([p.detach().clone() for p in params[:-1]])
        coded = [isinstance(optimizer.state.get(p), CodedState) for p in params]
        assert coded == [is_ours and p.numel() >= 4096 for p in params]
    for a, b in zip(*results, strict=True):
        if a.numel() < 4096:
            assert torch.equal(a, b)
        else:
            assert (a - b).abs().max() < 0.02


# Bad gradients


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        *((bad, part) for bad in (torch.nan, torch.inf, -torch.inf) for part in ("0.weight", "4.bias")),
        (1e25, "0.weight"),  # which a float32 state could take
    ],
)
def test_step_with_a_bad_gradient_is_left_out_whole(bad, part):
    notes = []
    model, ours, made = pair(OPTIMIZERS["AdamW fused"], notes=notes)
    train(model, ours, range(2))
    before = everything(model, ours)
    loss_of(model, 2).backward()
    dict(model.named_parameters())[part].grad.view(-1)[1] = bad
    ours.step()
    assert same(before, everything(model, ours))
    assert made.num_skipped == 1
    assert part in notes[0]
    made.nonfinite = "raise"
    with pytest.raises(NonFiniteGradientError, match=part):
        ours.step()
    assert same(before, everything(model, ours))
    assert train(model, ours, range(3, 5))


def test_grad_scaler_skips_its_own_steps():
    model, ours, made = pair(OPTIMIZERS["AdamW fused"])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    train(model, ours, range(1))
    before = everything(model, ours)
    scaler.scale(loss_of(model, 0) * torch.inf).backward()
    scaler.step(ours)
    scaler.update()
    after = everything(model, ours)
    assert same(before[0], after[0])
    assert same(before[1]["state"][0]["exp_avg"], after[1]["state"][0]["exp_avg"])
    assert made.num_skipped == 0


@pytest.mark.parametrize("tiny", [1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-8])
def test_largest_update_of_one_large_and_many_tiny_gradients_is_near_float32(tiny):
    """Each block has one large and 255 tiny gradients, then none; peers make updates thousands of times too large."""
    largest = []
    for is_ours in (False, True):
        p = nn.Parameter(torch.zeros(64 * BLOCK))
        optimizer = optim.AdamW([p], lr=1e-3, weight_decay=0.0, fused=True)
        if is_ours:
            QuantizedOptimizer(optimizer, codecs_of(optimizer), {id(p): "p"}, "skip", print).install()
        g = torch.full((64, BLOCK), tiny)
        g[:, 0] = 1.0
        most = 0.0
        for i in range(60):
            before = p.detach().clone()
            p.grad = g.view(-1).clone() if i < 20 else torch.zeros_like(p)
            optimizer.step()
            most = max(most, float((p.detach() - before).abs().max()))
        largest.append(most)
    assert largest[1] <= 2 * largest[0]
    assert largest[1] >= 0.5 * largest[0]


# Checkpoints


def saved(found):
    buffer = io.BytesIO()
    torch.save(found, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True), buffer.getbuffer().nbytes


@pytest.mark.parametrize("form", ["torch's own", "compact"])
@pytest.mark.parametrize("name", ["AdamW fused", "Adagrad", "SGD", "Adam amsgrad"])
def test_resume_is_bit_exact(name, form):
    model, ours, _ = pair(OPTIMIZERS[name])
    train(model, ours, range(4))
    found, _ = saved(ours.state_dict() if form == "torch's own" else compact_state_dict(ours))
    other = net()
    other.load_state_dict(model.state_dict())
    resumed = OPTIMIZERS[name](other.parameters())
    quantized(other, resumed)
    resumed.load_state_dict(found)
    assert train(model, ours, range(4, 8)) == train(other, resumed, range(4, 8))
    assert same(everything(model, ours), everything(other, resumed))


def test_checkpoints_go_to_and_from_plain_torch():
    model, ours, _ = pair(OPTIMIZERS["AdamW fused"])
    plain_model = net()
    plain = OPTIMIZERS["AdamW fused"](plain_model.parameters())
    train(plain_model, plain, range(5))
    model.load_state_dict(plain_model.state_dict())
    ours.load_state_dict(plain.state_dict())
    a, b = plain.state_dict(), ours.state_dict()
    assert a["param_groups"] == b["param_groups"]
    for i, own in a["state"].items():
        assert list(own) == list(b["state"][i])
        assert same(own["step"], b["state"][i]["step"])
        for key in ("exp_avg", "exp_avg_sq"):
            x, y = own[key], b["state"][i][key]
            assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
            assert (x - y).abs().max() <= x.abs().max() / 127
            assert (own["exp_avg_sq"] == 0).equal(b["state"][i]["exp_avg_sq"] == 0)
    plain.load_state_dict(saved(ours.state_dict())[0])
    assert same(plain.state_dict(), ours.state_dict())
    assert train(plain_model, plain, [5]) == train(model, ours, [5])


def test_compact_form_is_small_loads_with_weights_only_and_expands():
    model, ours, _ = pair(OPTIMIZERS["AdamW fused"])
    train(model, ours, range(3))
    full, full_bytes = saved(ours.state_dict())
    compact, compact_bytes = saved(compact_state_dict(ours))
    assert compact_bytes < 0.4 * full_bytes
    assert same(expanded(compact), full)
    assert same(expanded(full), full)
    compact["state"][0]["exp_avg"]["version"] = 99
    with pytest.raises(ValueError, match="version 99"):
        ours.load_state_dict(compact)


def test_states_that_are_not_finite_are_refused_at_loading():
    model, ours, _ = pair(OPTIMIZERS["AdamW fused"])
    train(model, ours, range(1))
    found = ours.state_dict()
    found["state"][0]["exp_avg"][0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"exp_avg of 0\.weight"):
        ours.load_state_dict(found)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_are_plain(copied):
    model, ours, _ = pair(OPTIMIZERS["AdamW fused"])
    train(model, ours, range(3))
    other_model, other = copied((model, ours))
    assert all(type(own) is dict for own in other.state.values())
    assert same(other.state_dict(), ours.state_dict())
    assert "step" not in other.__dict__
    assert train(other_model, other, [3]) == train(model, ours, [3])


def test_removed_optimizer_is_plain_with_decoded_states():
    model, ours, made = pair(OPTIMIZERS["AdamW fused"])
    train(model, ours, range(3))
    before = everything(model, ours)
    made.remove()
    made.remove()
    assert same(before, everything(model, ours))
    assert all(type(own) is dict for own in ours.state.values())
    assert "step" not in ours.__dict__
    assert not ours._optimizer_state_dict_post_hooks
    train(model, ours, range(3, 5))


def test_exception_in_the_middle_of_a_step_leaves_the_groups_whole():
    class Fails(Lion):
        def step(self, closure=None):
            super().step()
            if self.fails and sum(p.numel() for g in self.param_groups for p in g["params"]) > 20000:
                raise ArithmeticError

    model = net()
    optimizer = Fails(model.parameters())
    optimizer.fails = False
    quantized(model, optimizer)
    train(model, optimizer, range(2))
    optimizer.fails = True
    groups, params = optimizer.param_groups, list(optimizer.param_groups[0]["params"])
    with pytest.raises(ArithmeticError):
        train(model, optimizer, [2])
    assert optimizer.param_groups is groups
    assert all(a is b for a, b in zip(groups[0]["params"], params, strict=True))
    assert all(id(p) in {id(q) for q in params} for p in optimizer.state)
    optimizer.fails = False
    train(model, optimizer, range(3, 5))


@pytest.mark.parametrize("name", ["AdamW loop", "AdamW foreach", "AdamW fused", "Adagrad", "NAdam", "SGD"])
def test_threads_change_no_bit(name, monkeypatch):
    monkeypatch.setattr(memopt.quant.optimizer, "TILE", 8 * BLOCK)
    results, num_threads = [], torch.get_num_threads()
    try:
        for num in (1, 2, 3):
            torch.set_num_threads(num)
            model, ours, made = pair(OPTIMIZERS[name])
            for i in range(4):
                for j, p in enumerate(model.parameters()):
                    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * i + j))
                ours.step()
            assert (made._team._pool is not None) == (num > 1)
            assert torch.get_num_threads() == num
            results.append(everything(model, ours))
            made.remove()
    finally:
        torch.set_num_threads(num_threads)
    assert same(results[0], results[1])
    assert same(results[0], results[2])


def test_error_in_a_thread_reaches_the_caller():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        model, ours, made = pair(OPTIMIZERS["AdamW fused"])
        train(model, ours, range(2))
        own, groups = made._core, ours.param_groups

        def fails(optimizer):
            own(optimizer)
            if optimizer is not ours:
                raise ArithmeticError

        made._core = fails
        with pytest.raises(ArithmeticError):
            train(model, ours, [2])
        assert ours.param_groups is groups
        made._core = own
        train(model, ours, range(3, 5))
        made.remove()
    finally:
        torch.set_num_threads(num_threads)
