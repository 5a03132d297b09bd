"""A store on a disk: requests of a few MiB on page-aligned memory, served by a small pool of threads.

All tensors share one preallocated file (data_file.py), so that nothing runs out in the middle of a step: neither space
nor descriptors. Transfers pass by the page cache; [Note: Mapped] there says how mappings agree with them.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from memopt.errors import StoreError
from memopt.offload.data_file import FULL, DataFile, DiskCalls, free_bytes
from memopt.offload.sizes import CHUNK_BYTES, PAGE_BYTES, pages_up
from memopt.offload.store import Extent, FreeSpace, Transfer, aligned_empty, check_memory

__all__ = ["ChecksumError", "DiskCalls", "ForkedStoreError", "NVMeStore", "free_bytes"]

NUM_THREADS = 4
REQUEST_BYTES = 8 * 2**20


class ChecksumError(StoreError):
    """What was read is not what was written, and the disk did not say so: `errno` is EIO."""

    def __str__(self) -> str:
        return f"{super().__str__()} What was read does not match the checksum of what was written."


class ForkedStoreError(StoreError):
    """A forked child asked to change its parent's store: `errno` is EPERM."""

    def __str__(self) -> str:
        return f"{super().__str__()}. A forked child may read its parent's store; only the parent writes it."


class NVMeStore:
    """A store in a directory on a disk; see store.py for the order of calls.

    A forked child may read (its reads are done at the call) and look at what is mapped; `reserve` and `write` raise
    ForkedStoreError there, `release` and `close` leave the parent's side alone.

    Args:
        directory: where the file is made (and unlinked at once).
        num_threads: how many requests are under way at a time.
        request_bytes: how large they are at most.
        has_checksums: keep a CRC-32 of what is written to each extent and compare it when it is read, alone or joined
            with neighbours. It can't cover what is written through `mapped`: an extent that was mapped is not compared.
        capacity_bytes: taken from the disk at once by the first reservation, so that nobody else can take it later.
        calls: the system calls.

    Attributes:
        is_direct: whether requests pass by the page cache.

    Raises StoreError if the directory can't be written.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        num_threads: int = NUM_THREADS,
        request_bytes: int = REQUEST_BYTES,
        has_checksums: bool = False,
        capacity_bytes: int | None = None,
        calls: DiskCalls | None = None,
    ) -> None:
        if num_threads < 1 or request_bytes < 1:
            raise ValueError(f"a store needs threads and bytes to request, not {num_threads} and {request_bytes}")
        self.num_threads, self.request_bytes = num_threads, pages_up(request_bytes)
        self.capacity_bytes = pages_up(capacity_bytes or 0)
        self.read_bytes = self.written_bytes = 0
        self._file = DataFile(Path(directory), calls or DiskCalls())
        self._free = FreeSpace()
        self._checksums = _Checksums(self._file.directory) if has_checksums else None
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: set[Transfer] = set()
        # Reentrant: a finalizer may read or write while its thread is here.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._is_closed = False

    @property
    def is_direct(self) -> bool:
        return self._file.is_direct

    @property
    def file_bytes(self) -> int:
        """Bytes that the store has on the disk now, free ones included."""
        return self._file.num_bytes

    # Space

    def reserve(self, sizes: Sequence[int]) -> list[Extent]:
        """Places for `sizes` bytes each, neighbours in the given order where there is room.

        The file grows by at least CHUNK_BYTES where the disk has them, else by what is missing. Raises StoreError
        (ENOSPC, EDQUOT) if the disk is full, EBADF after `close`; what was reserved before is as it was.
        """
        total = sum(map(pages_up, sizes))
        self._check_usable(total, is_change=True)
        with self._lock:
            offsets = self._free.take(sizes)
            if offsets is None:
                try:
                    self._grow(total - self._free.bytes_before(self._file.num_bytes))
                except StoreError as e:
                    offsets = self._free.take_scattered(sizes) if e.errno in FULL else None
                    if offsets is None:
                        raise
                else:
                    offsets = self._free.take(sizes)
                    assert offsets is not None, f"the file has grown for {total} B"
            extents = [Extent(0, offset, num_bytes) for offset, num_bytes in zip(offsets, sizes, strict=True)]
            if self._checksums is not None:
                self._checksums.begin(extents)
            return extents

    def _grow(self, missing_bytes: int) -> None:
        size = self._file.num_bytes
        least = max(missing_bytes, self.capacity_bytes if size == 0 else 0)
        try:
            self._file.grow(max(least, CHUNK_BYTES))
        except StoreError as e:
            if e.errno not in FULL or least >= CHUNK_BYTES:
                raise
            self._file.grow(least)
        self._free.give(size, self._file.num_bytes - size)

    def release(self, extents: Iterable[Extent]) -> None:
        """Give places back; they are used again before the file grows."""
        for extent in extents:
            self._free.give(extent.offset, extent.reserved_bytes)

    # Transfers

    def read(self, extent: Extent, into: torch.Tensor) -> Transfer:
        """Begin to read an extent. A request that fails is tried once more; then `wait` raises StoreError."""
        return self._begin(extent, into, is_read=True)

    def write(self, extent: Extent, source: torch.Tensor) -> Transfer:
        """Begin to write an extent. A request that fails is tried once more; then `wait` raises StoreError."""
        return self._begin(extent, source, is_read=False)

    def _begin(self, extent: Extent, given: torch.Tensor, is_read: bool) -> Transfer:
        check_memory(extent, given)
        if given.device.type != "cpu":
            raise ValueError(f"a disk is read and written from the CPU's memory, not from {given.device}")
        num_bytes = extent.reserved_bytes
        self._check_usable(num_bytes, is_change=not is_read)
        if num_bytes == 0:
            return Transfer()
        memory = given
        if given.data_ptr() % PAGE_BYTES or given.numel() < num_bytes:
            memory = aligned_empty(num_bytes)
            if not is_read:
                _copy(memory, given, extent.num_bytes)
        requests = range(0, num_bytes, self.request_bytes)
        num_movers = min(self.num_threads, len(requests))
        starts = deque([*requests, *[None] * num_movers])  # None tells one thread that it was the last
        transfer = Transfer(num_movers, functools.partial(self._finish, extent, memory, given, is_read))
        # By address: the transfer alone holds the memory.
        whole = memoryview((ctypes.c_char * num_bytes).from_address(memory.data_ptr()))
        move = functools.partial(self._move, transfer, starts, whole, extent.offset, is_read)
        pool = self._pool_for(transfer, num_bytes, is_read)
        for _ in range(num_movers):
            try:
                pool.submit(move) if pool else move()
            except RuntimeError:  # the interpreter is exiting and takes no work for threads
                move()
        return transfer

    def _pool_for(self, transfer: Transfer, num_bytes: int, is_read: bool) -> ThreadPoolExecutor | None:
        """The threads, made at the first use. None in a forked child: they and the lock's holder are the parent's."""
        if os.getpid() != self._pid:
            return None
        with self._lock:
            if is_read:
                self.read_bytes += num_bytes
            else:
                self.written_bytes += num_bytes
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="memopt-disk")
            self._under_way.add(transfer)
            return self._pool

    def _move(
        self, transfer: Transfer, starts: deque[int | None], whole: memoryview, offset: int, is_read: bool
    ) -> None:
        """Move requests of one transfer until none is left; each thread takes the next one."""
        error: BaseException | None = None
        try:
            while (start := starts.popleft()) is not None:
                self._file.move(whole[start : start + self.request_bytes], offset + start, is_read)
        except BaseException as e:  # whatever it is, somebody waits for it
            error = e.with_traceback(None)
        if transfer.piece_is_done(error):
            self._under_way.discard(transfer)

    def _finish(self, extent: Extent, memory: torch.Tensor, given: torch.Tensor, is_read: bool) -> None:
        """What follows the last piece, in its thread."""
        if self._checksums is not None:
            (self._checksums.compare if is_read else self._checksums.record)(extent, memory.data_ptr())
        if is_read and memory is not given:
            _copy(given, memory, extent.num_bytes)

    def _check_usable(self, num_bytes: int, is_change: bool) -> None:
        if self._is_closed:
            raise StoreError(self._file.directory, errno.EBADF, num_bytes)
        if is_change and os.getpid() != self._pid:
            raise ForkedStoreError(self._file.directory, errno.EPERM, num_bytes)

    # Memory

    def mapped(self, extent: Extent) -> torch.Tensor:
        """The extent's payload as memory (uint8), shared with the file; see data_file.py, [Note: Mapped].

        Pages that are looked at are page cache, which the system takes back when memory is short.
        """
        if extent.num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        self._check_usable(extent.num_bytes, is_change=False)
        with self._lock:
            if self._checksums is not None:
                self._checksums.forget(extent)
            start, memory = self._file.mapping_of(extent.offset, extent.num_bytes)
        return torch.frombuffer(memory, dtype=torch.uint8, count=extent.num_bytes, offset=extent.offset - start)

    # The end

    def flush(self) -> None:
        """Wait for all transfers that have begun. Raises StoreError if one of them failed."""
        for transfer in self._under_way.copy():
            transfer.wait()

    def close(self) -> None:
        """Wait for all transfers and close the file. Its space is free when the last mapped tensor is gone."""
        self._is_closed = True
        if self._pool is not None and os.getpid() == self._pid:
            self._pool.shutdown()
        self._file.close()


@dataclass(slots=True)
class _Checked:
    """What is known of one extent's content."""

    num_bytes: int
    crc: int | None = None
    is_mapped: bool = False


