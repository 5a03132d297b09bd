"""Profiles of whole steps: against the allocator, fake against real, and what they leave behind (nothing)."""

import copy
import dataclasses
import gc
import json
import random
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from small_models import (
    VOCABULARY,
    ConvNet,
    Everything,
    Reused,
    TinyGPT,
    adamw,
    allocator_peak,
    grads_of,
    held_bytes,
    measured_peak,
    mlp,
    one_thread,
    profile_of,
    same_bits,
    square_loss,
    storage_bytes,
    token_loss,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.errors import FakeStepError, UnsupportedError
from memopt.policies.simulate import Simulator
from memopt.profiler.profile import NEVER, Kind, Phase, Profile

MODELS = {
    "mlp": (lambda: mlp((129, 515, 259, 11)), lambda: (torch.randn(601, 129),), square_loss),
    "gpt": (lambda: TinyGPT(layers=2), lambda: (torch.randint(0, VOCABULARY, (5, 97)),), token_loss),
    "conv": (ConvNet, lambda: (torch.randn(11, 3, 33, 31),), square_loss),
    "reused": (Reused, lambda: (torch.randn(1501, 17),), square_loss),
    "everything": (Everything, lambda: (torch.randn(5003, 12),), square_loss),
}
TOLERANCE, ROOM_BYTES = 0.01, 4096


def built(name):
    torch.manual_seed(0)
    build, inputs, loss = MODELS[name]
    return build(), inputs(), loss


@cache
def profiled(name, mode="fake"):
    with one_thread():
        model, inputs, loss = built(name)
        return profile_of(model, inputs, loss, mode=mode)


def of_kind(profile, kind):
    """Storages of a kind; 0-dim constants that the optimizer's step makes are no inputs."""
    return [s for s in profile.storages if s.kind is kind and (kind is not Kind.INPUT or s.birth == 0)]


def bytes_of(profile, kind):
    return sum(s.num_bytes for s in of_kind(profile, kind))


def deep_linear(num=8, width=64):
    """Parameters of equal size and hardly any activations."""
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num)))


# Against the allocator


def is_near(forecast, measured):
    return abs(forecast - measured) <= TOLERANCE * measured + ROOM_BYTES


@pytest.mark.parametrize("mode", ["fake", "run"])
@pytest.mark.parametrize("name", MODELS)
def test_peak_is_what_the_allocator_counts(name, mode):
    with one_thread():
        profile = profiled(name, mode)
        model, inputs, loss = built(name)
        measured = measured_peak(model, inputs, loss, adamw(model))

    assert is_near(profile.peak_bytes - profile.scratch_bytes, measured)


OPTIMIZERS = {
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, foreach=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, fused=True),
    "adamw loop": lambda ps: torch.optim.AdamW(ps, foreach=False),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "sgd momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "sgd foreach": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, foreach=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
    "amsgrad": lambda ps: torch.optim.Adam(ps, amsgrad=True),
    "adafactor": lambda ps: torch.optim.Adafactor(ps),
}


@pytest.mark.parametrize(
    ("name", "has_stepped"), [*((name, False) for name in OPTIMIZERS), ("adamw foreach", True), ("sgd momentum", True)]
)
def test_optimizer_step_is_what_the_allocator_counts(name, has_stepped):
    # The states count from the start, whether or not the optimizer has stepped yet.
    torch.manual_seed(0)
    with one_thread():
        model, x = mlp((65, 259, 131, 7)), (torch.randn(3, 65),)
        optimizer = OPTIMIZERS[name](model.parameters())
        if has_stepped:
            square_loss(model(*x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        profile = profile_of(model, x, optimizer=optimizer)
        measured = measured_peak(model, x, square_loss, optimizer)

    assert is_near(profile.peak_bytes - profile.scratch_bytes, measured)


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"foreach": True}, 5.0), ({"fused": True}, 4.0), ({"foreach": False, "fused": False}, 4.375)],
    ids=["foreach", "fused", "loop"],
)
def test_adamw_step_peak_in_parameter_sizes(options, expected):
    # P parameters, P gradients, 2 P states; foreach holds one more copy of all, the loop three of one parameter: 3 P/8.
    model = deep_linear()
    parameters = storage_bytes(model.parameters())
    profile = profile_of(model, (torch.randn(1, 64),), optimizer=adamw(model, **options))
    outcome = Simulator(profile).run(frozenset())

    step_at = min(op.at for op in profile.ops if op.phase is Phase.STEP)
    peak = int(outcome.levels[step_at:].max())

    assert peak / parameters == pytest.approx(expected, abs=0.02)


