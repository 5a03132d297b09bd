"""The forward as a graph of values, cut into segments whose replays do not reach into each other.

[Note: Segments] A replay that reaches back through the whole model makes every activation again at once: nothing is
saved at the peak. So a plan divides the forward at places where little crosses (a transformer's residual stream), keeps
what crosses, and recomputes inside segments only. Where to divide, and into how many, follows from bytes, not from
modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from memopt.policies.cut import CutOp, minimum_cut
from memopt.policies.simulate import Simulator
from memopt.profiler.profile import NEVER, Phase, Profile

# How many parts a model is divided into at most, tried in turn.
_NUM_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True)
class Option:
    """What a segment may drop: the values, the bytes of saved tensors that stay, and the seconds to make the rest
    again."""

    dropped: frozenset[int]
    kept_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Segment:
    """Ops [start, stop) of the forward and the options of its hull, from the least memory to nothing dropped."""

    start: int
    stop: int
    options: tuple[Option, ...]


class ForwardGraph:
    """Droppable values of one profile's forward and who reads them."""

    def __init__(self, profile: Profile, simulator: Simulator) -> None:
        self.profile, self.simulator = profile, simulator
        self.ops = [i for i, op in enumerate(profile.ops) if op.phase is Phase.FORWARD]
        self.position = {op: p for p, op in enumerate(self.ops)}
        self.saved = frozenset(s.value for s in profile.saved if s.is_hooked and s.value in simulator.droppable)
        self.size = simulator.bytes_of
        self._last_read: dict[int, int] = {}
        for p, i in enumerate(self.ops):
            for v in profile.ops[i].reads:
                self._last_read[v] = p
        num = len(self.ops)
        self.saved_bytes = np.zeros(num + 1, np.int64)  # of values made by the op at each position
        self.crossing_bytes = np.zeros(num + 1, np.int64)  # of values made before and read at or after a position
        seen: set[int] = set()
        for p, i in enumerate(self.ops):
            for v in profile.ops[i].makes:
                storage = simulator.storage_of[v]
                if v in self.saved and storage not in seen:
                    seen.add(storage)
                    self.saved_bytes[p] += self.size[v]
                last = self._last_read.get(v, p)
                if last > p and not self._is_global(p, last):
                    self.crossing_bytes[p + 1 : last + 1] += self.size[v]
        # A value read all over the model (a mask, an encoder's output) is kept: it would tie all segments together.
        self.global_values = frozenset(
            v
            for p, i in enumerate(self.ops)
            for v in profile.ops[i].makes
            if self._is_global(p, self._last_read.get(v, p))
        )
        self._shapes: dict[object, tuple[tuple[frozenset[int], float], ...]] = {}

    def _is_global(self, made: int, last_read: int) -> bool:
        return last_read - made > max(40, 0.4 * len(self.ops))

    def divisions(self) -> Iterator[list[tuple[int, int]]]:
        """Ways to divide the forward, coarse to fine: lists of [start, stop) positions."""
        total = int(self.saved_bytes.sum())
        seen: set[tuple[int, ...]] = set()
        candidates = self._candidates()
        for parts in _NUM_PARTS:
            if parts > 2 * len(candidates):
                break
            division = self._divide(candidates, -(-total // parts))
            key = tuple(start for start, _ in division)
            if key not in seen:
                seen.add(key)
                yield division

    def _candidates(self) -> list[int]:
        """Positions where no neighbour is crossed by less."""
        crossing = self.crossing_bytes
        num = len(self.ops)
        inner = [
            p
            for p in range(1, num)
            if (crossing[p] <= crossing[p - 1] and crossing[p] < crossing[min(p + 1, num)]) or p == num - 1
        ]
        return [0, *inner, num]

    def _divide(self, candidates: list[int], limit_bytes: int) -> list[tuple[int, int]]:
        """Segments of at most `limit_bytes` saved bytes each, with the least bytes crossing between them (shortest
        path)."""
        places = np.array(candidates)
        before = np.concatenate([[0], np.cumsum(self.saved_bytes[: len(self.ops)])])[places]
        best = np.full(len(places), np.iinfo(np.int64).max // 2, np.int64)
        best[0] = 0
        came_from = np.zeros(len(places), np.int64)
        for j in range(1, len(places)):
            first = int(np.searchsorted(before, before[j] - limit_bytes, side="left"))
            first = min(first, j - 1)
            # A later start breaks ties: segments are as even as the limit lets them.
            i = first + int(best[first:j].argmin())
            best[j], came_from[j] = best[i] + self.crossing_bytes[places[j]] + 1, i
        stops = [len(places) - 1]
        while stops[-1] > 0:
            stops.append(int(came_from[stops[-1]]))
        stops.reverse()
        return [(int(places[a]), int(places[b])) for a, b in itertools.pairwise(stops)]

    # Options of a segment

    def prices(self) -> list[float]:
        """Prices in seconds per byte that tell the values apart, cheap to dear."""
        ratios = sorted(
            op.seconds / max(1, sum(self.size[v] for v in op.makes))
            for i in self.ops
            if (op := self.profile.ops[i]).is_replayable and any(self.size[v] > 0 for v in op.makes)
        )
        if not ratios:
            return []
        quantiles = [ratios[int(q * (len(ratios) - 1))] for q in (0.02, 0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0)]
        grid = sorted({q * f for q in quantiles for f in (1.05, 3.0)})
        # The last price is one at which bytes are all that counts: seconds only choose among equals.
        total_s = sum(self.profile.ops[i].seconds for i in self.ops)
        largest = max(self.size[v] for i in self.ops for v in self.profile.ops[i].makes)
        return [*grid, max(2 * grid[-1], 20 * total_s / max(1, largest))]

    def segment(self, start: int, stop: int, prices: list[float]) -> Segment:
        """The segment with its hull of options. Like segments are solved once."""
        profile = self.profile
        inside: list[int] = []
        local: dict[int, int] = {}
        for p in range(start, stop):
            for v in profile.ops[self.ops[p]].makes:
                local[v] = len(local)
                inside.append(v)
        free = {
            v: n
            for v, n in local.items()
            if v in self.simulator.droppable and v not in self.global_values and self._last_read.get(v, -1) < stop
        }
        shape: list[object] = []
        cut_ops: list[CutOp] = []
        for p in range(start, stop):
            op = profile.ops[self.ops[p]]
            makes = tuple(free[v] for v in op.makes if v in free)
            if not op.is_replayable or not makes:
                continue
            reads = tuple(free[v] for v in op.reads if v in free)
            if any(self._is_lost(v, op.at) for v in op.reads if v not in free):
                continue  # an input is written over later: to replay it would need a copy
            cut_ops.append(CutOp(reads, makes, op.seconds + self.simulator.profile_replay_s))
            shape.append((reads, makes, round(op.seconds * 1e9)))
        made = {v for op in cut_ops for v in op.makes}
        names = {n: v for v, n in free.items()}
        needed = frozenset(n for n, v in names.items() if v in self.saved and n in made)
        sizes = {n: self.size[v] for n, v in names.items()}
        keepable = {n: self.size[v] for n, v in names.items() if not self._is_lost(v, -1)}
        key = (tuple(shape), needed, tuple(sorted(sizes.items())), tuple(sorted(keepable)))
        if key not in self._shapes:
            self._shapes[key] = self._hull(cut_ops, keepable, needed, prices)
        options = []
        for dropped, seconds in self._shapes[key]:
            kept = sum(sizes[n] for n in needed - dropped)
            options.append(Option(frozenset(names[n] for n in dropped), kept, seconds))
        return Segment(start, stop, tuple(options))

    def _is_lost(self, v: int, after: int) -> bool:
        """Whether the content of v is written over in the forward, after the event `after`."""
        at = self.profile.values[v].overwritten_at
        return at != NEVER and at > after and at <= self.profile.forward_ends_at

    def _hull(
        self, ops: list[CutOp], keepable: dict[int, int], needed: frozenset[int], prices: list[float]
    ) -> tuple[tuple[frozenset[int], float], ...]:
        """Choices on the convex hull of (bytes kept, seconds), the least memory first, nothing dropped last."""
        maker = {v: op for op in ops for v in op.makes}
        found: dict[frozenset[int], tuple[int, float]] = {frozenset(): (sum(keepable.get(v, 0) for v in needed), 0.0)}
        least: frozenset[int] = frozenset()
        for price in prices:
            cut = minimum_cut(ops, {v: price * b for v, b in keepable.items()}, needed)
            dropped = _only_useful(cut.recomputed, needed, maker)
            least = dropped  # in the end, at the last price
            if dropped in found:
                continue
            seconds = sum(op.seconds for op in ops if dropped & set(op.makes))
            sources = {v for u in dropped for v in maker[u].reads} - dropped
            kept = sum(keepable.get(v, 0) for v in (needed - dropped) | sources)
            found[dropped] = (kept, seconds)
        points = sorted(
            ((kept, seconds, dropped) for dropped, (kept, seconds) in found.items()),
            key=lambda p: (p[2] != least, p[0], p[1]),
        )
        hull: list[tuple[int, float, frozenset[int]]] = []
        for kept, seconds, dropped in points:
            if hull and seconds >= hull[-1][1]:
                continue  # more bytes for no less time
            while len(hull) >= 2 and _is_above(hull[-2], hull[-1], (kept, seconds)):
                hull.pop()
            hull.append((kept, seconds, dropped))
        return tuple((dropped, seconds) for _, seconds, dropped in hull)


def _only_useful(dropped: frozenset[int], needed: frozenset[int], maker: dict[int, CutOp]) -> frozenset[int]:
    """Without the values that no needed dropped value is made from."""
    useful: set[int] = set()
    stack = [v for v in dropped if v in needed]
    while stack:
        v = stack.pop()
        if v not in useful:
            useful.add(v)
            stack.extend(u for u in maker[v].reads if u in dropped)
    return frozenset(useful)


def _is_above(a: tuple[int, float, object], b: tuple[int, float, object], c: tuple[int, float]) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def lower_bound_s(graph: ForwardGraph, simulator: Simulator, budget_bytes: int, prices: Iterable[float]) -> float:
    """A step time in seconds that no plan by recompute can beat within the budget (Lagrangian dual at the plain peak).

    At the moment of the plain peak a plan holds at least what it can't drop and what it keeps, and it runs each op that
    it replays at least once. So for any price p >= 0: plain time + min cut(p) + p * (fixed bytes - budget) is a bound.
    """
    profile = graph.profile
    plain = simulator.run(frozenset())
    moment = plain.peak_at
    if plain.peak_bytes <= budget_bytes:
        return simulator.plain_s
    alive: dict[int, int] = {}
    for s in profile.saved:
        until = simulator.end if s.released_at == NEVER else max(s.released_at, s.given_until)
        if s.value in graph.saved and s.packed_at <= moment < until:
            storage = simulator.storage_of[s.value]
            death = profile.storages[storage].death
            if death != NEVER and death <= moment:
                alive[s.value] = simulator.bytes_of[s.value]
    by_storage = {simulator.storage_of[v]: b for v, b in alive.items()}
    fixed = plain.peak_bytes - sum(by_storage.values())
    cut_ops = [
        CutOp(
            tuple(v for v in op.reads if v in simulator.droppable),
            tuple(v for v in op.makes if v in simulator.droppable),
            op.seconds,
        )
        for i in graph.ops
        if (op := profile.ops[i]).is_replayable
    ]
    keep = {v: alive.get(v, 0) for v in simulator.droppable}
    best = simulator.plain_s
    for price in prices:
        cut = minimum_cut(cut_ops, {v: price * b for v, b in keep.items()}, frozenset(alive))
        best = max(best, simulator.plain_s + cut.cost_s + price * (fixed - budget_bytes))
    return best
