"""A session: what was decided for a model, what was measured, and how to undo it."""

from __future__ import annotations

import itertools
import logging
import statistics
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from memopt.policies.plan import Plan
from memopt.quant.optimizer import QuantizedOptimizer, compact_state_dict
from memopt.state import OffloadedState, key_of, quantized_optimizer
from memopt.units import format_bytes

if TYPE_CHECKING:
    from memopt.profiler.profile import Profile

logger = logging.getLogger("memopt")

T = TypeVar("T")


@dataclass(slots=True)
class Measured:
    """What real steps took. None: not measured yet."""

    peak_bytes: int | None = None  # on CUDA since the session began; on a CPU by `Session.measure`
    step_s: float | None = None  # median from one training forward to the next


class Session:
    """Memopt at work on one model. `remove()` or leaving its context puts the model back."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, remove: Callable[[nn.Module], None]
    ) -> None:
        self._model = weakref.ref(model)  # the model holds the session
        self.optimizer = optimizer
        self._remove = remove
        self.profile: Profile | None = None
        self.plan: Plan | None = None
        self.state: OffloadedState | None = None  # what of the model's state is on a store
        self.quantized: QuantizedOptimizer | None = None  # the optimizer's states in 8 bits
        self._key: tuple[object, ...] = ()  # of what state and quantized were made for
        self.notes: list[str] = []
        self._forwards: deque[float] = deque(maxlen=32)
        self._peak_bytes: int | None = None
        self._inputs: list[weakref.ref[torch.UntypedStorage]] = []  # of the last training forward
        self.is_removed = False

    # Undoing

    def remove(self) -> None:
        """Put the model back as it was. Graphs whose backward has not come yet stay valid. May be called again."""
        model = self._model()
        if model is not None and not self.is_removed:
            self._remove(model)
        self.is_removed = True
        self._remove_state()

    def _remove_state(self) -> None:
        state, self.state = self.state, None
        quantized, self.quantized, self._key = self.quantized, None, ()
        try:
            if state is not None:
                state.remove()
        finally:
            if quantized is not None:
                quantized.remove()

    def follow(self, plan: Plan | None) -> OffloadedState | None:
        """A training forward begins under `plan` (None: without one): put model state where the plan wants it."""
        model = self._model()
        assert model is not None, "a model that runs is there"
        if plan is not None and self._key != key_of(plan, self.optimizer):
            self._remove_state()
            try:
                self.quantized = quantized_optimizer(plan, model, self.optimizer, self.note)
                if plan.away or plan.moves:
                    self.state = OffloadedState(plan, model, self.optimizer, self.quantized, self.note)
            except BaseException:
                self._remove_state()
                raise
            self._key = key_of(plan, self.optimizer)
        if self.state is not None:
            self.state.begin_step()
        return self.state

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.remove()

    def for_copy(self, memo: dict[int, Any]) -> Session:
        """A session for the deepcopy that `memo` holds of this model; the optimizer is the original's alone."""
        original = self._model()
        assert original is not None, "a model that is copied is there"
        own = Session(memo.get(id(original), original), None, self._remove)
        own.profile, own.plan = self.profile, self.plan
        return own

    # Checkpoints

    def compact_state_dict(self) -> dict[str, Any]:
        """`optimizer.state_dict()` with 8-bit states as they are, a quarter of the bytes.

        `optimizer.load_state_dict` takes it where states are in 8 bits too; `memopt.expanded` makes torch's own of it.
        Raises ValueError without an optimizer.
        """
        if self.optimizer is None:
            raise ValueError("the session has no optimizer: apply(plan, model, optimizer), or wrap_optimizer")
        return compact_state_dict(self.optimizer)

    # Measuring

    def note(self, text: str) -> None:
        """Add a line to the report, once."""
        if text not in self.notes:
            self.notes.append(text)
            logger.info("memopt: %s", text)

    def note_forward(self, now_s: float, inputs: list[torch.Tensor]) -> None:
        """Note the begin of a training forward at `now_s` seconds of a steady clock, and what it was called with."""
        self._forwards.append(now_s)
        self._inputs = [weakref.ref(t.untyped_storage()) for t in inputs if _is_dense(t)]

    def _held_bytes(self, model: nn.Module) -> int:
        """Bytes of the model's state and the last forward's inputs that are in memory."""
        storages = [t.untyped_storage() for t in self._in_memory(_state_tensors(model, self.optimizer))]
        storages += [s for ref in self._inputs if (s := ref()) is not None]  # a batch made in the step itself is gone
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    def _in_memory(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        away = self.state.away() if self.state is not None else set()
        return [t for t in tensors if _is_dense(t) and t.data_ptr() not in away]

    def measure(self, step: Callable[[], T]) -> T:
        """Run one training step under the allocator's own events, note its peak, and return the step's result.

        On a CPU this takes torch's profiler (slow: for one step), and counts parameters, buffers, states, the forward's
        own inputs and all that the step allocates; on CUDA the caching allocator counts always, and everything.
        """
        model = self._model()
        if model is None:
            raise ValueError("the session's model is gone")
        if _is_on_cuda(model):
            torch.cuda.reset_peak_memory_stats()
            result = step()
            self._peak_bytes = torch.cuda.max_memory_allocated()
            return result
        from torch.profiler import ProfilerActivity, profile

        before, gradients = self._held_bytes(model), sum(t.nbytes for t in self._in_memory(_gradients(model)))
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            result = step()
        now = peak = 0
        events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
        for event in sorted(events, key=lambda e: e.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
        # The profiler may not see the end of what was there before it: the last step's gradients, freed at the begin.
        # Then its sum ends too high by just them.
        is_unseen = gradients > 0 and now - (self._held_bytes(model) - before) > gradients // 2
        self._peak_bytes = before - (gradients if is_unseen else 0) + peak
        return result

    @property
    def measured(self) -> Measured:
        """Peak and step time of the real steps so far."""
        model = self._model()
        peak = self._peak_bytes
        if peak is None and model is not None and _is_on_cuda(model):
            peak = torch.cuda.max_memory_allocated()
        times = list(self._forwards)
        gaps = [b - a for a, b in itertools.pairwise(times)]
        return Measured(peak, statistics.median(gaps) if gaps else None)

    # Telling

    def report(self) -> str:
        """A few lines: the plan, forecast and measurement, and what was not followed and why."""
        lines = []
        plan, measured = self.plan, self.measured
        if plan is None:
            lines.append("memopt: no plan yet: it is made at the first training forward")
        else:
            f = plan.forecast
            decided = "nothing to do, the plain step fits" if plan.is_plain else _decided(plan)
            lines += [
                f"memopt: budget {format_bytes(plan.budget_bytes)} ({plan.budget_bytes} B): {decided}",
                f"  forecast peak {format_bytes(f.peak_bytes)} (plain {format_bytes(f.plain_peak_bytes)}) "
                f"at {f.peak_at}; step time x{f.slowdown:.2f}",
            ]
        if measured.peak_bytes is not None:
            error = f" ({100 * (plan.forecast.peak_bytes / measured.peak_bytes - 1):+.1f}% forecast)" if plan else ""
            lines.append(f"  measured peak {format_bytes(measured.peak_bytes)}{error}")
        if measured.step_s is not None:
            lines.append(f"  measured step {1e3 * measured.step_s:.1f} ms")
        lines += [f"  note: {note}" for note in (*(plan.notes if plan else ()), *self.notes)]
        return "\n".join(lines)


def _decided(plan: Plan) -> str:
    parts = []
    if plan.drops:
        parts.append(f"recompute {len(plan.drops)} ops, within {100 * plan.gap:.1f}% of the best step time")
    if plan.away:
        counts = {
            "parameters": sum(a.parameter for a in plan.away),
            "gradients": sum(a.gradient for a in plan.away),
            "optimizer states": sum(a.states for a in plan.away),
        }
        f = plan.forecast
        away = ", ".join(f"{name} of {num}" for name, num in counts.items() if num)
        parts.append(
            f"{format_bytes(f.store_bytes)} of state on {plan.nvme} ({away} parameters); each step reads "
            f"{format_bytes(f.read_bytes)} and writes {format_bytes(f.written_bytes)}"
        )
    if plan.quantized:
        parts.append(f"optimizer states of {len(plan.quantized)} parameters in 8 bits (their numbers change)")
    return "; ".join(parts)


def _is_on_cuda(model: nn.Module) -> bool:
    return any(p.device.type == "cuda" for p in model.parameters())


def _state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """Parameters, buffers, gradients and optimizer states."""
    tensors = [*model.parameters(), *model.buffers(), *_gradients(model)]
    if optimizer is not None:
        tensors += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return tensors


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def _is_dense(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and type(t) in (torch.Tensor, nn.Parameter)