def test_gradients_of_an_earlier_micro_batch_are_there_in_the_forward():
    with one_thread():
        model, inputs, loss = built("gpt")
        optimizer = adamw(model)
        once = profile_of(model, inputs, loss, optimizer=optimizer)
        twice = profile_of(model, inputs, loss, optimizer=optimizer, micro_batches=2)
        # A real second micro-batch.
        loss(model(*inputs)).backward()
        optimizer.step()
        base = held_bytes(model, optimizer, inputs)

        measured = base + allocator_peak(lambda: (loss(model(*inputs)).backward(), optimizer.step()))

    gradients = storage_bytes(model.parameters())
    assert bytes_of(twice, Kind.GRADIENT) == gradients
    assert all(s.birth == 0 for s in twice.storages if s.kind is Kind.GRADIENT)
    assert all(s.birth > once.forward_ends_at for s in once.storages if s.kind is Kind.GRADIENT)
    assert twice.peak_bytes > once.peak_bytes
    assert twice.micro_batches == 2
    assert is_near(twice.peak_bytes - twice.scratch_bytes, measured)


# Fake and real


@pytest.mark.parametrize("name", MODELS)
def test_fake_and_real_profiles_agree(name):
    fake, real = profiled(name), profiled(name, "run")

    for phase in (Phase.FORWARD, Phase.LOSS, Phase.BACKWARD):
        ours, theirs = ([op for op in p.ops if op.phase is phase] for p in (fake, real))
        assert [op.key for op in ours] == [op.key for op in theirs]
        assert [op.is_replayable for op in ours] == [op.is_replayable for op in theirs]
        assert [op.flops for op in ours] == [op.flops for op in theirs]
    for kind in Kind:
        if kind is Kind.TEMPORARY:
            continue  # the optimizer's constants
        sizes = [Counter(s.num_bytes for s in of_kind(p, kind)) for p in (fake, real)]
        assert sizes[0] == sizes[1], kind
    assert [s.num_bytes for s in fake.saved] == [s.num_bytes for s in real.saved]
    assert is_near(fake.peak_bytes, real.peak_bytes)
    assert is_near(fake.min_bytes, real.min_bytes)
    assert (fake.mode, real.mode) == ("fake", "run")


def test_real_profile_measures_each_op():
    profile = profiled("gpt", "run")

    assert all(op.seconds > 0 for op in profile.ops)
    assert len({op.seconds for op in profile.ops}) > len(profile.ops) // 2


def test_profile_is_linear_in_ops():
    torch.manual_seed(0)
    ids = (torch.randint(0, VOCABULARY, (2, 17)),)
    profiles = [profile_of(TinyGPT(layers=n), ids, token_loss, optimizer=None) for n in (2, 4, 8)]

    for count in (
        lambda p: p.ends_at,
        lambda p: len(p.ops),
        lambda p: len(p.storages),
        lambda p: len(p.values),
        lambda p: len(p.saved),
    ):
        a, b, c = map(count, profiles)
        assert c - b == 2 * (b - a)


