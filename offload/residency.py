"""A tensor of model state that is in memory while it is used and on a store between uses.

[Note: Away] A tensor that is away is not empty: its data is a shared memory mapping of its place on the store. Whoever
reads it outside its use (a checkpoint, a norm, a moving average, a debugger) gets its true values by page faults, and
whoever writes it writes the store. So what is not reloaded in time costs time; it never changes a number. Reloading and
offloading move `Tensor.data`: the object, its version counter and its place in graphs and optimizers stay.

[Note: Unseen writes] A write through `.data` moves no version counter. While only ops run that the tape sees, nobody
writes unseen; where the user's own code may run, what is in memory is compared by partial sums before its content on
the store is believed. What is away can be written freely: that is the store.

[Note: Holders] A reloaded tensor may be offloaded only if nobody else looks at its memory: a view that the user's code
keeps would go on to show old values. The storage's use count tells; a tensor that is held stays in memory.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from memopt.offload.sizes import pages_up, stored_bytes
from memopt.offload.store import Extent, Store, aligned_empty, joined

_PLAIN_TYPES = (torch.Tensor, nn.Parameter)


def can_be_away(t: torch.Tensor) -> bool:
    """Whether `t` is a dense CPU tensor that is not small, so that a copy of its bytes is all of it."""
    return (
        type(t) in _PLAIN_TYPES
        and t.layout is torch.strided
        and t.device.type == "cpu"
        and stored_bytes(t.numel() * t.element_size()) > 0
        and not t.is_inference()
        and not t.is_neg()
        and not (t.is_complex() and t.is_conj())
        and torch.ops.aten.is_non_overlapping_and_dense.default(t)
    )


def is_alone(t: torch.Tensor, num_holders: int = 2) -> bool:
    """Whether no other tensor shares the memory of `t`, as far as torch can tell.

    By default the tensor itself holds it, and the Python object of the storage that is made here.
    """
    storage = t.untyped_storage()
    if t.storage_offset() != 0 or storage.nbytes() != t.numel() * t.element_size():
        return False
    return bool(torch._C._storage_Use_Count(storage._cdata) <= num_holders)


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a dense tensor lies over its bytes."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    num_bytes: int

    @classmethod
    def of(cls, t: torch.Tensor) -> Geometry:
        return cls(t.dtype, t.size(), t.stride(), t.numel() * t.element_size())

    def over(self, flat: torch.Tensor) -> torch.Tensor:
        """A tensor of this geometry over the first bytes of `flat` (uint8)."""
        return flat[: self.num_bytes].view(self.dtype).as_strided(self.size, self.stride, None)


def bytes_of(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor in the order of memory: uint8, sharing its storage."""
    flat = t.detach().as_strided((t.numel(),), (1,), t.storage_offset())
    return flat.view(torch.uint8)


class Offloaded:
    """One tensor and its place on a store: away or resident. The tensor object is the user's own."""

    __slots__ = (
        "_buffer_key",
        "_mapped_holders",
        "_mapped_key",
        "buffer",
        "extent",
        "geometry",
        "holders",
        "is_changed",
        "mapped",
        "sums",
        "tensor",
        "version",
    )

    def __init__(self, tensor: torch.Tensor, store: Store, extent: Extent) -> None:
        self.tensor, self.extent, self.geometry = tensor, extent, Geometry.of(tensor)
        self.mapped = self.geometry.over(store.mapped(extent))
        self._mapped_key: int = self.mapped.untyped_storage()._cdata
        self._mapped_holders: int = torch._C._storage_Use_Count(self._mapped_key)
        self._buffer_key = 0
        self.buffer: torch.Tensor | None = None  # page-aligned bytes that hold the content while it is resident
        self.holders = 0
        self.version = -1
        self.sums: torch.Tensor | None = None
        self.is_changed = False  # written where the version counter does not tell

    @property
    def num_bytes(self) -> int:
        return pages_up(self.geometry.num_bytes)

    @property
    def is_away(self) -> bool:
        return bool(self.tensor.untyped_storage()._cdata == self._mapped_key)

    @property
    def is_ours(self) -> bool:
        """Whether the tensor still has the memory that we gave it: `t.data = other` takes it out of our hands."""
        key: int = self.tensor.untyped_storage()._cdata
        return key == (self._mapped_key if self.buffer is None else self._buffer_key)

    @property
    def content(self) -> torch.Tensor:
        """What the tensor was when it was last ours: after `t.data = other` that is on the store."""
        return self.tensor if self.is_ours else self.mapped

    def attach(self, buffer: torch.Tensor) -> None:
        """Make the tensor resident over `buffer`, which holds its content (uint8, page-aligned)."""
        with torch._C._DisableTorchDispatch():
            self.tensor.data = self.geometry.over(buffer)
        self.buffer, self.version, self.is_changed, self.sums = buffer, self.tensor._version, False, None
        self._buffer_key = buffer.untyped_storage()._cdata
        self.count_holders()

    def count_holders(self) -> None:
        """Note who looks at the memory now: us alone. Several tensors in one buffer: when all of them are there."""
        self.holders = torch._C._storage_Use_Count(self._buffer_key)

    def detach(self) -> torch.Tensor | None:
        """Let the tensor be away: its content must be on the store. Returns the buffer that is free now."""
        with torch._C._DisableTorchDispatch():
            self.tensor.data = self.mapped
        buffer, self.buffer = self.buffer, None
        return buffer

    def seal(self) -> None:
        """Note the content: the user's code may run from here on. See [Note: Unseen writes]."""
        assert self.buffer is not None
        self.sums = _sums(self.buffer[: self.geometry.num_bytes])

    @property
    def is_dirty(self) -> bool:
        """Whether the content may differ from what is on the store."""
        if self.is_changed or self.tensor._version != self.version:
            return True
        if self.sums is None or self.buffer is None:
            return False
        return not torch.equal(self.sums, _sums(self.buffer[: self.geometry.num_bytes]))

    @property
    def is_held(self) -> bool:
        """See [Note: Holders]."""
        assert self.buffer is not None
        return bool(torch._C._storage_Use_Count(self._buffer_key) > self.holders)

    @property
    def is_kept(self) -> bool:
        """Whether somebody else still holds the tensor, or a view of its place on the store."""
        if sys.getrefcount(self.tensor) > 2:  # the slot and the argument
            return True
        return bool(torch._C._storage_Use_Count(self._mapped_key) > self._mapped_holders + self.is_away)

    def take_back(self) -> None:
        """Give the tensor ordinary memory of its own again, with its content."""
        if not self.is_ours:
            return
        own = torch.empty_strided(self.geometry.size, self.geometry.stride, dtype=self.geometry.dtype)
        own.copy_(self.tensor.detach())
        self.tensor.data = own
        self.buffer = None


