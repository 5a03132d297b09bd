"""Record one training step into a `Profile`: each op, each storage's lifetime, each saved tensor.

A `TorchDispatchMode` sees the ops, weak references tell when storages die, and saved-tensor hooks take the place of
what autograd keeps: the recorder holds geometry only, so that a storage's death is the death of its last *other*
holder. What the plain step would keep follows from the saved tensors; what a plan keeps instead is for the policies to
work out.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from memopt.profiler.frames import ModuleFrames
from memopt.profiler.geometry import GeometryMemo
from memopt.profiler.hardware import Hardware
from memopt.profiler.ops import OpFacts, draws_random, facts_of, flat_tensors, saved_by_custom_function, written_tensors
from memopt.profiler.profile import NEVER, Kind, Op, OpKey, Phase, Profile, SavedTensor, Storage, Value
from memopt.profiler.scratch import held_bytes, scratch_bytes

_DETACH = torch.ops.aten.detach.default

CUDA_BLOCK_BYTES = 512  # c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize


def allocated_bytes(num_bytes: int, device_type: str) -> int:
    """Bytes that the device's allocator takes for a request of `num_bytes`."""
    if device_type != "cuda":
        return num_bytes
    return (num_bytes + CUDA_BLOCK_BYTES - 1) // CUDA_BLOCK_BYTES * CUDA_BLOCK_BYTES


@dataclass(slots=True)
class _Storage:
    num_bytes: int
    kind: Kind
    birth: int
    module: str
    death: int = NEVER
    is_given: bool = False  # there before the step: a plan has nothing to decide about it


@dataclass(slots=True)
class _Value:
    storage: int
    maker: int
    overwritten_at: int = NEVER


@dataclass(slots=True)
class _Saved:
    value: int
    num_bytes: int
    packed_at: int
    is_hooked: bool
    unpacked_at: int = NEVER
    given_until: int = NEVER
    released_at: int = NEVER


class _Packed:
    """What autograd holds in place of a saved tensor: its geometry, and in a real run a copy of its storage."""

    __slots__ = ("__weakref__", "copy", "index", "like", "recorder")

    def __init__(self, recorder: Recorder, index: int, t: torch.Tensor) -> None:
        self.recorder, self.index = recorder, index
        self.like = (t.dtype, t.device, t.size(), t.stride(), t.storage_offset(), t.untyped_storage().nbytes())
        self.copy = None if recorder.is_fake else t.untyped_storage().clone()

    def __del__(self) -> None:
        self.recorder.released(self.index)