@pytest.mark.parametrize("name", MODELS)
def test_profile_is_consistent_with_itself(name):
    profile = profiled(name)

    moments = [op.at for op in profile.ops]
    assert moments == sorted(moments)
    assert 0 < profile.forward_ends_at < profile.ends_at
    assert profile.min_bytes <= profile.peak_bytes
    for s in profile.storages:
        assert s.num_bytes >= 0
        assert s.death == NEVER or s.death >= s.birth
    for i, op in enumerate(profile.ops):
        assert len(op.makes) == len(op.positions)
        assert all(profile.values[v].maker == i for v in op.makes)
        assert all(profile.values[v].maker < i for v in op.reads)
    for s in profile.saved:
        assert s.packed_at <= profile.ends_at
        assert s.unpacked_at == NEVER or s.unpacked_at > s.packed_at
    keys = [op.key for op in profile.ops if op.phase is Phase.FORWARD]
    assert len(keys) == len(set(keys))


def test_profile_is_deterministic():
    model, inputs, loss = built("gpt")
    optimizer = adamw(model)

    profiles = [profile_of(model, inputs, loss, optimizer=optimizer) for _ in range(2)]

    assert profiles[0] == profiles[1]


def test_profile_survives_json(tmp_path):
    profile = dataclasses.replace(profiled("gpt"), notes=("a note",))

    profile.save(tmp_path / "profile.json")

    assert Profile.load(tmp_path / "profile.json") == profile
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


@pytest.mark.parametrize(
    "data", [{}, {"format": "memopt.plan", "version": 1}, {"format": "memopt.profile", "version": 0}]
)
def test_what_is_no_profile_is_refused(data):
    with pytest.raises(ValueError, match="not a memopt profile"):
        Profile.from_json(data)


# What is what


@pytest.mark.parametrize("name", ["conv", "gpt"])
def test_kinds_add_up_to_what_the_model_holds(name):
    model, inputs, _ = built(name)
    profile = profiled(name)
    parameters = storage_bytes(model.parameters())

    assert bytes_of(profile, Kind.PARAMETER) == parameters
    assert bytes_of(profile, Kind.GRADIENT) == parameters
    assert bytes_of(profile, Kind.BUFFER) == storage_bytes(model.buffers())
    assert bytes_of(profile, Kind.INPUT) == storage_bytes(inputs)
    num_steps = sum(1 for _ in model.parameters())  # one 0-dim step count each
    assert bytes_of(profile, Kind.OPTIMIZER_STATE) == 2 * parameters + 4 * num_steps


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_states_are_counted(name):
    model, x = mlp((65, 259, 131, 7)), (torch.randn(3, 65),)
    optimizer = OPTIMIZERS[name](model.parameters())
    profile = profile_of(model, x, optimizer=optimizer)
    square_loss(model(*x)).backward()
    optimizer.step()

    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]

    assert bytes_of(profile, Kind.OPTIMIZER_STATE) == storage_bytes(states)


def test_tied_weights_count_once():
    ids = (torch.randint(0, VOCABULARY, (2, 17)),)
    tied, untied = (profile_of(TinyGPT(layers=1, tied=t), ids, token_loss) for t in (True, False))

    weight = VOCABULARY * 56 * 4
    assert bytes_of(untied, Kind.PARAMETER) - bytes_of(tied, Kind.PARAMETER) == weight
    assert bytes_of(untied, Kind.GRADIENT) - bytes_of(tied, Kind.GRADIENT) == weight


def test_frozen_parameters_have_no_gradients_and_no_states():
    model = mlp((65, 259, 131, 7))
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]

    profile = profile_of(model, (torch.randn(3, 65),), optimizer=torch.optim.AdamW(trained))

    assert bytes_of(profile, Kind.PARAMETER) == storage_bytes(model.parameters())
    assert bytes_of(profile, Kind.GRADIENT) == storage_bytes(trained)
    assert bytes_of(profile, Kind.OPTIMIZER_STATE) == 2 * storage_bytes(trained) + 4 * len(trained)


def test_no_optimizer_is_said_in_a_note():
    profile = profile_of(mlp(), (torch.randn(3, 29),), optimizer=None)

    assert bytes_of(profile, Kind.OPTIMIZER_STATE) == 0
    assert any("optimizer" in note for note in profile.notes)


def test_random_ops_are_marked():
    random_ops = {op.key.op for op in profiled("gpt").ops if op.is_random}

    assert random_ops
    assert all("bernoulli" in name or "dropout" in name for name in random_ops)
    assert not any(op.is_replayable for op in profiled("gpt").ops if op.is_random)