class Retired:
    """Tensors that are no longer model state. While somebody keeps one, or a view of it, it keeps its place."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._kept: list[Offloaded] = []

    def add(self, item: Offloaded) -> None:
        """Take over the item; its place on the store is released once nobody looks at it."""
        self._kept.append(item)

    def sweep(self) -> None:
        """Release the places that nobody looks at any more."""
        gone = [item for item in self._kept if not item.is_kept]
        self._kept = [item for item in self._kept if item not in gone]
        self.store.release(item.extent for item in gone)


def _sums(content: torch.Tensor) -> torch.Tensor:
    """Partial sums of a content (uint8) that tell, as good as surely, whether any of it was written."""
    num_words = content.numel() // 8
    rows = max(1, min(64, num_words // 64))
    words = content[: num_words * 8].view(torch.int64)
    even = num_words // rows * rows
    parts = [words[:even].view(rows, -1).sum(1), words[even:].sum()[None], content[num_words * 8 :].sum()[None]]
    return torch.cat(parts)


class OwnThread:
    """Whether more than one thread has come by: then nothing may leave memory, for another thread's op may read it."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.lock = threading.RLock()
        self._note = note
        self._seen = 0
        self._is_shared = False

    def is_shared(self) -> bool:
        """Note the calling thread. Call it with the lock held."""
        here = threading.get_ident()
        if self._seen not in (0, here) and not self._is_shared:
            self._is_shared = True
            self._note("several threads run this model: what is in memory stays there, whatever the budget")
        self._seen = here
        return self._is_shared


class Buffers:
    """Page-aligned memory that is handed out again and again."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}
        self.free_bytes = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Uninitialised uint8 of `num_bytes` rounded up to pages."""
        num_bytes = pages_up(num_bytes)
        free = self._free.get(num_bytes)
        if free:
            self.free_bytes -= num_bytes
            return free.pop()
        return aligned_empty(num_bytes)

    def give(self, buffer: torch.Tensor) -> None:
        self._free.setdefault(buffer.numel(), []).append(buffer)
        self.free_bytes += buffer.numel()

    def fit(self, num_bytes: int, room_bytes: int) -> None:
        """Give free memory back to the allocator until, after a `take` of `num_bytes`, it is at most `room_bytes`."""
        num_bytes = pages_up(num_bytes)
        is_new = not self._free.get(num_bytes)
        for size in [size for size in self._free if size != num_bytes]:
            while self._free[size] and self.free_bytes + is_new * num_bytes > room_bytes:
                self._free[size].pop()
                self.free_bytes -= size

    def drop(self) -> None:
        """Give all free memory back to the allocator."""
        self._free.clear()
        self.free_bytes = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring extents and where their bytes lie in one buffer: a single large request."""

    extent: Extent
    start: int


def runs_of(extents: Sequence[Extent]) -> list[Run]:
    """The requests that move `extents` to or from one buffer in which they lie one after the other, page-aligned."""
    found: list[Run] = []
    group: list[Extent] = []
    start = offset = 0
    for extent in extents:
        last = group[-1] if group else None
        if last is not None and (last.file, last.offset + last.reserved_bytes) != (extent.file, extent.offset):
            found.append(Run(joined(group), start))
            group, start = [], offset
        group.append(extent)
        offset += extent.reserved_bytes
    if group:
        found.append(Run(joined(group), start))
    return found


def in_file_order(items: Iterable[Offloaded]) -> list[Offloaded]:
    return sorted(items, key=lambda item: (item.extent.file, item.extent.offset))