@dataclass(eq=False)
class Recorder(TorchDispatchMode):
    """Dispatch mode and saved-tensor hooks that write down a step. Phases are set by the caller, in order."""

    hardware: Hardware
    fake: FakeTensorMode | None
    device_type: str
    num_threads: int
    phase: Phase = Phase.FORWARD
    clock: int = 0
    frames: ModuleFrames | None = None
    ops: list[Op] = field(default_factory=list)
    storages: list[_Storage] = field(default_factory=list)
    values: list[_Value] = field(default_factory=list)
    saved: list[_Saved] = field(default_factory=list)
    current: dict[int, int] = field(default_factory=dict)  # storage's _cdata -> value that it holds now
    watches: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    is_paused: bool = False
    with_gradient: set[int] = field(default_factory=set)  # values that require a gradient
    escaped: set[int] = field(default_factory=set)  # ops whose results may be written unseen
    forward_ends_at: int = NEVER

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call = GeometryMemo(self.fake) if self.fake else lambda func, args, kwargs: func(*args, **kwargs)

    @property
    def is_fake(self) -> bool:
        return self.fake is not None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # spares 6 us per op

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    # Storages and values

    def give(self, t: torch.Tensor, kind: Kind, name: str) -> None:
        """Make known a tensor that is there before the step."""
        for inner in _plain_parts(t):
            if inner.untyped_storage()._cdata not in self.current:
                self._new_value(inner, -1, kind, name).is_given = True

    def _new_value(self, t: torch.Tensor, maker: int, kind: Kind, module: str) -> _Storage:
        storage = t.untyped_storage()
        key = storage._cdata
        # [Note: Expanded storages] A storage's bytes count, not the tensor's: an expanded tensor has few, a view many.
        made = _Storage(allocated_bytes(storage.nbytes(), self.device_type), kind, self.clock, module)
        index = len(self.storages)
        self.storages.append(made)
        self.current[key] = len(self.values)
        self.values.append(_Value(index, maker))
        self._watch(storage, key, partial(self._died, key, index))
        return made

    def _watch(self, storage: Any, key: int, gone: Callable[[], None]) -> None:
        self.watches[key] = weakref.ref(storage, lambda _: gone())

    def _died(self, key: int, index: int) -> None:
        self.storages[index].death = self.tick()
        del self.current[key], self.watches[key]

    def value_of(self, t: torch.Tensor) -> int | None:
        """The value that `t` shows now; None for what has no storage of its own."""
        if t.layout is not torch.strided or not _is_plain(t):
            return None
        key = t.untyped_storage()._cdata
        if key not in self.current:  # its making was not seen: the user holds it, or a raw kernel made it
            self._new_value(t, -1, Kind.INPUT, "")
        return self.current[key]

    # The dispatch mode

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        facts = facts_of(func)
        if facts.is_query:
            if self.is_fake and self.phase is Phase.STEP and facts.name == "aten._local_scalar_dense.default":
                return _any_number(args[0])
            return self.call(func, args, kwargs)
        inputs = flat_tensors(args)
        if kwargs:
            inputs += flat_tensors(kwargs.values())
        self._note_escapes(func, inputs)
        reads = tuple({v for t in inputs if (v := self.value_of(t)) is not None})
        at = self.tick()
        seconds, scratch = -1.0, -1
        if self.is_fake:
            out = self.call(func, args, kwargs)
        else:
            seconds, scratch, out = self._measured(func, args, kwargs)
        self._add(func, facts, args, kwargs, out, inputs, reads, at, seconds, scratch)
        return out

    def _measured(self, func: OpOverload, args: Any, kwargs: Any) -> tuple[float, int, Any]:
        """Seconds of the op, the bytes that its kernel took for itself (-1: not known here), and its result."""
        if self.device_type != "cuda":
            start = time.perf_counter()
            out = func(*args, **kwargs)
            return time.perf_counter() - start, -1, out
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        out = func(*args, **kwargs)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        made = max(torch.cuda.memory_allocated() - before, 0)
        return seconds, max(torch.cuda.max_memory_allocated() - before - made, 0), out

    def _note_escapes(self, func: OpOverload, inputs: list[torch.Tensor]) -> None:
        """See memopt/tape.py, [Note: Escapes]: a value that is detached, or read through `.data`, is never dropped."""
        if self.phase is not Phase.FORWARD or not torch.is_grad_enabled():
            return
        for t in inputs:
            if func is _DETACH or not t.requires_grad:
                value = self.value_of(t)
                if value is not None and value in self.with_gradient:
                    self.escaped.add(self.values[value].maker)

    def _is_outside(self, value: int) -> bool:
        """Whether a value is the caller's, or of unknown making: memory that is filled again, unseen."""
        found = self.values[value]
        return found.maker < 0 and self.storages[found.storage].kind is Kind.INPUT

    def _scratch(self, name: str, inputs: list[torch.Tensor], out: Any) -> int:
        if self.device_type != "cpu":
            return 0
        return scratch_bytes(name, inputs, flat_tensors((out,)), self.num_threads)

    def _add(
        self, func: OpOverload, facts: OpFacts, args: Any, kwargs: Any, out: Any,
        inputs: list[torch.Tensor], reads: tuple[int, ...], at: int, seconds: float, scratch: int,
    ) -> None:  # fmt: skip
        self.tick()
        frame = self.frames.current if self.frames else None
        module = frame.path if frame else ""
        op_index, makes, positions = len(self.ops), [], []
        outputs_moved = 0
        has_odd_part = False
        for t in written_tensors(facts, args, kwargs) if facts.is_mutable or facts.hidden else ():
            value = self.value_of(t)
            if value is not None:
                self.values[value].overwritten_at = at
                self.current[t.untyped_storage()._cdata] = len(self.values)
                makes.append(len(self.values))
                positions.append(-1)
                self.values.append(_Value(self.values[value].storage, op_index))
        for position, t in enumerate(flat_tensors((out,))):
            if t.layout is not torch.strided or not _is_plain(t):
                has_odd_part = True
                continue
            if t.untyped_storage()._cdata not in self.current:
                made = self._new_value(t, op_index, Kind.TEMPORARY, module)
                if self.is_fake and self.device_type == "cpu":
                    made.num_bytes = max(made.num_bytes, held_bytes(facts.name, inputs, t))
                makes.append(len(self.values) - 1)
                positions.append(position)
                outputs_moved += t.numel() * t.element_size()
        if not makes:  # a view
            if frame:
                frame.next_call(func)
            return
        packet = func._overloadpacket
        flops = 0
        if packet in flop_registry:
            flops = int(flop_registry[packet](*args, **kwargs, out_val=out))
        moved = outputs_moved + sum(t.numel() * t.element_size() for t in inputs)
        if seconds < 0:
            is_half = any(t.dtype in (torch.bfloat16, torch.float16) for t in inputs)
            seconds = self.hardware.op_s(facts.name, flops, moved, outputs_moved, is_half)
        is_random = draws_random(facts, args, kwargs)
        has_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in inputs)
        if has_gradient:
            results = [t for t in flat_tensors((out,)) if t.is_floating_point()]
            self.with_gradient.update(v for t in results if (v := self.value_of(t)) is not None)
        self.ops.append(
            Op(
                key=OpKey(module, facts.name, frame.next_call(func) if frame else 0),
                phase=self.phase,
                at=at,
                reads=reads,
                makes=tuple(makes),
                positions=tuple(positions),
                flops=flops,
                moved_bytes=moved,
                seconds=seconds,
                scratch_bytes=self._scratch(facts.name, inputs, out) if scratch < 0 else scratch,
                is_random=is_random,
                is_replayable=facts.is_pure
                and not is_random
                and not has_odd_part
                and self.phase is Phase.FORWARD
                and has_gradient
                and not any(self._is_outside(v) for v in reads),
            )
        )

    # The saved-tensor hooks

    def pack(self, t: torch.Tensor) -> Any:
        value = None if self.is_paused else self.value_of(t)
        if value is None or self.storages[self.values[value].storage].is_given:
            return t
        index = len(self.saved)
        was_paused, self.is_paused = self.is_paused, True
        self.saved.append(
            _Saved(
                value,
                t.numel() * t.element_size(),
                self.tick(),
                is_hooked=self.phase is Phase.FORWARD and not saved_by_custom_function(sys._getframe(1)),
            )
        )
        try:
            return _Packed(self, index, t)
        finally:
            self.is_paused = was_paused

    def unpack(self, packed: Any) -> Any:
        if not isinstance(packed, _Packed):
            return packed
        saved = self.saved[packed.index]
        now = self.tick()
        if saved.unpacked_at == NEVER:
            saved.unpacked_at = now
        dtype, device, size, stride, offset, _ = packed.like
        was_paused, self.is_paused = self.is_paused, True
        try:
            with torch.no_grad():
                if packed.copy is None:
                    given = self._unfilled(packed.like)
                else:
                    given = torch.empty(0, dtype=dtype, device=device).set_(packed.copy.clone(), offset, size, stride)
        finally:
            self.is_paused = was_paused
        storage = given.untyped_storage()
        key = storage._cdata
        self.current[key] = saved.value
        self._watch(storage, key, partial(self._given_died, key, saved))
        return given

    def _unfilled(self, like: Any) -> torch.Tensor:
        """A fake tensor of the same geometry over a storage of its own."""
        dtype, device, size, stride, offset, num_bytes = like
        assert self.fake is not None
        with in_kernel_invocation_manager(self.fake):
            flat = torch.empty(-(-num_bytes // dtype.itemsize), dtype=dtype, device="meta")
            meta = flat.as_strided(size, stride, offset)
        return FakeTensor(self.fake, meta, device)

    def _given_died(self, key: int, saved: _Saved) -> None:
        saved.given_until = max(saved.given_until, self.tick())
        del self.current[key], self.watches[key]

    def released(self, index: int) -> None:
        self.saved[index].released_at = self.tick()

    # The result

    def profile(self, *, model: nn.Module, mode: str, micro_batches: int, notes: tuple[str, ...]) -> Profile:
        """The finished profile. Storages that were saved for backward become activations."""
        self.watches.clear()  # what dies from here on outlives the step
        for saved in self.saved:
            storage = self.storages[self.values[saved.value].storage]
            if storage.kind is Kind.TEMPORARY:
                storage.kind = Kind.ACTIVATION
        return Profile(
            model=type(model).__name__,
            device=self.device_type,
            mode=mode,
            rates=self.hardware,
            ops=tuple(replace(op, is_replayable=False) if i in self.escaped else op for i, op in enumerate(self.ops)),
            storages=tuple(Storage(s.num_bytes, s.kind, s.birth, s.death, s.module) for s in self.storages),
            values=tuple(Value(v.storage, v.maker, v.overwritten_at) for v in self.values),
            saved=tuple(
                SavedTensor(s.value, s.num_bytes, s.packed_at, s.unpacked_at, s.given_until, s.released_at, s.is_hooked)
                for s in self.saved
            ),
            forward_ends_at=self.forward_ends_at,
            ends_at=self.clock,
            peak_bytes=0,
            micro_batches=micro_batches,
            notes=notes,
        )


def _is_plain(t: torch.Tensor) -> bool:
    """Whether `t` is an ordinary tensor with a storage of its own (a fake one counts as what it stands for)."""
    return type(t) in _PLAIN_TYPES


_PLAIN_TYPES = {torch.Tensor, nn.Parameter, FakeTensor}


def _plain_parts(t: torch.Tensor) -> list[torch.Tensor]:
    if t.layout is not torch.strided:
        if t.layout is torch.sparse_coo:
            return [t._indices(), t._values()]
        return []
    if isinstance(t, torch.Tensor) and hasattr(t, "_local_tensor"):
        return [t._local_tensor]
    return [t]


def _any_number(t: torch.Tensor) -> Any:
    """An answer to `.item()` inside the optimizer's step, where sizes do not depend on it (a step count, a
    found_inf)."""
    if t.dtype is torch.bool:
        return False
    return 1.0 if t.is_floating_point() else 1
