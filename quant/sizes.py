"""Byte formulas of 8-bit states, for the planner and for who allocates them."""

from __future__ import annotations

BLOCK = 256  # elements that share a scale
TILE = (
    2**20
)  # elements that are decoded, stepped and encoded at a time: their fp32 buffers stay in the last-level cache
LEAST_CODED = 4096  # elements: smaller parameters keep their states as they are
SCALE_BYTES = 4


def num_blocks(numel: int) -> int:
    """Blocks of a state of `numel` elements; the last one may be short."""
    return -(-numel // BLOCK)


def coded_bytes(numel: int) -> int:
    """Bytes of one state in 8 bits: its codes, and a float32 scale for each block."""
    return numel + SCALE_BYTES * num_blocks(numel)


def work_bytes(numel: int, num_states: int) -> int:
    """Bytes of the buffers that a step needs while parameters of at most `numel` elements are stepped."""
    padded = BLOCK * num_blocks(min(numel, TILE))
    return 4 * padded * (num_states + 1) if numel else 0
