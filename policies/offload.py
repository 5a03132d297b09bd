"""Plan with a store: which model state is away, and what recomputation does with the room that this leaves.

[Note: Rungs] Model state leaves in the order of what it costs: optimizer states are used once a step, gradients are
written and read once, parameters are read twice and written once. So placements form a ladder. For each rung the solver
finds the fastest recomputation; the best rung wins, with the waits for the store counted in.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memopt.errors import InfeasibleBudgetError
from memopt.offload.sizes import file_bytes
from memopt.policies.placement import ModelState, Placement, Traffic, placed, stalls, traffic
from memopt.policies.plan import Plan
from memopt.policies.solve import Progress, Solver
from memopt.profiler.hardware import Hardware
from memopt.profiler.profile import Profile

_SHARES = (0.25, 0.5, 0.75, 1.0)
_MIB = 2**20
_LEAST_BUCKET_BYTES = 8 * _MIB  # smaller ones are all latency
_MOST_BUCKET_BYTES = 128 * _MIB


@dataclass(slots=True)
class _Rung:
    placement: Placement
    solver: Solver
    moved: Traffic


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
        bucket = max(largest, _LEAST_BUCKET_BYTES, min(_MOST_BUCKET_BYTES, budget_bytes // 24))
        found: list[Placement] = [Placement()]
        for part, table in (
            ("states", state.states),
            ("gradients", state.gradients),
            ("parameters", state.parameters),
        ):
            names = [name for name in state.order if name in table]
            for share in _SHARES if names else ():
                chosen = frozenset(names[: -(-len(names) * int(100 * share) // 100)])
                found.append(replace(found[-1], **{part: chosen}))
        return [
            replace(p, window_bytes=window, gradient_window_bytes=max(largest, window // 2), bucket_bytes=bucket)
            for p in found
        ]

    def _rung(self, placement: Placement) -> _Rung:
        if placement.is_empty:
            return _Rung(placement, self.base, traffic(self.state, placement, self.hardware))
        solver = Solver(placed(self.state, placement), self._progress, like=self.base)
        return _Rung(placement, solver, traffic(self.state, placement, self.hardware))

    def _least_bytes(self, rung: _Rung) -> int:
        solver = rung.solver
        return solver.peak_bytes(solver.least().outcome if self.may_recompute else solver.plain)

    # The answers

    def least_bytes(self) -> int:
        """The smallest peak of any rung, with the least staging."""
        return min(self._least_bytes(self._rung(p)) for p in self.placements(0))

    def solve(self, budget_bytes: int, nvme: str) -> Plan:
        """The fastest plan found within the budget. Raises InfeasibleBudgetError."""
        if self.base.peak_bytes(self.base.plain) <= budget_bytes:
            return self.base.solve(budget_bytes)
        best: Plan | None = None
        for rung in self._fitting(budget_bytes):
            made = self._plan(rung, budget_bytes, nvme)
            if best is None or made.forecast.step_s < best.forecast.step_s:
                best = made
        if best is None:
            raise self._infeasible(budget_bytes)
        return best

    def _fitting(self, budget_bytes: int) -> list[_Rung]:
        """Rungs worth solving: nothing away, the first rungs that fit, and the last."""
        for staged_for in (budget_bytes, 0):
            rungs = [self._rung(p) for p in self.placements(staged_for)]
            first = self._first_that_fits(rungs, budget_bytes)
            if first is not None:
                break
        else:
            return []
        wanted = sorted({first, first + 1, first + 2, first + 4, len(rungs) - 1} & set(range(len(rungs))))
        return [rungs[i] for i in wanted if i == first or self._least_bytes(rungs[i]) <= budget_bytes]

    def _first_that_fits(self, rungs: list[_Rung], budget_bytes: int) -> int | None:
        for i, rung in enumerate(rungs):
            self._progress(f"placing model state, {i + 1} of {len(rungs)}")
            if self._least_bytes(rung) <= budget_bytes:
                return i
        return None

    def _plan(self, rung: _Rung, budget_bytes: int, nvme: str) -> Plan:
        solver, placement = rung.solver, rung.placement
        made = solver.solve(budget_bytes) if self.may_recompute else solver.solve_without_recompute(budget_bytes)
        if placement.is_empty:
            return made
        waits = stalls(self.profile, rung.moved, made.forecast.recompute_s)
        state = self.state
        stored = [
            state.profile.storages[i].num_bytes
            for names, table in (
                (placement.states, state.states),
                (placement.gradients, state.gradients),
                (placement.parameters, state.parameters),
            )
            for i in state.chosen(names, table)
        ]
        forecast = replace(
            made.forecast,
            step_s=made.forecast.step_s + sum(waits.values()),
            plain_peak_bytes=self.base.peak_bytes(self.base.plain),
            store_bytes=file_bytes(stored),
            read_bytes=sum(rung.moved.read_bytes.values()),
            written_bytes=sum(rung.moved.written_bytes.values()),
            lane_s=sum(rung.moved.lane_s.values()),
            stalls_s=waits,
        )
        return replace(
            made,
            forecast=forecast,
            levers=(*made.levers, "offload"),
            away=placement.away(state.order),
            window_bytes=placement.window_bytes,
            gradient_window_bytes=placement.gradient_window_bytes,
            bucket_bytes=placement.bucket_bytes,
            nvme=nvme,
        )

    def _infeasible(self, budget_bytes: int) -> InfeasibleBudgetError:
        rungs = [self._rung(p) for p in self.placements(0)]
        rung = min(rungs, key=self._least_bytes)
        solver = rung.solver
        found = solver.least() if self.may_recompute else None
        outcome = found.outcome if found else solver.plain
        breakdown = solver.simulator.breakdown(found.dropped if found else frozenset(), outcome)
        return InfeasibleBudgetError(
            budget_bytes,
            solver.peak_bytes(outcome),
            breakdown,
            ("use a smaller micro-batch or a shorter sequence",),
            self.profile.device,
        )
