"""Plan with a store: which model state is away, and what recomputation does with the room that this leaves.

[Note: Rungs] Model state leaves in the order of what it costs: optimizer states are used once a step, gradients are
written and read once, parameters are read twice and written once. So placements form a ladder. For each rung the solver
finds the fastest recomputation; the best rung wins, with the waits for the store counted in.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from memopt.errors import InfeasibleBudgetError
from memopt.offload.sizes import file_bytes, pages_up, stored_bytes
from memopt.policies.placement import ModelState, Placement, Traffic, placed, stalls, traffic
from memopt.policies.plan import Plan
from memopt.policies.solve import Found, Progress, Solver
from memopt.profiler.hardware import Hardware
from memopt.profiler.profile import Profile

_SHARES = (0.25, 0.5, 0.75, 1.0)
_NOTHING: frozenset[int] = frozenset()
_MIB = 2**20
_MOST_BUCKET_BYTES = 128 * _MIB


@dataclass(frozen=True, slots=True)
class _Rung:
    """A placement of the model's state, and the solver for the step as it is then."""

    placement: Placement
    solver: Solver
    before: Placement | None = None  # the rung below


@dataclass(frozen=True, slots=True)
class _Replay:
    """Dropped values that are made again together."""

    values: tuple[int, ...]
    saved: tuple[int, ...]  # those that backward asks for, large enough to be moved
    seconds: float
    num_bytes: int