# Models of all kinds


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor


class Keyword(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(29, 7), kind

    def forward(self, x, *, scale: float = 1.0, labels: Any = None):
        logits = self.layer(x) * scale
        loss = (logits - labels["y"]).square().mean()
        if self.kind == "dict":
            return {"loss": loss, "logits": logits}
        return Output(logits, loss) if self.kind == "dataclass" else loss


@pytest.mark.parametrize("kind", ["dict", "dataclass", "tensor"])
def test_keyword_arguments_and_outputs_that_carry_a_loss(kind):
    kwargs = {"x": torch.randn(11, 29), "scale": 2.0, "labels": {"y": torch.randn(11, 7)}}

    profile = memopt.profile(memopt.Workload(Keyword(kind), kwargs=kwargs))

    assert bytes_of(profile, Kind.INPUT) == (11 * 29 + 11 * 7) * 4
    assert bytes_of(profile, Kind.GRADIENT) == (29 * 7 + 7) * 4


def test_output_without_a_loss_says_what_to_give():
    with pytest.raises(ValueError, match="loss"):
        memopt.profile(memopt.Workload(mlp(), args=(torch.randn(3, 29),)))


@pytest.mark.parametrize(("loss", "match"), [(lambda y: y, "one element"), (lambda y: y.sum().detach(), "gradient")])
def test_loss_that_is_none_is_refused(loss, match):
    with pytest.raises(UnsupportedError, match=match):
        memopt.profile(memopt.Workload(mlp(), args=(torch.randn(3, 29),), loss=loss))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_users_own_checkpoint_inside(use_reentrant):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block, self.last = nn.Linear(65, 131), mlp((131, 515, 131)), nn.Linear(131, 7)

        def forward(self, x):
            return self.last(checkpoint(self.block, self.first(x), use_reentrant=use_reentrant))

    with one_thread():
        torch.manual_seed(0)
        model, x = Net(), (torch.randn(601, 65),)
        optimizer = adamw(model)
        profile = profile_of(model, x, optimizer=optimizer)
        measured = measured_peak(model, x, square_loss, optimizer)

    assert is_near(profile.peak_bytes - profile.scratch_bytes, measured)


class DataDependent(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(29, 31), nn.Linear(31, 7)

    def forward(self, x):
        y = self.a(x)
        if y.sum().item() > 1e9:
            y = y * 2
        return self.b(y[y[:, 0] > -1e9])


def test_data_dependent_forward_is_profiled_for_real_with_a_note():
    profile = profile_of(DataDependent(), (torch.randn(23, 29),))

    assert profile.mode == "run"
    assert any("for real" in note for note in profile.notes)


def test_data_dependent_forward_on_meta_is_refused():
    with torch.device("meta"):
        model, x = DataDependent(), torch.empty(23, 29)

    with pytest.raises(FakeStepError):
        memopt.profile(memopt.Workload(model, args=(x,), loss=square_loss))


def test_model_on_meta_is_profiled_as_on_the_cpu():
    with torch.device("meta"):
        model, ids = TinyGPT(layers=2), torch.empty(5, 97, dtype=torch.int64)
    with one_thread():
        profile = profile_of(model, (ids,), token_loss)

    assert profile.device == "cpu"
    assert profile.peak_bytes == profiled("gpt").peak_bytes


# No trace

CALLS: list[int] = []


class Stateful(nn.Module):
    """Changes all that a forward can change."""

    def __init__(self):
        super().__init__()
        self.enter, self.norm, self.drop = nn.Linear(29, 17), nn.BatchNorm1d(17), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(()))
        self.num_calls, self.cache, self.table = 0, {}, None

    def forward(self, x):
        CALLS.append(1)
        self.num_calls += 1
        self.cache[self.num_calls] = x.shape
        if self.table is None:
            self.table = torch.arange(17.0)
        self.count += 1
        noise = random.random() + float(np.random.rand())
        return self.drop(self.norm(self.enter(x)) * self.table) * noise


def state_of(model, optimizer, x):
    return {
        **{k: v.clone() for k, v in model.state_dict().items()},
        **{f"grad of {n}": g for n, g in grads_of(model).items()},
        "x": x.clone(),
        "rng": torch.get_rng_state(),
    }


@pytest.mark.parametrize("mode", ["fake", "run"])
def test_profile_leaves_no_trace(mode):
    CALLS.clear()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model, x = Stateful(), torch.randn(23, 29)
    optimizer = adamw(model)
    model.norm.weight.grad = torch.ones(17)  # a gradient that is there already
    seen, attributes = [], set(model.__dict__)
    model.enter.register_forward_hook(lambda m, a, out: seen.append(out))
    model.enter.register_full_backward_hook(lambda m, g, h: seen.append(g))
    hooks = {n: dict(m._forward_hooks) for n, m in model.named_modules()}
    before, python, numpy = state_of(model, optimizer, x), random.getstate(), np.random.get_state()[1].tolist()
    grad_mode = torch.is_grad_enabled()

    profile_of(model, (x,), optimizer=optimizer, mode=mode)

    assert same_bits(before, state_of(model, optimizer, x))
    assert (python, numpy) == (random.getstate(), np.random.get_state()[1].tolist())
    assert (model.num_calls, model.cache, model.table, seen) == (0, {}, None, [])
    assert set(model.__dict__) == attributes
    assert {n: dict(m._forward_hooks) for n, m in model.named_modules()} == hooks
    assert len(optimizer.state) == 0
    assert model.training
    assert torch.is_grad_enabled() is grad_mode
    if mode == "fake":
        assert CALLS == []  # a real profile can't take back what a forward does to globals


def test_profile_of_an_optimizer_that_has_stepped_leaves_its_states():
    model, inputs, loss = built("gpt")
    optimizer = adamw(model)
    loss(model(*inputs)).backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])

    for mode in ("fake", "run"):
        profile_of(model, inputs, loss, optimizer=optimizer, mode=mode)

    after = optimizer.state_dict()["state"]
    assert all(same_bits(before[i], after[i]) for i in before)


