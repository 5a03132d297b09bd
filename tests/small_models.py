"""Small models with sizes that no two allocations share, and what tests measure of a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import memopt
from memopt.policies.plan import Drop, Plan
from memopt.policies.solve import Found, Solver

VOCABULARY = 157


def mlp(sizes: tuple[int, ...] = (29, 67, 103, 59, 11), activation: Callable[[], nn.Module] = nn.GELU) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1])


class Block(nn.Module):
    """A pre-norm transformer block with dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + F.dropout(self.out(y), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), self.dropout, self.training)


class TinyGPT(nn.Module):
    """Token ids to logits; the head shares the embedding's weight if `tied`."""

    def __init__(
        self, layers: int = 4, width: int = 56, heads: int = 4, dropout: float = 0.1, tied: bool = False
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ConvNet(nn.Module):
    """Convolution, batch norm and an in-place ReLU, three times, and a linear head."""

    def __init__(self, channels: tuple[int, ...] = (3, 13, 19, 23)) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for a, b in pairwise(channels):
            layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels[-1], 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x).mean((2, 3)))


class Reused(nn.Module):
    """One block that runs three times."""

    def __init__(self, width: int = 61) -> None:
        super().__init__()
        self.first = nn.Linear(17, width)
        self.block = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(3):
            x = x + self.block(x)
        return self.head(x)


class Everything(nn.Module):
    """Dropout, batch norm, in-place ops, a reused layer and a residual in one small net."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(12, 24)
        self.norm = nn.BatchNorm1d(24)
        self.middle = nn.Linear(24, 24)
        self.drop = nn.Dropout(0.3)
        self.act = nn.ReLU(inplace=True)
        self.leave = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.enter(x)))
        y = self.drop(torch.tanh(self.middle(x)))
        y = y + x
        y.mul_(1.5)
        y = F.gelu(self.middle(y)) * torch.sigmoid(y)
        z = torch.softmax(y, -1).clone()
        z.add_(1.0)
        return self.leave(z * y + F.silu(x))


def token_loss(logits: Tensor) -> Tensor:
    """Cross entropy against fixed targets."""
    targets = torch.arange(logits.numel() // VOCABULARY, device=logits.device) % VOCABULARY
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), targets)


def square_loss(output: Tensor) -> Tensor:
    """Mean of squares."""
    return output.square().mean()


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of computation: kernels' scratch depends on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def storage_bytes(tensors: Any) -> int:
    """Bytes of the distinct storages of `tensors`."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None, inputs: tuple[Any, ...] = ()) -> int:
    """Bytes of parameters, buffers, gradients, optimizer states and inputs, each storage once."""
    tensors = [*model.parameters(), *model.buffers(), *(x for x in inputs if isinstance(x, Tensor))]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    if optimizer is not None:
        tensors += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return storage_bytes(tensors)


def allocator_peak(step: Callable[[], Any]) -> int:
    """The largest sum of the CPU allocator's events while `step` runs, from zero at its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def train_step(model: nn.Module, inputs: tuple[Any, ...], loss: Callable[[Any], Tensor], optimizer: Any) -> None:
    """One step that holds no output and no loss longer than it must."""
    optimizer.zero_grad()
    value = loss(model(*inputs))
    value.backward()
    optimizer.step()


def measured_peak(model: nn.Module, inputs: tuple[Any, ...], loss: Callable[[Any], Tensor], optimizer: Any) -> int:
    """Peak bytes of a real step after a first one that makes the optimizer's states: all that is there, included."""
    train_step(model, inputs, loss, optimizer)
    optimizer.zero_grad()
    base = held_bytes(model, optimizer, inputs)
    return base + allocator_peak(lambda: train_step(model, inputs, loss, optimizer))


STEP = "measured step"


def in_measured_step(step: Callable[[], Any]) -> Any:
    with torch.autograd.profiler.record_function(STEP):
        return step()


@contextmanager
def all_allocations() -> Iterator[list[int]]:
    """Peak of the allocator's own events within the measured step, over all that was allocated inside.

    The profiler knows the size of a block that is freed only if it saw it come, so it must see the whole run.
    """
    measured: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        yield measured
    events = sorted(prof.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    (step,) = [e for e in events if e.name() == STEP]
    now = peak = 0
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            if step.start_ns() <= event.start_ns() <= step.end_ns():
                peak = max(peak, now)
    measured.append(peak)


def grads_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of the gradients by name."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def same(a: Any, b: Any) -> bool:
    """Whether two nests of dicts, lists, tensors and numbers are equal, tensors bit for bit and with their strides."""
    if isinstance(a, torch.Tensor):
        if not isinstance(b, torch.Tensor) or (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
            return False
        if a.layout is not torch.strided:
            return same(a.coalesce().values(), b.coalesce().values())
        return a.stride() == b.stride() and a.detach().numpy().tobytes() == b.detach().numpy().tobytes()
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def same_bits(a: Any, b: Any) -> bool:
    """Whether two dicts of tensors (or two tensors) are equal bit for bit, NaN included."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[k], b[k]) for k in a)
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return (
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        if a.dim()
        else bool(a == b or (math.isnan(float(a)) and math.isnan(float(b))))
    )


def profile_of(model: nn.Module, inputs: tuple[Any, ...], loss: Any = square_loss, **options: Any) -> memopt.Profile:
    """A fake profile with AdamW, unless told otherwise."""
    options.setdefault("optimizer", adamw(model))
    mode = options.pop("mode", "fake")
    return memopt.profile(memopt.Workload(model, args=inputs, loss=loss, **options), mode=mode)


class OpCounter(TorchDispatchMode):
    """Counts the ops that compute something: not what gives a replayed tensor its geometry or compares samples."""

    AROUND = frozenset(
        ["aten.as_strided.default", "aten.detach.default", "aten.empty.memory_format", "aten.equal.default"]
    )

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name not in self.AROUND and not name.startswith("aten.set_"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def plan_dropping(profile: memopt.Profile, values: Any = None) -> Plan:
    """A plan that drops exactly `values`, by default all that can be dropped."""
    solver = Solver(profile)
    dropped = solver.simulator.droppable if values is None else frozenset(values)
    drops = []
    for op in profile.ops:
        positions = tuple(p for v, p in zip(op.makes, op.positions, strict=True) if v in dropped)
        if positions:
            drops.append(Drop(op.key, positions))
    return Plan(
        budget_bytes=profile.peak_bytes,
        drops=tuple(drops),
        forecast=solver.forecast(Found(dropped, solver.run(dropped))),
        gap=0.0,
        levers=("recompute",),
    )