class OffloadSolver:
    """Plans for one profile with a store at hand."""

    def __init__(
        self, profile: Profile, hardware: Hardware, may_recompute: bool, progress: Progress | None = None
    ) -> None:
        self.profile, self.hardware, self.may_recompute = profile, hardware, may_recompute
        self.base = Solver(profile, progress)
        self.state = ModelState(profile)
        self._progress = progress or (lambda text: None)

    # The ladder

    def placements(self, budget_bytes: int) -> list[Placement]:
        """From nothing away to everything, with staging that suits the budget."""
        state = self.state
        largest = max((state.bytes_of(s) for s in state.parameters.values()), default=0)
        # Staging is worth its room while it hides latency; of a tight budget it gets a small share.
        window = max(2 * largest, min(2 * _MOST_BUCKET_BYTES, budget_bytes // 12))
        bucket = max(largest, min(_MOST_BUCKET_BYTES, budget_bytes // 24))
        found: list[Placement] = [Placement()]
        for names in _shares_of(state.order, state.states):
            found.append(replace(found[-1], states=names))
        for names in _shares_of(state.order, state.gradients):
            found.append(replace(found[-1], gradients=names))
        for names in _shares_of(state.order, state.parameters):
            found.append(replace(found[-1], parameters=names))
        return [
            replace(
                p,
                window_bytes=window,
                gradient_window_bytes=max(largest, window // 2),
                activation_window_bytes=max(
                    2 * self._largest_activation(), min(_MOST_BUCKET_BYTES, budget_bytes // 16)
                ),
                bucket_bytes=bucket,
                num_buckets=3 if budget_bytes else 1,
            )
            for p in found
        ]

    def _largest_activation(self) -> int:
        sizes = self.base.simulator.bytes_of
        return max((sizes[v] for v in self.base.graph.saved), default=0)

    def _rung(self, placement: Placement, before: Placement | None = None) -> _Rung:
        if placement.is_empty:
            return _Rung(placement, self.base)
        return _Rung(placement, Solver(placed(self.state, placement), self._progress, like=self.base), before)

    # The least

    def least_bytes(self) -> int:
        """The smallest peak of any rung, with the least staging."""
        return min(self._least_bytes(self._rung(p)) for p in self.placements(0))

    def _least_bytes(self, rung: _Rung) -> int:
        return rung.solver.peak_bytes(self._least(rung).outcome)

    def _least(self, rung: _Rung) -> Found:
        """The choice with the smallest peak: recomputing, moving, or recomputing from what was moved."""
        solver = rung.solver
        found = [Found(_NOTHING, solver.plain), self._moving(rung, _NOTHING, self._movable(solver))]
        if self.may_recompute:
            least = solver.least()
            found += [least, self._moving(rung, least.dropped, self._kept_beside(solver, least.dropped))]
        return min(found, key=lambda f: (f.outcome.peak_bytes, f.outcome.step_s))

    def _moving(self, rung: _Rung, dropped: frozenset[int], moved: frozenset[int]) -> Found:
        solver = rung.solver
        solver.simulator.move_window_bytes = rung.placement.activation_window_bytes
        return Found(dropped, solver.simulator.run(dropped, moved), moved)

    def _movable(self, solver: Solver) -> frozenset[int]:
        sizes = solver.simulator.bytes_of
        return frozenset(v for v in solver.graph.saved if stored_bytes(sizes[v]))

    def _kept_beside(self, solver: Solver, dropped: frozenset[int]) -> frozenset[int]:
        """What is kept when `dropped` is dropped and could be moved: other saved values, and what replays read."""
        profile, sizes = self.profile, solver.simulator.bytes_of
        read = {v for u in dropped for v in profile.ops[profile.values[u].maker].reads}
        sources = frozenset(v for v in read & solver.simulator.droppable if stored_bytes(sizes[v]))
        return (self._movable(solver) | sources) - dropped

    # The fastest

    def solve(self, budget_bytes: int, nvme: str) -> Plan:
        """The fastest plan found within the budget. Raises InfeasibleBudgetError."""
        if self.base.peak_bytes(self.base.plain) <= budget_bytes:
            return self.base.solve(budget_bytes)
        best: tuple[float, _Rung, Found] | None = None
        for rung in self._fitting(budget_bytes):
            found = self._fastest(rung, budget_bytes)
            step_s = self._step_s(rung, found)
            if best is None or step_s < best[0]:
                best = (step_s, rung, found)
        if best is None:
            raise self._infeasible(budget_bytes)
        rung, found = self._keeping_more(best[1], best[2], budget_bytes)
        return self._plan(rung, found, budget_bytes, nvme)

    def _keeping_more(self, rung: _Rung, found: Found, budget_bytes: int) -> tuple[_Rung, Found]:
        """The same choice of values with as much model state in memory as fits, between a rung and the one below."""
        if rung.before is None:
            return rung, found
        low, high = 0, self.state.num_names(rung.before, rung.placement)  # `high` more than the rung below fits
        best = (rung, found)
        while high - low > 1:
            middle = (low + high) // 2
            tried = self._rung(self.state.between(rung.before, rung.placement, middle))
            outcome = self._moving(tried, found.dropped, found.moved)
            if tried.solver.peak_bytes(outcome.outcome) <= budget_bytes:
                high, best = middle, (tried, replace(outcome, gap=found.gap))
            else:
                low = middle
        return best

    def _fitting(self, budget_bytes: int) -> list[_Rung]:
        """Rungs worth solving, with staging that suits the budget or, if nothing fits then, with the least."""
        found = self._fitting_of(self.placements(budget_bytes), budget_bytes)
        return found or self._fitting_of(self.placements(0), budget_bytes)

    def _fitting_of(self, ladder: list[Placement], budget_bytes: int) -> list[_Rung]:
        """The first rung that fits, some that leave more room for activations, and the last."""

        @functools.cache
        def fitting(i: int) -> _Rung | None:
            self._progress(f"placing model state, {i + 1} of {len(ladder)}")
            rung = self._rung(ladder[i], ladder[i - 1] if i else None)
            return rung if self._fits(rung, budget_bytes) else None

        last = len(ladder) - 1
        if fitting(last) is not None:
            first = bisect.bisect_left(range(last), True, key=lambda i: fitting(i) is not None)
        else:  # staging can be more than what it saves
            first = next((i for i in range(last) if fitting(i) is not None), last)
        wanted = sorted({first, first + 1, first + 2, first + 4, last} & set(range(len(ladder))))
        return [rung for i in wanted if (rung := fitting(i)) is not None]

    def _fits(self, rung: _Rung, budget_bytes: int) -> bool:
        """Whether any choice fits; the cheapest to try come first."""
        solver, room = rung.solver, budget_bytes - rung.solver.scratch_bytes
        if solver.plain.peak_bytes <= room:
            return True
        if self._moving(rung, _NOTHING, self._movable(solver)).outcome.peak_bytes <= room:
            return True
        return self._least_bytes(rung) <= budget_bytes

    def _fastest(self, rung: _Rung, budget_bytes: int) -> Found:
        """The fastest choice found for a rung: recompute alone, moving alone, or some of both."""
        solver, room = rung.solver, budget_bytes - rung.solver.scratch_bytes
        found: list[Found] = []
        if solver.plain.peak_bytes <= room:
            found.append(Found(_NOTHING, solver.plain))
        found += self._keeping_some(rung, room)
        if self.may_recompute:
            try:
                best = solver.find(budget_bytes)
            except InfeasibleBudgetError:
                best = None
            if best is not None:
                found += [best, *self._moving_some(rung, best.dropped)]
        fitting = [f for f in found if f.outcome.peak_bytes <= room]
        return min(fitting or [self._least(rung)], key=lambda f: (self._step_s(rung, f), f.outcome.peak_bytes))

    def _keeping_some(self, rung: _Rung, room: int) -> list[Found]:
        """Everything moved but as many of the last values as fit: what is made last is freed first in backward."""
        movable = sorted(self._movable(rung.solver), reverse=True)
        low, high = 0, len(movable) + 1  # keeping `low` fits, if anything does
        best = self._moving(rung, _NOTHING, frozenset(movable))
        if best.outcome.peak_bytes > room:
            return []
        while high - low > 1:
            middle = (low + high) // 2
            tried = self._moving(rung, _NOTHING, frozenset(movable[middle:]))
            if tried.outcome.peak_bytes <= room:
                low, best = middle, tried
            else:
                high = middle
        return [best]

    def _moving_some(self, rung: _Rung, dropped: frozenset[int]) -> list[Found]:
        """Some of what would be recomputed moved instead, the most seconds per byte first."""
        groups = self._replays(rung.solver, dropped)
        found = []
        for share in (0.25, 0.5, 0.75, 1.0):
            chosen = groups[: int(len(groups) * share + 0.5)]
            moved = frozenset(v for group in chosen for v in group.saved)
            rest = dropped - frozenset(v for group in chosen for v in group.values)
            if moved:
                found.append(self._moving(rung, rest, moved))
        return found

    def _replays(self, solver: Solver, dropped: frozenset[int]) -> list[_Replay]:
        """Dropped values in groups that are replayed from each other, dearest per byte first."""
        profile, sizes, saved = self.profile, solver.simulator.bytes_of, solver.graph.saved
        group_of: dict[int, list[int]] = {}
        for v in sorted(dropped):
            members = group_of.setdefault(v, [v])
            for u in profile.ops[profile.values[v].maker].reads:
                other = group_of.get(u)
                if other is not None and other is not members:
                    members.extend(other)
                    group_of.update(dict.fromkeys(other, members))
        groups = {id(members): members for members in group_of.values()}.values()
        replays = [
            _Replay(
                tuple(members),
                tuple(v for v in members if v in saved and stored_bytes(sizes[v])),
                sum(profile.ops[op].seconds for op in {profile.values[v].maker for v in members}),
                sum(sizes[v] for v in members if v in saved),
            )
            for members in groups
        ]
        return sorted((r for r in replays if r.saved), key=lambda r: (-r.seconds / max(1, r.num_bytes), r.values))

    # The answer

    def _traffic(self, rung: _Rung, found: Found) -> Traffic:
        sizes = rung.solver.simulator.bytes_of
        return traffic(self.state, rung.placement, self.hardware, sum(pages_up(sizes[v]) for v in found.moved))

    def _step_s(self, rung: _Rung, found: Found) -> float:
        waits = stalls(self.profile, self._traffic(rung, found), found.outcome.recompute_s)
        return found.outcome.step_s + sum(waits.values())

    def _plan(self, rung: _Rung, found: Found, budget_bytes: int, nvme: str) -> Plan:
        solver, placement, state = rung.solver, rung.placement, self.state
        made = solver.plan(budget_bytes, found)
        if placement.is_empty and not found.moved:
            return made
        moved = self._traffic(rung, found)
        waits = stalls(self.profile, moved, found.outcome.recompute_s)
        sizes = [state.profile.storages[i].num_bytes for i in placement.storages(state)]
        sizes += [solver.simulator.bytes_of[v] for v in found.moved]
        step_s = found.outcome.step_s + sum(waits.values())
        forecast = replace(
            made.forecast,
            step_s=step_s,
            plain_peak_bytes=self.base.peak_bytes(self.base.plain),
            store_bytes=file_bytes(sizes),
            read_bytes=sum(moved.read_bytes.values()),
            written_bytes=sum(moved.written_bytes.values()),
            lane_s=sum(moved.lane_s.values()),
            stalls_s=waits,
        )
        return replace(
            made,
            forecast=forecast,
            gap=max(0.0, 1 - self.base.simulator.plain_s / step_s),  # no step is faster than its own computation
            levers=(*made.levers, "offload"),
            away=placement.away(state.order),
            window_bytes=placement.window_bytes,
            gradient_window_bytes=placement.gradient_window_bytes,
            activation_window_bytes=placement.activation_window_bytes,
            bucket_bytes=placement.bucket_bytes,
            num_buckets=placement.num_buckets,
            nvme=nvme,
        )

    def _infeasible(self, budget_bytes: int) -> InfeasibleBudgetError:
        rung = min((self._rung(p) for p in self.placements(0)), key=self._least_bytes)
        solver, found = rung.solver, self._least(rung)
        return InfeasibleBudgetError(
            budget_bytes,
            solver.peak_bytes(found.outcome),
            solver.forecast(found).breakdown,
            ("use a smaller micro-batch or a shorter sequence",),
            self.profile.device,
        )


def _shares_of(order: list[str], table: dict[str, list[int]]) -> Iterator[frozenset[str]]:
    """Growing parts of the names in `table`, up to all of them."""
    names = [name for name in order if name in table]
    for share in _SHARES if names else ():
        yield frozenset(names[: max(1, round(share * len(names)))])
