from __future__ import annotations
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol
import torch
from memopt.offload.sizes import PAGE_BYTES, pages_up

@dataclass(frozen=True, slots=True)
class Extent:
    file: int
    offset: int
    num_bytes: int
    @property
    def reserved_bytes(self) -> int:
        return pages_up(self.num_bytes)

class Transfer:
    def __init__(self, futures: list[Future[None]]) -> None:
        self.futures = futures
    def wait(self) -> None:
        for f in self.futures:
            f.result()

class Store(Protocol):
    def reserve(self, sizes: Sequence[int]) -> list[Extent]: ...
    def release(self, extents: Iterable[Extent]) -> None: ...
    def read(self, extent: Extent, into: torch.Tensor) -> Transfer: ...
    def write(self, extent: Extent, source: torch.Tensor) -> Transfer: ...
    def mapped(self, extent: Extent) -> torch.Tensor: ...
    def close(self) -> None: ...

def aligned_empty(num_bytes: int) -> torch.Tensor:
    n = pages_up(num_bytes)
    t = torch.empty(n + PAGE_BYTES if n else 0, dtype=torch.uint8)
    o = -t.data_ptr() % PAGE_BYTES if n else 0
    return t[o:o + n]

def joined(extents: Sequence[Extent]) -> Extent:
    return Extent(extents[0].file, extents[0].offset, sum(e.reserved_bytes for e in extents))
