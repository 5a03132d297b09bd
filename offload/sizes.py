"""Byte formulas of the stores: what they really reserve. Pure numbers, for stores and planners alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

PAGE_BYTES = 4096
LEAST_STORED_BYTES = PAGE_BYTES  # a smaller tensor would take more of the store than it gives back in memory
CHUNK_BYTES = 64 * 2**20  # files grow by at least this much


def pages_up(num_bytes: int) -> int:
    """`num_bytes` rounded up to whole pages: every extent begins and ends at one."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def stored_bytes(num_bytes: int) -> int:
    """What a tensor of `num_bytes` takes on a store when it is offloaded; 0 for a small one, which stays in memory."""
    return pages_up(num_bytes) if num_bytes >= LEAST_STORED_BYTES else 0


def file_bytes(sizes: Iterable[int]) -> int:
    """Bytes on disk for extents of the given sizes."""
    return sum(pages_up(num_bytes) for num_bytes in sizes)


def slab_bytes(sizes: Iterable[int]) -> int:
    """Bytes of host memory for extents of the given sizes: one slab and what brings it to a page's begin.

    Not one `pin_memory()` per tensor: that rounds each up to a power of two.
    """
    num_bytes = file_bytes(sizes)
    return num_bytes + PAGE_BYTES if num_bytes else 0


def buckets_of(sizes: Sequence[int], limit_bytes: int) -> list[list[int]]:
    """Indices of `sizes` in runs of at most `limit_bytes` each, in order; a larger one is alone."""
    buckets: list[list[int]] = []
    held = 0
    for i, num_bytes in enumerate(sizes):
        if not buckets or held + num_bytes > limit_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += num_bytes
    return buckets
