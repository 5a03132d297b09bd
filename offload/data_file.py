"""One file that a store keeps its bytes in: preallocated, without a name, read and written in whole pages.

The file is unlinked as soon as it is open: when the process ends, however it ends, its space is free. One descriptor
serves all of it, mappings included.

[Note: Mapped] Requests pass by the page cache (O_DIRECT), mappings show it. Linux keeps the two coherent when they take
turns: a direct read first writes back what was changed in a mapping, a direct write drops the cached pages under it.
Taking turns is asked for page by page: neighbours never share one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import weakref
from pathlib import Path
from typing import Any

from memopt.errors import StoreError
from memopt.offload.sizes import PAGE_BYTES

logger = logging.getLogger("memopt")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NUM_TRIES = 2  # of a request that fails, or that moves less than a page
_ZEROS_BYTES = 8 * 2**20  # written at a time where there is no fallocate


class DiskCalls:
    """The system calls that can fail; tests put failing ones here."""

    def set_direct(self, fd: int, is_direct: bool) -> None:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if is_direct else flags)

    def fallocate(self, fd: int, offset: int, num_bytes: int) -> None:
        os.posix_fallocate(fd, offset, num_bytes)

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)


class DataFile:
    """An unlinked file in `directory` that grows, and the mappings of its parts. `close` closes it, once.

    Attributes:
        num_bytes: its size; all of it is taken from the disk.
        is_direct: whether requests pass by the page cache; where the file system refuses, they go through it.

    Raises StoreError if the directory can't be written.
    """

    def __init__(self, directory: Path, calls: DiskCalls) -> None:
        self.directory, self.calls = directory, calls
        self.num_bytes = 0
        self._mappings: list[tuple[int, Any]] = []  # (offset in the file, ctypes array), ascending
        path = directory / f"{os.getpid()}-{id(self):x}.data"
        try:
            self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self.close = weakref.finalize(self, os.close, self.fd)
            self.close.atexit = False  # others may still read then
            os.unlink(path)
            self.is_direct = self._becomes_direct()
        except OSError as e:
            raise _store_error(e, directory, 0) from e

    def _becomes_direct(self) -> bool:
        """Switch to O_DIRECT. Some file systems refuse that, others only refuse the requests."""
        os.ftruncate(self.fd, PAGE_BYTES)
        try:
            self.calls.set_direct(self.fd, True)
            self.calls.preadv(self.fd, [_zeros(PAGE_BYTES)], 0)
            return True
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            self.calls.set_direct(self.fd, False)
            logger.warning("memopt: %s has no O_DIRECT: what is offloaded there uses the page cache", self.directory)
            return False
        finally:
            os.ftruncate(self.fd, 0)

    def grow(self, num_bytes: int) -> None:
        """Take `num_bytes` more from the disk. Raises StoreError; the file is as long as before then."""
        try:
            self._allocate(num_bytes)
        except OSError as e:
            os.ftruncate(self.fd, self.num_bytes)
            raise _store_error(e, self.directory, num_bytes) from e
        self.num_bytes += num_bytes

    def _allocate(self, num_bytes: int) -> None:
        try:
            self.calls.fallocate(self.fd, self.num_bytes, num_bytes)
            return
        except OSError as e:
            # EINVAL: glibc stands in by writing single bytes, which O_DIRECT refuses.
            if e.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
                raise
        if free_bytes(self.directory) < num_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        zeros = _zeros(min(num_bytes, _ZEROS_BYTES))
        for start in range(0, num_bytes, len(zeros)):
            self.move(zeros[: num_bytes - start], self.num_bytes + start, is_read=False)

    def move(self, part: memoryview, offset: int, is_read: bool) -> None:
        """Read or write `part`, whole pages, at `offset` of the file. Raises StoreError."""
        if not self.close.alive:
            raise StoreError(self.directory, errno.EBADF, len(part))  # the descriptor may be another file's by now
        call = self.calls.preadv if is_read else self.calls.pwritev
        done = num_failures = 0
        while done < len(part):
            try:
                moved = call(self.fd, [part[done:]], offset + done)
                if self.is_direct:
                    moved -= moved % PAGE_BYTES  # it goes on at a page only
                if moved == 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                done += moved
            except InterruptedError:
                continue
            except OSError as e:
                num_failures += 1
                if num_failures == _NUM_TRIES or e.errno in FULL:
                    raise _store_error(e, self.directory, len(part)) from e
        if not self.is_direct:  # leave no more in the page cache than must be
            os.posix_fadvise(self.fd, offset, len(part), os.POSIX_FADV_DONTNEED)

    def mapping_of(self, offset: int, num_bytes: int) -> tuple[int, Any]:
        """A mapping that shows this part, and where in the file it begins.

        One mapping serves many parts: when the file has grown, one more is made for what is new. Raises StoreError.
        """
        for start, memory in reversed(self._mappings):
            if start <= offset and offset + num_bytes <= start + len(memory):
                return start, memory
        end = max((start + len(memory) for start, memory in self._mappings), default=0)
        start = min(offset, end)  # what lies across the end of the last mapping is mapped in one piece
        try:
            memory = _shared_mapping(self.fd, start, self.num_bytes - start)
        except OSError as e:
            raise _store_error(e, self.directory, num_bytes) from e
        self._mappings.append((start, memory))
        return start, memory


def free_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes that this process may still write on the disk under `path`. Raises StoreError if there is no such path."""
    try:
        found = os.statvfs(path)
    except OSError as e:
        raise _store_error(e, path, 0) from e
    return found.f_bavail * found.f_frsize


def _store_error(e: OSError, path: str | os.PathLike[str], num_bytes: int) -> StoreError:
    return e if isinstance(e, StoreError) else StoreError(path, e.errno or errno.EIO, num_bytes)


def _zeros(num_bytes: int) -> memoryview:
    """Page-aligned memory."""
    return memoryview(mmap.mmap(-1, num_bytes))


_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def _shared_mapping(fd: int, offset: int, num_bytes: int) -> Any:
    """A part of a file as a ctypes array of bytes, unmapped when the last tensor over it is gone.

    Not Python's mmap, which keeps a descriptor for each mapping. Raises OSError.
    """
    address = _LIBC.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_char * num_bytes).from_address(address)
    weakref.finalize(memory, _LIBC.munmap, address, num_bytes).atexit = False  # tensors may live until the very end
    return memory
