"""What a place for bytes can do: reserve, write, read, map. Stores know pages, and nothing of what the bytes mean."""

from __future__ import annotations

import bisect
import copy
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from memopt.offload.sizes import PAGE_BYTES, pages_up


@dataclass(frozen=True, slots=True)
class Extent:
    """A reserved place: `num_bytes` of payload at a page (`offset`, in bytes) of one of the store's files."""

    file: int
    offset: int
    num_bytes: int

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the whole pages that the payload takes."""
        return pages_up(self.num_bytes)


class Store(Protocol):
    """A place for bytes. Calls come in this order, any number of times each:

    1. `reserve` gives extents; nothing can run out after that.
    2. `write` fills them, `read` brings them back: both begin at once and return a Transfer. The memory is uint8 on the
       CPU, page-aligned (see `aligned_empty`), at least `extent.reserved_bytes` long, and untouched until `wait`.
       Other memory of at least `extent.num_bytes` costs a copy. It must not be memory that `mapped` gave.
    3. `mapped` shows an extent as memory: what is read there is what is stored, what is written there is stored. Not
       while a transfer of the same extent is under way.
    4. `release` gives extents back, for others to be reserved in, when their transfers are done.
    5. `close` ends it. Mapped memory stays valid as long as a tensor shows it.

    All of them may be called from any thread; `release` also from a finalizer.
    """

    read_bytes: int  # asked for so far, in whole pages
    written_bytes: int

    def reserve(self, sizes: Sequence[int]) -> list[Extent]:
        """Places for `sizes` bytes each: neighbours in the given order, unless there is only scattered room.

        Raises StoreError if there is no room; nothing is reserved then.
        """

    def release(self, extents: Iterable[Extent]) -> None:
        """Give places back. The content of what is mapped there is lost with the next reservation."""

    def read(self, extent: Extent, into: torch.Tensor) -> Transfer:
        """Begin to read the whole extent into the first bytes of `into`.

        Raises ValueError for memory that can't take it, StoreError if the store is closed.
        """

    def write(self, extent: Extent, source: torch.Tensor) -> Transfer:
        """Begin to write the whole extent from the first bytes of `source`. Raises as `read` does."""

    def mapped(self, extent: Extent) -> torch.Tensor:
        """The extent's payload as memory: uint8, of `num_bytes`, with a torch storage of its own at each call."""

    def flush(self) -> None:
        """Wait for all transfers that have begun. Raises StoreError if one of them failed."""

    def close(self) -> None:
        """Wait for all transfers and let the place go. May be called again."""


class Transfer:
    """A read or write under way, in pieces. When `wait` has returned, the store holds no reference to the memory.

    Args:
        num_pieces: how often `piece_is_done` will be called, from any thread; 0 for what is done already.
        finish: called by the last piece if none failed. It holds the memory, and is dropped before `wait` returns:
            a count of the memory's holders is exact from then on (see residency.py, [Note: Holders]).
    """

    __slots__ = ("_error", "_finish", "_is_done", "_lock", "_num_left")

    def __init__(self, num_pieces: int = 0, finish: Callable[[], None] | None = None) -> None:
        self._num_left, self._finish = num_pieces, finish
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._is_done = threading.Event()
        if num_pieces == 0:
            self._is_done.set()

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._is_done.is_set()

    def wait(self) -> None:
        """Block until all is moved. May be called again. Raises StoreError if a piece failed, after the last one."""
        self._is_done.wait()
        if self._error is not None:
            raise copy.copy(self._error)  # the original would keep the frames of all who caught it

    def piece_is_done(self, error: BaseException | None = None) -> bool:
        """Count one piece. Returns whether it was the last."""
        with self._lock:
            self._num_left -= 1
            self._error = self._error or error
            is_last = self._num_left == 0
        if is_last:
            try:
                if self._finish is not None and self._error is None:
                    self._finish()
            except BaseException as e:
                self._error = e.with_traceback(None)  # its frames hold the memory
            self._finish = None
            self._is_done.set()
        return is_last


def aligned_empty(num_bytes: int) -> torch.Tensor:
    """Uninitialised uint8 memory from torch's allocator that begins at a page, `num_bytes` rounded up to pages long."""
    num_bytes = pages_up(num_bytes)
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    whole = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE_BYTES
    return whole[start : start + num_bytes]


def check_memory(extent: Extent, memory: torch.Tensor) -> None:
    """Raise ValueError unless `memory` is contiguous uint8 that can hold the extent's payload."""
    if memory.dtype is not torch.uint8 or not memory.is_contiguous() or memory.numel() < extent.num_bytes:
        raise ValueError(
            f"a transfer of {extent.num_bytes} B needs contiguous uint8 memory of that length, not {memory.dtype} of "
            f"shape {list(memory.shape)} and stride {list(memory.stride())}: see aligned_empty()"
        )


def joined(extents: Sequence[Extent]) -> Extent:
    """One extent that spans neighbours, for a single large request. Raises ValueError if they are none."""
    if not extents:
        raise ValueError("no extents to join")
    for a, b in itertools.pairwise(extents):
        if (a.file, a.offset + a.reserved_bytes) != (b.file, b.offset):
            raise ValueError(f"{a} and {b} are not neighbours")
    first, last = extents[0], extents[-1]
    return Extent(first.file, first.offset, last.offset + last.num_bytes - first.offset)


class FreeSpace:
    """Which parts of one range of bytes are free: first fit, neighbours merged.

    `take` is called under the store's lock. `give` needs none and takes none: it may run in a finalizer, in the middle
    of a `take` of the same thread. What it is given waits for the next `take`.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []  # of the holes, ascending
        self._ends: list[int] = []
        self._given: deque[tuple[int, int]] = deque()

    def give(self, offset: int, num_bytes: int) -> None:
        """Free a part that was taken, or that is new."""
        if num_bytes:
            self._given.append((offset, offset + num_bytes))

    def take(self, sizes: Sequence[int]) -> list[int] | None:
        """Offsets of free places of `sizes` bytes in whole pages, one after the other; None if no hole holds them."""
        self._merge_given()
        starts = list(itertools.accumulate(map(pages_up, sizes), initial=0))
        total = starts.pop()
        if total == 0:
            return starts
        for i, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= total:
                self._starts[i] += total
                if self._starts[i] == end:
                    del self._starts[i], self._ends[i]
                return [start + s for s in starts]
        return None

    def take_scattered(self, sizes: Sequence[int]) -> list[int] | None:
        """As `take`, each place where there is room for it; None, and nothing taken, if one finds none."""
        found: list[int] = []
        for num_bytes in sizes:
            offsets = self.take([num_bytes])
            if offsets is None:
                for offset, taken in zip(found, sizes, strict=False):
                    self.give(offset, pages_up(taken))
                return None
            found += offsets
        return found

    def bytes_before(self, end: int) -> int:
        """Size of the hole that ends at `end`, where the range may grow."""
        self._merge_given()
        return end - self._starts[-1] if self._ends and self._ends[-1] == end else 0

    def _merge_given(self) -> None:
        starts, ends = self._starts, self._ends
        while self._given:
            start, end = self._given.popleft()
            i = bisect.bisect_left(starts, end)  # the first hole behind
            is_apart = (i == 0 or ends[i - 1] <= start) and (i == len(starts) or end <= starts[i])
            assert is_apart, f"[{start}, {end}) is free already: released twice"
            if i < len(starts) and starts[i] == end:
                end = ends[i]
                del starts[i], ends[i]
            if i > 0 and ends[i - 1] == start:
                ends[i - 1] = end
            else:
                starts.insert(i, start)
                ends.insert(i, end)