class _Checksums:
    """CRC-32 of the extents that are written whole."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._of: dict[int, _Checked] = {}  # by offset

    def begin(self, extents: Iterable[Extent]) -> None:
        """Extents that are reserved anew."""
        self._of.update({e.offset: _Checked(e.num_bytes) for e in extents if e.num_bytes})

    def record(self, extent: Extent, address: int) -> None:
        """Note the checksums of what was written from `address`."""
        for offset, checked in self._parts(extent):
            checked.crc = _crc32(address + offset - extent.offset, checked.num_bytes)

    def compare(self, extent: Extent, address: int) -> None:
        """Raise ChecksumError if what was read to `address` is not what was written."""
        for offset, checked in self._parts(extent):
            if checked.crc is None or checked.is_mapped:
                continue
            if _crc32(address + offset - extent.offset, checked.num_bytes) != checked.crc:
                raise ChecksumError(self._directory, errno.EIO, checked.num_bytes)

    def forget(self, extent: Extent) -> None:
        """The extent may change without our knowledge from here on."""
        for _, checked in self._parts(extent):
            checked.is_mapped = True

    def _parts(self, extent: Extent) -> Iterator[tuple[int, _Checked]]:
        """The reserved extents that a joined one spans."""
        offset = extent.offset
        while (checked := self._of.get(offset)) and offset + checked.num_bytes <= extent.offset + extent.num_bytes:
            yield offset, checked
            offset += pages_up(checked.num_bytes)


def _crc32(address: int, num_bytes: int) -> int:
    return zlib.crc32((ctypes.c_char * num_bytes).from_address(address))


def _copy(into: torch.Tensor, source: torch.Tensor, num_bytes: int) -> None:
    # Not by torch, which would start its own threads beside each of ours.
    ctypes.memmove(into.data_ptr(), source.data_ptr(), num_bytes)
