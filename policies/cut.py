"""Which values to keep and which to make again, exactly, for a given price of memory: one minimum cut.

Every value is on the forward side (gone after the forward) or on the backward side (available there).
 - keep v: v crosses the cut, cost price * bytes(v)               edge v_in -> v_out
 - recompute v: its op runs again, cost the op's seconds, once     edge source -> op -> v_in
 - v was saved for backward, so it must be available               edge v_out -> sink, infinite
 - an op that runs again needs its inputs available                edge input_out -> op, infinite
Sweeping the price gives the convex hull of (bytes kept, seconds recomputed). Source: the reduction of optimal
rematerialisation without memory peaks to a minimum s-t cut is folklore of AOTAutograd's partitioner (torch/_functorch/
partitioners.py); here an op, not a value, carries the seconds, so that an op of many outputs is paid for once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

_SCALE = 1_000_000  # capacity of all seconds together ...
_MOST = 1_500_000_000  # ... unless all capacities together would not fit 32 bits
_INFINITE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class CutOp:
    """One op of the graph: what it reads and makes (only values of the graph), and the seconds to run it again."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Cut:
    """A minimum cut: values to make again, and what the cut costs in seconds at its price."""

    recomputed: frozenset[int]
    cost_s: float


def minimum_cut(
    ops: Sequence[CutOp],
    keep_cost_s: Mapping[int, float],
    needed: frozenset[int],
) -> Cut:
    """The cheapest way to have the values in `needed` available in backward.

    Args:
        ops: replayable ops, each value made by at most one of them.
        keep_cost_s: seconds that keeping each value costs at today's price; a value that is not in it can't be kept.
        needed: values that backward asks for.

    Returns the values to recompute; all other needed values, and the inputs of recomputed ones, are kept.
    """
    values = sorted({v for op in ops for v in (*op.reads, *op.makes)})
    index = {v: i for i, v in enumerate(values)}
    num_values, num_ops = len(values), len(ops)
    source, sink = 2 * num_values + num_ops, 2 * num_values + num_ops + 1
    total_s = sum(op.seconds for op in ops)
    if total_s <= 0 or not needed:
        return Cut(frozenset(), 0.0)
    scale = min(_SCALE / total_s, _MOST / (total_s + sum(keep_cost_s.get(v, 0.0) for v in values)))

    rows: list[int] = []
    cols: list[int] = []
    capacity: list[int] = []

    def edge(a: int, b: int, units: int) -> None:
        if units > 0:
            rows.append(a)
            cols.append(b)
            capacity.append(units)

    made = set()
    for o, op in enumerate(ops):
        node = 2 * num_values + o
        edge(source, node, int(op.seconds * scale))  # rounded down: a bound must stay one
        for v in op.makes:
            made.add(v)
            edge(node, 2 * index[v], _INFINITE)
        for v in op.reads:
            edge(2 * index[v] + 1, node, _INFINITE)
    for v in values:
        i = index[v]
        edge(2 * i, 2 * i + 1, int(keep_cost_s[v] * scale) if v in keep_cost_s else _INFINITE)
        if v not in made:
            edge(source, 2 * i, _INFINITE)
        if v in needed:
            edge(2 * i + 1, sink, _INFINITE)
    graph = csr_array((np.array(capacity, np.int32), (rows, cols)), shape=(sink + 1, sink + 1))
    flow = maximum_flow(graph, source, sink, method="dinic")
    reached = _reachable(source, dict(zip(zip(rows, cols, strict=True), capacity, strict=True)), flow.flow)
    recomputed = frozenset(v for v in values if v in made and 2 * index[v] not in reached)
    return Cut(recomputed, float(flow.flow_value) / scale)


def _reachable(source: int, capacity: dict[tuple[int, int], int], flow: Any) -> set[int]:
    """Nodes that the source reaches over edges with capacity to spare; `flow` is scipy's, reverse edges included."""
    starts, ends, units = flow.indptr.tolist(), flow.indices.tolist(), flow.data.tolist()
    reached, stack = {source}, [source]
    while stack:
        a = stack.pop()
        for i in range(starts[a], starts[a + 1]):
            b = ends[i]
            if b not in reached and capacity.get((a, b), 0) > units[i]:
                reached.add(b)
                stack.append(b)
    return reached