@pytest.mark.parametrize("mode", ["fake", "run"])
def test_profile_does_not_fill_the_autocast_cache(mode):
    model, x = mlp((29, 7)), torch.randn(3, 29)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        profile = profile_of(model, (x,), mode=mode)
        with torch.no_grad():
            model[0].weight.zero_()
            model[0].bias.zero_()
        assert not model(x).any()
    assert any("_to_copy" in op.key.op for op in profile.ops)  # the cast weight was seen


@pytest.mark.parametrize("mode", ["fake", "run"])
def test_failed_profile_leaves_no_trace(mode):
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter = nn.Linear(29, 17)

        def forward(self, x):
            torch.rand(3)
            self.enter(x)
            raise RuntimeError("in the middle")

    model, x = Failing(), torch.randn(3, 29)
    before = state_of(model, None, x)
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()

    with pytest.raises((RuntimeError, UnsupportedError), match="in the middle"):
        profile_of(model, (x,), mode=mode)

    assert same_bits(before, state_of(model, None, x))
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == modes
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_fake_profile_allocates_nothing_and_holds_nothing():
    model, inputs, loss = built("gpt")
    optimizer = adamw(model)
    profile_of(model, inputs, loss, optimizer=optimizer)
    gc.collect()
    before = sum(isinstance(x, torch.Tensor) for x in gc.get_objects())

    profile_of(model, inputs, loss, optimizer=optimizer)

    gc.collect()
    assert sum(isinstance(x, torch.Tensor) for x in gc.get_objects()) <= before


def test_model_that_cannot_be_copied_is_refused():
    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter = nn.Linear(29, 17)

        def __deepcopy__(self, memo):
            raise TypeError("not me")

        def forward(self, x):
            return self.enter(x)

    with pytest.raises(UnsupportedError, match="not me"):
        profile_of(Stubborn(), (torch.randn(3, 29),), optimizer=None)
