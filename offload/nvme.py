"""A store on a disk: O_DIRECT requests of a few MiB on page-aligned memory, served by a small pool of threads.

Space is preallocated, so that nothing runs out in the middle of a step. Files are unlinked as soon as they are open:
when the process ends, however it ends, their space is free. Where the file system has no O_DIRECT (tmpfs, some
overlays), requests go through the page cache and leave it again.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import threading
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from memopt.errors import StoreError
from memopt.offload.sizes import CHUNK_BYTES, pages_up
from memopt.offload.store import Extent, FreeSpace, Transfer

logger = logging.getLogger("memopt")

NUM_THREADS = 4
REQUEST_BYTES = 8 * 2**20
_NUM_TRIES = 2  # of a request that fails


class DiskCalls:
    """The system calls that move bytes; tests put failing ones here."""

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fallocate(self, fd: int, offset: int, num_bytes: int) -> None:
        os.posix_fallocate(fd, offset, num_bytes)


@dataclass(slots=True)
class _File:
    fd: int
    map: mmap.mmap
    num_bytes: int
    free: FreeSpace = field(default_factory=FreeSpace)


class NVMeStore:
    """A store in a directory on a disk; see store.py for the order of calls.

    Args:
        directory: where the files are made (and unlinked at once).
        num_threads, request_bytes: how many requests are under way at a time, and how large they are.
        has_checksums: keep a CRC-32 of each extent that is written whole and compare it when it is read whole. What is
            written through `mapped` is not covered: an extent that was mapped is no longer compared.

    Raises StoreError if the directory can't be written.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        num_threads: int = NUM_THREADS,
        request_bytes: int = REQUEST_BYTES,
        has_checksums: bool = False,
        calls: DiskCalls | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.num_threads, self.request_bytes = num_threads, pages_up(request_bytes)
        self.calls = calls or DiskCalls()
        self.read_bytes = self.written_bytes = 0
        self.is_direct = True
        self._checksums: dict[Extent, int] | None = {} if has_checksums else None
        self._files: list[_File] = []
        self._pool: ThreadPoolExecutor | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._is_closed = False
        self._page_file(0).close()  # an unusable directory is told at once

    # Space

    def reserve(self, sizes: Sequence[int]) -> list[Extent]:
        """Places for `sizes` bytes each, neighbours in the given order. Raises StoreError if the disk is full."""
        total = sum(pages_up(num_bytes) for num_bytes in sizes)
        with self._lock:
            number, offset = self._place_for(total)
        extents = []
        for num_bytes in sizes:
            extents.append(Extent(number, offset, num_bytes))
            offset += pages_up(num_bytes)
        return extents

    def _place_for(self, num_bytes: int) -> tuple[int, int]:
        if num_bytes == 0:
            return 0, 0
        for number, file in enumerate(self._files):
            offset = file.free.take(num_bytes)
            if offset is not None:
                return number, offset
        # Files grow geometrically, so that there are few of them however many tensors come.
        size = max(num_bytes, CHUNK_BYTES, sum(file.num_bytes for file in self._files))
        try:
            self._files.append(self._new_file(size))
        except StoreError:
            if size == num_bytes:
                raise
            self._files.append(self._new_file(num_bytes))
        number = len(self._files) - 1
        offset = self._files[number].free.take(num_bytes)
        assert offset is not None, "a new file is free"
        return number, offset

    def _new_file(self, num_bytes: int) -> _File:
        page_file = self._page_file(num_bytes)
        try:
            mapping = mmap.mmap(page_file.fileno(), num_bytes, mmap.MAP_SHARED)
            fd = self._direct(page_file.fileno())
        except OSError as e:
            raise StoreError(self.directory, e.errno or errno.EIO, num_bytes) from e
        finally:
            page_file.close()
        file = _File(fd, mapping, num_bytes)
        file.free.give(0, num_bytes)
        return file

    def _page_file(self, num_bytes: int) -> _PageFile:
        """A new file of `num_bytes`, preallocated, without a name."""
        path = self.directory / f"{os.getpid()}-{len(self._files)}.data"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise StoreError(self.directory, e.errno or errno.EIO, num_bytes) from e
        file = _PageFile(fd)
        try:
            if num_bytes:
                self._allocate(fd, num_bytes)
        except OSError as e:
            file.close()
            raise StoreError(self.directory, e.errno or errno.EIO, num_bytes) from e
        finally:
            os.unlink(path)
        return file

    def _allocate(self, fd: int, num_bytes: int) -> None:
        try:
            self.calls.fallocate(fd, 0, num_bytes)
        except OSError as e:
            if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            if free_bytes(self.directory) < num_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from e
            zeros = bytes(2**20)
            for offset in range(0, num_bytes, len(zeros)):
                os.pwrite(fd, zeros[: num_bytes - offset], offset)

    def _direct(self, fd: int) -> int:
        """Another descriptor of the same file, with O_DIRECT if the file system has it."""
        path = f"/proc/self/fd/{fd}"
        if self.is_direct:
            try:
                return os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                self.is_direct = False
                logger.warning("memopt: %s has no O_DIRECT: its transfers go through the page cache", self.directory)
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)

    def release(self, extents: Iterable[Extent]) -> None:
        """Give places back."""
        with self._lock:
            for extent in extents:
                if self._checksums is not None:
                    self._checksums.pop(extent, None)
                if extent.reserved_bytes and not self._is_closed:
                    self._files[extent.file].free.give(extent.offset, extent.reserved_bytes)

    # Transfers

    def read(self, extent: Extent, into: torch.Tensor) -> Transfer:
        """Begin to read an extent. A failing request is tried once more; then `wait` raises StoreError."""
        self.read_bytes += extent.reserved_bytes
        return self._begin(extent, into, is_read=True)

    def write(self, extent: Extent, source: torch.Tensor) -> Transfer:
        """Begin to write an extent. A failing request is tried once more; then `wait` raises StoreError."""
        self.written_bytes += extent.reserved_bytes
        if self._checksums is not None:
            self._checksums[extent] = zlib.crc32(_view(source, extent.num_bytes))
        return self._begin(extent, source, is_read=False)

    def _begin(self, extent: Extent, memory: torch.Tensor, is_read: bool) -> Transfer:
        num_bytes = extent.reserved_bytes
        if memory.dtype is not torch.uint8 or memory.numel() < num_bytes or memory.data_ptr() % 512:
            raise ValueError(
                f"a transfer of {num_bytes} B needs page-aligned uint8 memory of that length, not "
                f"{memory.dtype} x {memory.numel()} at {memory.data_ptr():#x}: see aligned_empty()"
            )
        if num_bytes == 0:
            return Transfer([])
        pool = self._workers()
        file = self._files[extent.file]
        checked = self._checksums.get(extent) if is_read and self._checksums is not None else None
        pieces: list[Future[None]] = []
        for start in range(0, num_bytes, self.request_bytes):
            stop = min(start + self.request_bytes, num_bytes)
            # The piece is taken out of its holder by the thread that moves it: no reference stays behind.
            holder = [_view(memory[start:stop], stop - start)]
            pieces.append(pool.submit(self._move, file.fd, holder, extent.offset + start, is_read))
        if checked is not None:
            pieces.append(pool.submit(self._compare, list(pieces), [_view(memory, extent.num_bytes)], checked))
        return Transfer(pieces)

    def _workers(self) -> ThreadPoolExecutor:
        if self._is_closed:
            raise StoreError(self.directory, errno.EBADF, 0)
        if self._pid != os.getpid():
            raise RuntimeError("a store belongs to the process that made it: a forked child reads what is mapped")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="memopt-disk")
        return self._pool

    def _move(self, fd: int, holder: list[memoryview], offset: int, is_read: bool) -> None:
        part = holder.pop()
        try:
            self._move_all(fd, part, offset, is_read)
        finally:
            part.release()

    def _move_all(self, fd: int, part: memoryview, offset: int, is_read: bool) -> None:
        call = self.calls.preadv if is_read else self.calls.pwritev
        done, num_tries = 0, 0
        while done < len(part):
            rest = part[done:]
            try:
                moved = call(fd, [rest], offset + done)
                if moved <= 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            except InterruptedError:
                continue
            except OSError as e:
                num_tries += 1
                if num_tries >= _NUM_TRIES or e.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise StoreError(self.directory, e.errno or errno.EIO, len(part)) from e
                continue
            finally:
                rest.release()
            # O_DIRECT goes on only at a block: what a short transfer moved beyond one is moved again.
            done = done + moved if done + moved == len(part) else (done + moved) // 512 * 512
        if not self.is_direct:
            if not is_read:
                os.fdatasync(fd)
            os.posix_fadvise(fd, offset, len(part), os.POSIX_FADV_DONTNEED)

    def _compare(self, pieces: list[Future[None]], holder: list[memoryview], expected: int) -> None:
        part = holder.pop()
        try:
            for piece in pieces:
                piece.result()
            if zlib.crc32(part) != expected:
                raise StoreError(self.directory, errno.EIO, len(part))
        finally:
            part.release()

    # Memory

    def mapped(self, extent: Extent) -> torch.Tensor:
        """The extent's payload as memory (uint8), shared with the file."""
        if extent.num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        if self._checksums is not None:
            self._checksums.pop(extent, None)
        file = self._files[extent.file]
        return torch.frombuffer(file.map, dtype=torch.uint8, count=extent.num_bytes, offset=extent.offset)

    def close(self) -> None:
        """Wait for all transfers and close the files. Their space is free when the last mapped tensor is gone."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._pool is not None and self._pid == os.getpid():
            self._pool.shutdown()
        for file in self._files:
            os.close(file.fd)
        self._files = []


class _PageFile:
    """A descriptor that closes itself."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


def _view(memory: torch.Tensor, num_bytes: int) -> memoryview:
    return memoryview(memory.numpy()).cast("B")[:num_bytes]  # type: ignore[arg-type]


def free_bytes(path: str | os.PathLike[str]) -> int:
    """Bytes that this process may still write on the disk under `path`."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
