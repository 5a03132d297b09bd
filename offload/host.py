"""A store in host memory, for accelerators: one slab, exactly sized, registered with the driver once.

[Note: Pinned sizes] `pin_memory()` rounds each tensor up to a power of two, so planning by payload runs out of memory
at up to twice the plan. One `cudaHostRegister` over one slab pins what was planned.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil
import torch

from memopt.errors import StoreError
from memopt.offload.sizes import pages_up
from memopt.offload.store import Extent, FreeSpace, Transfer, aligned_empty


class HostStore:
    """A store in `capacity_bytes` of this host's memory; see store.py for the order of calls.

    Raises StoreError (ENOMEM) if the host has less than that to give.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = pages_up(capacity_bytes)
        if self.capacity_bytes > host_bytes_available():
            raise StoreError("host memory", errno.ENOMEM, self.capacity_bytes)
        self.slab = aligned_empty(self.capacity_bytes)
        self.read_bytes = self.written_bytes = 0
        self.is_pinned = _registered(self.slab)
        self._free = FreeSpace()
        self._free.give(0, self.capacity_bytes)

    def reserve(self, sizes: Sequence[int]) -> list[Extent]:
        """Places for `sizes` bytes each, neighbours in the given order. Raises StoreError beyond the capacity."""
        total = sum(pages_up(num_bytes) for num_bytes in sizes)
        offset = self._free.take(total) if total else 0
        if offset is None:
            raise StoreError("host memory", errno.ENOMEM, total)
        extents = []
        for num_bytes in sizes:
            extents.append(Extent(0, offset, num_bytes))
            offset += pages_up(num_bytes)
        return extents

    def release(self, extents: Iterable[Extent]) -> None:
        """Give places back."""
        for extent in extents:
            self._free.give(extent.offset, extent.reserved_bytes)

    def read(self, extent: Extent, into: torch.Tensor) -> Transfer:
        """Copy an extent's payload out of the slab."""
        self.read_bytes += extent.reserved_bytes
        into[: extent.num_bytes].copy_(self.mapped(extent))
        return Transfer([])

    def write(self, extent: Extent, source: torch.Tensor) -> Transfer:
        """Copy an extent's payload into the slab."""
        self.written_bytes += extent.reserved_bytes
        self.mapped(extent).copy_(source[: extent.num_bytes])
        return Transfer([])

    def mapped(self, extent: Extent) -> torch.Tensor:
        """The extent's payload: a part of the slab."""
        return self.slab[extent.offset : extent.offset + extent.num_bytes]

    def close(self) -> None:
        """Take the slab back from the driver. It is freed with the last tensor that shows it."""
        if self.is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self.slab.data_ptr())
            self.is_pinned = False


def _registered(slab: torch.Tensor) -> bool:
    """Whether the driver pinned the slab; without CUDA there is nothing to pin for."""
    if not torch.cuda.is_available() or slab.numel() == 0:
        return False
    return int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0)) == 0


def host_bytes_available() -> int:
    """Bytes that this process can still allocate: what the machine has free, or what its control group leaves."""
    found = int(psutil.virtual_memory().available)
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit_bytes, used_bytes = _number_in(limit), _number_in(used)
        if limit_bytes is not None and used_bytes is not None:
            found = min(found, max(0, limit_bytes - used_bytes))
    return found


def _number_in(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
