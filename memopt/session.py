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

    def _input_bytes(self) -> int:
        """Bytes of the last forward's inputs that are still there: a batch that is made in the step itself is not."""
        alive = {s.data_ptr(): s.nbytes() for ref in self._inputs if (s := ref()) is not None}
        return sum(alive.values())

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

        before = _held_bytes(model, self.optimizer) + self._input_bytes()
        gradients = [weakref.ref(p.grad.untyped_storage()) for p in model.parameters() if p.grad is not None]
        sizes = [storage.nbytes() for ref in gradients if (storage := ref()) is not None]
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
            result = step()
        now = peak = 0
        events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
        for event in sorted(events, key=lambda e: e.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
        # The profiler does not see the end of what was there before it: the last step's gradients, freed at the begin.
        freed = sum(size for ref, size in zip(gradients, sizes, strict=True) if ref() is None)
        self._peak_bytes = before - freed + peak
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
            decided = (
                "nothing to do, the plain step fits"
                if plan.is_plain
                else f"recompute {len(plan.drops)} ops, proven within {100 * plan.gap:.1f}% of the best step time"
            )
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


def _is_on_cuda(model: nn.Module) -> bool:
    return any(p.device.type == "cuda" for p in model.parameters())


def _held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of the storages of parameters, buffers, gradients and optimizer states, each once."""
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    if optimizer is not None:
        tensors += [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
    return _storage_bytes(tensors)


def _storage_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if _is_dense(t)}
    return sum(storages.values())


def _is_dense(t: torch.Tensor) -> bool:
    return t.layout is torch.strided and type(t) in (torch.Tensor, nn.Parameter)
