"""What a place for bytes can do: reserve, write, read, map. Stores know pages, and nothing of what the bytes mean."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import torch

from memopt.errors import StoreError
from memopt.offload.sizes import PAGE_BYTES, pages_up


@dataclass(frozen=True, slots=True)
class Extent:
    """A reserved place: `num_bytes` of payload at a page of one of the store's files."""

    file: int
    offset: int
    num_bytes: int

    @property
    def reserved_bytes(self) -> int:
        return pages_up(self.num_bytes)


class Transfer:
    """A read or write under way. When `wait` has returned, the store holds no reference to the memory."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: list[Future[None]]) -> None:
        self._pieces = pieces

    @property
    def is_done(self) -> bool:
        return all(piece.done() for piece in self._pieces)

    def wait(self) -> None:
        """Block until all is moved. May be called again. Raises StoreError if a part of it failed."""
        failed: StoreError | None = None
        for piece in self._pieces:  # all of them: the memory is free only when nobody writes it
            try:
                piece.result()
            except StoreError as e:
                failed = e
        if failed is not None:
            raise failed


class Store(Protocol):
    """A place for bytes. Calls come in this order, any number of times each:

    1. `reserve` gives extents; nothing can run out after that.
    2. `write` fills them, `read` brings them back: both begin at once and return a Transfer. The memory is uint8 on the
       CPU, page-aligned (see `aligned_empty`), at least `extent.reserved_bytes` long, and untouched until `wait`.
    3. `mapped` shows an extent as memory: what is read there is what is stored, what is written there is stored.
    4. `release` gives extents back, for others to be reserved in.
    5. `close` ends it. Mapped memory stays valid as long as a tensor shows it.
    """

    read_bytes: int  # moved so far
    written_bytes: int

    def reserve(self, sizes: Sequence[int]) -> list[Extent]:
        """Places for `sizes` bytes each, neighbours in the given order. Raises StoreError if there is no room."""

    def release(self, extents: Iterable[Extent]) -> None:
        """Give places back."""

    def read(self, extent: Extent, into: torch.Tensor) -> Transfer:
        """Begin to read the whole extent into the first bytes of `into`."""

    def write(self, extent: Extent, source: torch.Tensor) -> Transfer:
        """Begin to write the whole extent from the first bytes of `source`."""

    def mapped(self, extent: Extent) -> torch.Tensor:
        """The extent's payload as memory: uint8."""

    def close(self) -> None:
        """Wait for all transfers and let the place go."""


def aligned_empty(num_bytes: int) -> torch.Tensor:
    """Uninitialised uint8 memory from torch's allocator that begins at a page, `num_bytes` rounded up to pages long."""
    num_bytes = pages_up(num_bytes)
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    whole = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE_BYTES
    return whole[start : start + num_bytes]


def joined(extents: Sequence[Extent]) -> Extent:
    """One extent that spans neighbours. Raises ValueError if they are none."""
    for a, b in itertools.pairwise(extents):
        if (a.file, a.offset + a.reserved_bytes) != (b.file, b.offset):
            raise ValueError(f"{a} and {b} are not neighbours")
    first, last = extents[0], extents[-1]
    return Extent(first.file, first.offset, last.offset + last.num_bytes - first.offset)


class FreeSpace:
    """Which parts of a file are free: first fit, neighbours merged."""

    def __init__(self) -> None:
        self._holes: list[tuple[int, int]] = []  # (offset, bytes), by offset

    def take(self, num_bytes: int) -> int | None:
        """The offset of `num_bytes` that were free, None if there is no such hole."""
        for i, (offset, size) in enumerate(self._holes):
            if size >= num_bytes:
                if size == num_bytes:
                    del self._holes[i]
                else:
                    self._holes[i] = (offset + num_bytes, size - num_bytes)
                return offset
        return None

    def give(self, offset: int, num_bytes: int) -> None:
        """Free a part of the file."""
        if num_bytes == 0:
            return
        merged: list[tuple[int, int]] = []
        for hole in sorted([*self._holes, (offset, num_bytes)]):
            if merged and merged[-1][0] + merged[-1][1] == hole[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + hole[1])
            else:
                merged.append(hole)
        self._holes = merged
