from __future__ import annotations
import mmap, os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch
from memopt.offload.store import Extent, Transfer
from memopt.offload.sizes import pages_up

def free_bytes(path: str | os.PathLike[str]) -> int:
    s = os.statvfs(path)
    return s.f_bavail * s.f_frsize

def _work(call, fd, holder, offset):
    part = holder.pop()
    try:
        call(fd, [part], offset)
    finally:
        del part

class NVMeStore:
    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.files: list[tuple[int, mmap.mmap]] = []
        self.pool = ThreadPoolExecutor(4)
        self.read_bytes = self.written_bytes = 0
    def reserve(self, sizes):
        total = sum(pages_up(n) for n in sizes)
        path = self.directory / f"{len(self.files)}.data"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(fd, 0, max(total, 4096))
        fb = os.open(path, os.O_RDWR)
        mm = mmap.mmap(fb, max(total, 4096), mmap.MAP_SHARED)
        os.close(fb); os.unlink(path)
        self.files.append((fd, mm))
        found, at = [], 0
        for n in sizes:
            found.append(Extent(len(self.files) - 1, at, n)); at += pages_up(n)
        return found
    def release(self, extents): pass
    def _pieces(self, extent):
        step = 8 << 20
        return [(o, min(step, extent.reserved_bytes - o)) for o in range(0, extent.reserved_bytes, step)]
    def read(self, extent, into):
        a = into.numpy(); fd = self.files[extent.file][0]; self.read_bytes += extent.reserved_bytes
        return Transfer([self.pool.submit(_work, os.preadv, fd, [a[o:o + n]], extent.offset + o) for o, n in self._pieces(extent)])
    def write(self, extent, source):
        a = source.numpy(); fd = self.files[extent.file][0]; self.written_bytes += extent.reserved_bytes
        return Transfer([self.pool.submit(_work, os.pwritev, fd, [a[o:o + n]], extent.offset + o) for o, n in self._pieces(extent)])
    def mapped(self, extent):
        return torch.frombuffer(self.files[extent.file][1], dtype=torch.uint8, count=extent.num_bytes, offset=extent.offset)
    def close(self):
        self.pool.shutdown()
        for fd, _ in self.files: os.close(fd)
        self.files = []
