"""The judge: plays a profiled step under a choice of dropped and moved values; says peak at every moment, and time.

It follows the tape's rules to the letter (memopt/tape.py, [Note: Need] and [Note: Sources]): who holds a storage and
until when, which nodes a replay runs and in which order, what is cached and when it is forgotten. No solver grades
itself.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memopt.profiler.profile import NEVER, Kind, Phase, Profile

Ints = npt.NDArray[np.int64]

# A forward under the tape pays for each op that passes its dispatch mode, views included: about as many again.
VIEWS_PER_OP = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulated step."""

    peak_bytes: int
    peak_at: int  # event index
    step_s: float
    recompute_s: float
    num_replayed: int
    levels: Ints  # allocated bytes after each event

    def exceeds(self, budget_bytes: int) -> bool:
        return self.peak_bytes > budget_bytes


class Simulator:
    """Plays one profile again and again; what does not depend on the choice is worked out once."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.end = profile.ends_at + 1
        ops, values, saved = profile.ops, profile.values, profile.saved
        self._bytes = np.array([s.num_bytes for s in profile.storages], np.int64)
        self._birth = np.array([s.birth for s in profile.storages], np.int64)
        self._death = np.array([self._moment(s.death) for s in profile.storages], np.int64)
        self.storage_of = [v.storage for v in values]
        self.bytes_of = [profile.storages[v.storage].num_bytes for v in values]
        self.droppable = frozenset(
            v for op in ops if op.is_replayable for v, p in zip(op.makes, op.positions, strict=True) if p >= 0
        )
        # Until when each saved tensor holds its storage if its value is kept.
        self._saved_value = [s.value for s in saved]
        self._saved_storage = np.array([self.storage_of[s.value] for s in saved], np.int64)
        self._saved_until = np.array([max(self._moment(s.released_at), s.given_until) for s in saved], np.int64)
        self._can_drop = np.array([s.is_hooked and s.value in self.droppable for s in saved], bool)
        self._given_until = [s.given_until for s in saved]
        self._released_at = [self._moment(s.released_at) for s in saved]
        order = sorted((s.unpacked_at, i) for i, s in enumerate(saved) if s.unpacked_at != NEVER)
        self._asks = [(t, i) for t, i in order if self._can_drop[i]]
        self._handles_of: dict[int, list[int]] = {}
        for i, s in enumerate(saved):
            if self._can_drop[i]:
                self._handles_of.setdefault(s.value, []).append(i)
        hardware = profile.rates
        num_forward = sum(op.phase is Phase.FORWARD for op in ops)
        self.record_s = hardware.record_s * num_forward * (1 + VIEWS_PER_OP)
        self.profile_replay_s = hardware.replay_s
        self._replay_s = [op.seconds + hardware.replay_s for op in ops]
        self.plain_s = profile.step_s
        self._made_bytes = [
            sum(self.bytes_of[v] for v, p in zip(op.makes, op.positions, strict=True) if p >= 0) + op.scratch_bytes
            for op in ops
        ]
        self.move_window_bytes = 0  # staging for values that move to and from a store
        # A kernel's own scratch is there together with what it makes, which is born one event after it begins.
        self._scratch_at = np.array([op.at + 1 for op in ops if op.scratch_bytes], np.int64)
        self._scratch = np.array([op.scratch_bytes for op in ops if op.scratch_bytes], np.int64)

    def _moment(self, at: int) -> int:
        return self.end if at == NEVER else at

    def run(self, dropped: Set[int], moved: Set[int] = frozenset()) -> Outcome:
        """The step with the saved tensors over the values in `dropped` and `moved` given up; both must be droppable.

        Dropped ones are made again when backward asks for them, moved ones come back from a store.
        """
        profile, values = self.profile, self.profile.values
        away = dropped | moved if moved else dropped
        nodes = sorted({values[v].maker for v in dropped})
        holds = self._hold_until(dropped, nodes)
        ends = self._death.copy()
        is_away = np.fromiter((v in away for v in self._saved_value), bool, len(self._saved_value))
        kept = ~(is_away & self._can_drop)
        np.maximum.at(ends, self._saved_storage[kept], self._saved_until[kept])
        delta = np.zeros(self.end + 1, np.int64)
        for node, until in zip(nodes, holds, strict=True):
            for v in profile.ops[node].reads:
                if v not in away:
                    storage, overwritten = self.storage_of[v], values[v].overwritten_at
                    if overwritten == NEVER or overwritten > until or overwritten < profile.ops[node].at:
                        ends[storage] = max(ends[storage], until)
                    else:  # the tape copies it before the write
                        delta[overwritten] += self.bytes_of[v]
                        delta[until] -= self.bytes_of[v]
        np.add.at(delta, np.minimum(self._birth, self.end), self._bytes)
        np.add.at(delta, np.minimum(np.maximum(ends, self._birth), self.end), -self._bytes)
        if moved:
            self._add_move_window(moved, delta)
        bumps, seconds, num_replayed = self._play(dropped, moved, nodes, delta)
        levels = np.cumsum(delta)[: self.end]
        peak_at = int(levels.argmax())
        peak = int(levels[peak_at])
        if len(self._scratch):
            raised = levels[self._scratch_at] + self._scratch
            most = int(raised.argmax())
            if raised[most] > peak:
                peak, peak_at = int(raised[most]), int(self._scratch_at[most])
        for t, bump in bumps:
            if levels[t - 1] + bump > peak:
                peak, peak_at = int(levels[t - 1]) + bump, t
        recompute_s = seconds + (self.record_s if away else 0.0)
        return Outcome(peak, peak_at, self.plain_s + recompute_s, recompute_s, num_replayed, levels)

    def _add_move_window(self, moved: Set[int], delta: Ints) -> None:
        """Add the staging of moved values: writes under way in the forward, then no more than is left to read ahead."""
        left = sum(self.bytes_of[v] for v in moved)
        window = min(self.move_window_bytes, left)
        delta[min(self.profile.ops[self.profile.values[v].maker].at for v in moved)] += window
        seen: set[int] = set()
        for t, i in self._asks:
            v = self._saved_value[i]
            if v in moved and v not in seen:
                seen.add(v)
                left -= self.bytes_of[v]
                if left < window:
                    delta[t] -= window - left
                    window = left
        delta[self.end] -= window

    def _hold_until(self, dropped: Set[int], nodes: list[int]) -> list[int]:
        """Until when each node lives: as long as a handle, or a node that reads what it makes."""
        ops, forward_end = self.profile.ops, max(self.profile.forward_ends_at, 0)
        value_until: dict[int, int] = {}
        holds = [0] * len(nodes)
        for i in range(len(nodes) - 1, -1, -1):
            op = ops[nodes[i]]
            until = forward_end
            for v in op.makes:
                if v in dropped:
                    until = max(until, value_until.get(v, 0))
                    for h in self._handles_of.get(v, ()):
                        until = max(until, self._released_at[h])
            holds[i] = until
            for v in op.reads:
                if v in dropped:
                    value_until[v] = max(value_until.get(v, 0), until)
        return holds

    def _play(
        self, dropped: Set[int], moved: Set[int], nodes: list[int], delta: Ints
    ) -> tuple[list[tuple[int, int]], float, int]:
        """Play replays and reloads. Adds what they hold to `delta`; returns bumps inside replays, seconds, runs."""
        ops, values = self.profile.ops, self.profile.values
        away = dropped | moved if moved else dropped
        parents = {n: [v for v in ops[n].reads if v in away] for n in nodes}
        outputs = {n: [v for v in ops[n].makes if v in dropped] for n in nodes}
        need = dict.fromkeys(away, 0)
        armed: set[int] = set()
        cached: dict[int, int] = {}  # value -> until when what was given of it lives

        def wanted(v: int) -> None:
            stack = [v]
            while stack:
                v = stack.pop()
                need[v] += 1
                maker = values[v].maker
                if need[v] == 1 and v not in moved and maker not in armed and v not in cached:
                    armed.add(maker)
                    stack.extend(parents[maker])

        for v in away:
            for _ in self._handles_of.get(v, ()):
                wanted(v)

        bumps: list[tuple[int, int]] = []
        seconds, num_runs = 0.0, 0
        size = self.bytes_of
        now = level = 0

        def released(v: int) -> None:
            nonlocal level
            stack = [v]
            while stack:
                v = stack.pop()
                need[v] -= 1
                if need[v] == 0:
                    if v in cached:
                        until = cached.pop(v)
                        if until > now:  # what backward was given keeps it
                            delta[min(until, self.end)] -= size[v]
                        else:
                            delta[now] -= size[v]
                            level -= size[v]
                    if v not in moved:
                        stack.extend(disarmed(values[v].maker))

        def disarmed(n: int) -> list[int]:
            if n not in armed or any(need[u] > 0 and u not in cached for u in outputs[n]):
                return []
            armed.discard(n)
            return parents[n]

        def reloaded(v: int) -> None:
            nonlocal level
            cached[v] = 0
            level += size[v]
            delta[now] += size[v]

        for now, handle in self._asks:
            v = self._saved_value[handle]
            if v not in away:
                continue
            level = bump = 0
            if v not in cached and v in moved:
                reloaded(v)
            if v not in cached:
                found = {values[v].maker}
                stack = [values[v].maker]
                while stack:
                    for u in parents[stack.pop()]:
                        maker = values[u].maker
                        if u in moved:
                            if u not in cached:
                                reloaded(u)
                        elif u not in cached and maker not in found:
                            found.add(maker)
                            stack.append(maker)
                for n in sorted(found):
                    seconds += self._replay_s[n]
                    num_runs += 1
                    bump = max(bump, level + self._made_bytes[n])
                    for u in outputs[n]:
                        if need[u] > 0 and u not in cached:
                            cached[u] = 0
                            level += size[u]
                            delta[now] += size[u]
                    for u in disarmed(n):
                        released(u)
            given = self._given_until[handle]
            if given > cached[v]:
                cached[v] = given
            released(v)
            if bump > 0:
                bumps.append((now, bump))
        for v, until in cached.items():  # never asked for again: gone with the graph
            last = max((self._released_at[h] for h in self._handles_of.get(v, ())), default=self.end)
            delta[min(max(until, last), self.end)] -= size[v]
        return bumps, seconds, num_runs

    # What is alive at a moment, for reports

    def breakdown(self, dropped: Set[int], outcome: Outcome, moved: Set[int] = frozenset()) -> dict[str, int]:
        """Allocated bytes at the peak by kind of storage; what replays and reloads hold counts as recomputed."""
        at = outcome.peak_at
        ends = self._ends_under(dropped, moved)
        alive = (self._birth <= at) & (ends > at)
        total: dict[str, int] = {}
        for i in np.flatnonzero(alive):
            kind = self.profile.storages[i].kind
            total[kind.value] = total.get(kind.value, 0) + int(self._bytes[i])
        rest = outcome.peak_bytes - sum(total.values())
        if rest > 0:
            total["recomputed"] = rest
        return total

    def by_module(self, dropped: Set[int], outcome: Outcome, depth: int = 2) -> dict[str, int]:
        """Activation and temporary bytes at the peak by module, names cut at `depth` parts."""
        at = outcome.peak_at
        ends = self._ends_under(dropped, frozenset())
        total: dict[str, int] = {}
        for i in np.flatnonzero((self._birth <= at) & (ends > at)):
            storage = self.profile.storages[i]
            if storage.kind in (Kind.ACTIVATION, Kind.TEMPORARY):
                name = ".".join(storage.module.split(".")[:depth]) or "(root)"
                total[name] = total.get(name, 0) + storage.num_bytes
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def _ends_under(self, dropped: Set[int], moved: Set[int]) -> Ints:
        away = dropped | moved
        nodes = sorted({self.profile.values[v].maker for v in dropped})
        ends = self._death.copy()
        is_away = np.fromiter((v in away for v in self._saved_value), bool, len(self._saved_value))
        kept = ~(is_away & self._can_drop)
        np.maximum.at(ends, self._saved_storage[kept], self._saved_until[kept])
        for node, until in zip(nodes, self._hold_until(dropped, nodes), strict=True):
            for v in self.profile.ops[node].reads:
                if v not in away:
                    ends[self.storage_of[v]] = max(ends[self.storage_of[v]], until)
        return ends
