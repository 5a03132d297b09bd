"""A store in host memory, for accelerators: one slab, exactly sized, registered with the driver once.

[Note: Pinned sizes] `pin_memory()` rounds each tensor up to a power of two, so planning by payload runs out of memory
at up to twice the plan. One `cudaHostRegister` over one slab pins what was planned. What `mapped` shows is pinned then:
a copy between it and the accelerator needs no staging buffer.
"""

from __future__ import annotations

import errno
import logging
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import psutil
import torch

from memopt.errors import StoreError
from memopt.offload.sizes import pages_up, slab_bytes
from memopt.offload.store import Extent, FreeSpace, Transfer, aligned_empty, check_memory

logger = logging.getLogger("memopt")


class HostStore:
    """A store in `capacity_bytes` of this host's memory; see store.py for the order of calls.

    Transfers are copies, done when the call returns; the memory they are given may be on any device.

    Attributes:
        is_pinned: whether the slab is registered with CUDA; never where there is no CUDA.

    Raises StoreError (ENOMEM) if the host has less than that to give.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = pages_up(capacity_bytes)
        if slab_bytes([capacity_bytes]) > host_bytes_available():
            raise StoreError("host memory", errno.ENOMEM, slab_bytes([capacity_bytes]))
        self.read_bytes = self.written_bytes = 0
        slab = aligned_empty(self.capacity_bytes)
        self._unpin = _pinned(self, slab)
        self._memory = slab.numpy()
        self._free = FreeSpace()
        self._free.give(0, self.capacity_bytes)
        self._lock = threading.RLock()  # reentrant: a finalizer may come by while its thread is here
        self._is_closed = False

    @property
    def is_pinned(self) -> bool:
        return self._unpin is not None and self._unpin.alive

    def reserve(self, sizes: Sequence[int]) -> list[Extent]:
        """Places for `sizes` bytes each. Raises StoreError: ENOMEM beyond the capacity, EBADF after `close`."""
        total = sum(map(pages_up, sizes))
        self._check_open(total)
        with self._lock:
            offsets = self._free.take(sizes) or self._free.take_scattered(sizes)
        if offsets is None:
            raise StoreError("host memory", errno.ENOMEM, total)
        return [Extent(0, offset, num_bytes) for offset, num_bytes in zip(offsets, sizes, strict=True)]

    def release(self, extents: Iterable[Extent]) -> None:
        """Give places back."""
        for extent in extents:
            self._free.give(extent.offset, extent.reserved_bytes)

    def read(self, extent: Extent, into: torch.Tensor) -> Transfer:
        """Copy an extent's payload out of the slab."""
        check_memory(extent, into)
        into[: extent.num_bytes].copy_(self.mapped(extent))
        with self._lock:
            self.read_bytes += extent.reserved_bytes
        return Transfer()

    def write(self, extent: Extent, source: torch.Tensor) -> Transfer:
        """Copy an extent's payload into the slab."""
        check_memory(extent, source)
        self.mapped(extent).copy_(source[: extent.num_bytes])
        with self._lock:
            self.written_bytes += extent.reserved_bytes
        return Transfer()

    def mapped(self, extent: Extent) -> torch.Tensor:
        """The extent's payload: a part of the slab, under a torch storage of its own."""
        self._check_open(extent.num_bytes)
        if extent.num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=extent.num_bytes, offset=extent.offset)

    def _check_open(self, num_bytes: int) -> None:
        if self._is_closed:
            raise StoreError("host memory", errno.EBADF, num_bytes)

    def flush(self) -> None:
        """Nothing: transfers are done when they return."""

    def close(self) -> None:
        """Take the slab back from the driver. It is freed with the last tensor that shows it."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._unpin is not None:
            self._unpin()
        del self._memory


def _pinned(store: HostStore, slab: torch.Tensor) -> weakref.finalize[..., HostStore] | None:
    """Register the slab with CUDA. Returns what undoes it; None where there is no CUDA or the driver refuses."""
    if slab.numel() == 0 or not torch.cuda.is_available():
        return None
    # 1: cudaHostRegisterPortable, pinned for every device.
    code = int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 1))
    if code != 0:
        logger.warning("memopt: %d B of host memory are not pinned (CUDA error %d): copies are slower", len(slab), code)
        return None
    unpin = weakref.finalize(store, torch.cuda.cudart().cudaHostUnregister, slab.data_ptr())
    unpin.atexit = False  # the driver may be gone by then
    return unpin


def host_bytes_available() -> int:
    """Bytes that this process can still allocate: what the machine has free, or less if its control groups say so."""
    return min([int(psutil.virtual_memory().available), *cgroup_bytes_left()])


def cgroup_bytes_left(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """What each control group (v1 or v2) with a limit, from this process's own up to the root, has left, in bytes.

    Cached files count as usage there, but go before anything fails: the inactive ones are taken as free.
    Source: Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst.
    """
    for line in _text_of(proc).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, used, cached = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            limit_text, used_text = _text_of(folder / limit).strip(), _text_of(folder / used).strip()
            if limit_text.isdigit() and used_text.isdigit():  # else "max", or no such group in this container
                stat = dict(pair.split() for pair in _text_of(folder / "memory.stat").splitlines())
                yield max(0, int(limit_text) - int(used_text) + int(stat.get(cached, 0)))
            if folder == mount:
                break


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
