"""Byte formulas of the stores: what they really reserve. Pure numbers, for stores and planners alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

PAGE_BYTES = 4096


def pages_up(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def file_bytes(sizes: Iterable[int]) -> int:
    return sum(pages_up(n) for n in sizes)


def stored_bytes(num_bytes: int) -> int:
    """What a tensor of `num_bytes` takes on a store; below a page it stays in memory."""
    return pages_up(num_bytes) if num_bytes >= PAGE_BYTES else 0


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
