"""`memopt demo`: a small GPT trained plainly and under two budgets, side by side; the table shows what it cost.

The text is the source of Python's own standard library, so nothing is downloaded. All runs start from the same weights,
see the same bytes and take turns, step by step. Peaks are sums of the allocator's own events, not memopt's bookkeeping.
"""

from __future__ import annotations

import contextlib
import copy
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from memopt.api import plan, profile
from memopt.apply import apply
from memopt.policies.plan import Plan
from memopt.session import Session
from memopt.workload import Workload

TEXT_BYTES = 2_000_000
NUM_UNTIMED = 2  # steps under the profiler, which slows them: their peaks are measured, their times are not


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the demo. By default activations take about twice what parameters, gradients and states do."""

    layers: int = 14
    width: int = 160
    heads: int = 5
    batch: int = 4
    seq: int = 256
    steps: int = 8
    shares: tuple[float, ...] = (0.70, 0.45)  # budgets, of the plain step's measured peak
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run: what was promised and what happened. For the plain run the budget is None."""

    name: str
    budget_bytes: int | None
    forecast_bytes: int
    measured_bytes: int
    forecast_slowdown: float
    step_s: float  # median of the timed steps
    slowdown: float  # median of this run's step over the plain run's of the same turn
    losses: tuple[float, ...]
    num_recomputed: int
    is_equal: bool  # losses and final weights are those of the plain run, bit for bit

    @property
    def is_within(self) -> bool:
        """Whether the measured peak is within the budget."""
        return self.budget_bytes is None or self.measured_bytes <= self.budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The rows of a demo, the plain one first."""

    shape: Shape
    num_parameters: int
    num_threads: int
    rows: tuple[Row, ...]

    @property
    def is_good(self) -> bool:
        """Equal numbers and no peak over its budget."""
        return all(row.is_equal and row.is_within for row in self.rows)


class Block(nn.Module):
    """A pre-norm transformer block with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.dropout(self.out(attended))
        made: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return made


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, layers: int, width: int, heads: int, seq: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(256, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def standard_library_text(num_bytes: int = TEXT_BYTES) -> Tensor:
    """The first bytes of the standard library's top-level sources by name, uint8 of shape (num_bytes,)."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= num_bytes:
            break
    if len(text) < num_bytes // 10:
        raise FileNotFoundError(f"no Python sources in {sysconfig.get_path('stdlib')}: the demo trains on them")
    return torch.frombuffer(text[:num_bytes], dtype=torch.uint8)


def batch_at(text: Tensor, step: int, shape: Shape) -> tuple[Tensor, Tensor]:
    """Input bytes and their successors for one step, each of shape (batch, seq)."""
    generator = torch.Generator().manual_seed(1_000_003 * shape.seed + step)
    starts = torch.randint(len(text) - shape.seq - 1, (shape.batch,), generator=generator)
    windows = torch.stack([text[s : s + shape.seq + 1] for s in starts.tolist()]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def next_byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    loss: Tensor = F.cross_entropy(logits.flatten(0, 1), target.flatten())
    return loss


@dataclass(slots=True)
class _Run:
    """One model in training, plain or under a plan."""

    name: str
    model: GPT
    optimizer: torch.optim.Optimizer
    text: Tensor
    shape: Shape
    budget_bytes: int | None = None
    plan: Plan | None = None
    session: Session | None = None
    measured_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    def step(self) -> None:
        """An ordinary training step; nothing in it knows of memopt."""
        number = len(self.losses)
        torch.manual_seed(number)  # the dropout masks of a step are the same in every run
        ids, target = batch_at(self.text, number, self.shape)
        loss = next_byte_loss(self.model(ids), target)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def start(self, plan_: Plan) -> None:
        """Apply the plan and measure the peaks of the first two steps: one makes the states, one has them."""
        self.plan = plan_
        self.session = apply(plan_, self.model, self.optimizer)
        for _ in range(NUM_UNTIMED):
            with _without_chatter():
                self.session.measure(self.step)
            self.measured_bytes = max(self.measured_bytes, self.session.measured.peak_bytes or 0)

    def timed_step(self) -> None:
        begin_s = time.perf_counter()
        self.step()
        self.times_s.append(time.perf_counter() - begin_s)


@contextlib.contextmanager
def _without_chatter() -> Iterator[None]:
    """Keep from stderr the lines that torch's profiler writes there when it starts and stops; others are passed on."""
    sys.stderr.flush()
    own = os.dup(2)
    try:
        with tempfile.TemporaryFile() as caught:
            os.dup2(caught.fileno(), 2)
            try:
                yield
            finally:
                sys.stderr.flush()
                os.dup2(own, 2)
                caught.seek(0)
                for line in caught:
                    if not line.startswith(b"USDT:"):
                        os.write(2, line)
    finally:
        os.close(own)


def run_demo(shape: Shape | None = None, progress: Callable[[str], None] | None = None) -> Result:
    """Train plainly and under each budget of `shape`, and compare. The global random state is put back afterwards.

    Raises InfeasibleBudgetError if a share is below what recomputation can reach for these sizes.
    """
    shape = shape or Shape()
    if shape.steps <= NUM_UNTIMED:
        raise ValueError(f"the demo needs at least {NUM_UNTIMED + 1} steps, not {shape.steps}")
    tell = progress or (lambda text: None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.seed)
        text = standard_library_text()
        first = GPT(shape.layers, shape.width, shape.heads, shape.seq)
        names = ["plain", *(f"{100 * share:.0f}%" for share in shape.shares)]
        runs = [_run_named(name, copy.deepcopy(first), text, shape) for name in names]

        tell("profiling one step")
        plain = runs[0]
        ids, target = batch_at(text, 0, shape)
        facts = profile(
            Workload(
                plain.model,
                args=(ids,),
                loss=lambda logits: next_byte_loss(logits, target),
                optimizer=plain.optimizer,
            ),
            mode="run",
        )
        tell("measuring the plain step")
        plain.start(plan(facts, facts.peak_bytes))
        for run, share in zip(runs[1:], shape.shares, strict=True):
            run.budget_bytes = int(share * plain.measured_bytes)
            tell(f"planning for {run.name} of the plain peak")
            run.start(plan(facts, run.budget_bytes))
        for turn in range(shape.steps - NUM_UNTIMED):
            tell(f"training, step {turn + NUM_UNTIMED + 1} of {shape.steps}")
            for i in range(len(runs)):  # whoever is first in one turn is not in the next
                runs[(i + turn) % len(runs)].timed_step()
    return Result(
        shape=shape,
        num_parameters=sum(p.numel() for p in first.parameters()),
        num_threads=torch.get_num_threads(),
        rows=tuple(_row(run, plain) for run in runs),
    )


def _run_named(name: str, model: GPT, text: Tensor, shape: Shape) -> _Run:
    return _Run(name, model, torch.optim.AdamW(model.parameters(), lr=3e-4), text, shape)


def _row(run: _Run, plain: _Run) -> Row:
    assert run.plan is not None
    return Row(
        name=run.name,
        budget_bytes=run.budget_bytes,
        forecast_bytes=run.plan.forecast.peak_bytes,
        measured_bytes=run.measured_bytes,
        forecast_slowdown=run.plan.forecast.slowdown,
        step_s=statistics.median(run.times_s),
        slowdown=_median_ratio(run.times_s, plain.times_s),
        losses=tuple(run.losses),
        num_recomputed=len(run.plan.drops),
        is_equal=run.losses == plain.losses and _have_equal_weights(run.model, plain.model),
    )


def _median_ratio(times_s: Sequence[float], plain_s: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(times_s, plain_s, strict=True))


def _have_equal_weights(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
