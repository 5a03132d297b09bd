"""What of the model's state is away between uses, and the profiled step as it is then.

Optimizer states, gradients and parameters can each be kept on a store. `placed` rewrites a profile accordingly: what is
away has no bytes of its own, the staging buffers that bring it in do, and the optimizer's temporaries are those of one
bucket. The simulator then judges the rewritten step as any other. Times of transfers are in `Traffic`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from memopt.offload.sizes import buckets_of, stored_bytes
from memopt.policies.plan import Away
from memopt.profiler.hardware import Hardware
from memopt.profiler.profile import NEVER, Kind, Phase, Profile, Storage

_NUM_OPS_PER_NODE = 3  # a gradient is accumulated when its backward node ends, a few ops after it was made


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Names of the parameters whose states, gradients and values are away, and the memory that staging takes."""

    states: frozenset[str] = frozenset()
    gradients: frozenset[str] = frozenset()
    parameters: frozenset[str] = frozenset()
    window_bytes: int = 0  # parameters that are resident at a time in forward and backward
    gradient_window_bytes: int = 0  # gradients whose writes are under way
    activation_window_bytes: int = 0  # activations that are being written, and those that are read ahead
    bucket_bytes: int = 0  # what a bucket of the optimizer's step brings in
    num_buckets: int = 3  # in memory at a time: one is read, one stepped, one written (offload/optimizer.py)

    @property
    def is_empty(self) -> bool:
        return not (self.states or self.gradients or self.parameters)

    def away(self, order: list[str]) -> tuple[Away, ...]:
        """What is away by parameter, in the given order of names."""
        named = self.states | self.gradients | self.parameters
        return tuple(
            Away(name, name in self.parameters, name in self.gradients, name in self.states)
            for name in order
            if name in named
        )

    def storages(self, state: ModelState) -> list[int]:
        """Indices of the profile's storages that are away."""
        return [
            *state.chosen(self.states, state.states),
            *state.chosen(self.gradients, state.gradients),
            *state.chosen(self.parameters, state.parameters),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that a step moves to and from the store, by phase, and how long the store's lane takes for them."""

    read_bytes: dict[Phase, int]
    written_bytes: dict[Phase, int]
    lane_s: dict[Phase, float]
    fill_s: float  # reading the first and writing the last bucket of a step overlaps with nothing


class ModelState:
    """Sizes of a profile's parameters, gradients and optimizer states by the parameter's name."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.parameters: dict[str, list[int]] = {}
        self.gradients: dict[str, list[int]] = {}
        self.states: dict[str, list[int]] = {}
        by_kind = {
            Kind.PARAMETER: self.parameters,
            Kind.GRADIENT: self.gradients,
            Kind.OPTIMIZER_STATE: self.states,
        }
        for i, s in enumerate(profile.storages):
            if s.kind in by_kind and s.module and stored_bytes(s.num_bytes):
                by_kind[s.kind].setdefault(s.module, []).append(i)
        self.order = list(self.parameters)
        self.step_at = next((op.at for op in profile.ops if op.phase is Phase.STEP), profile.ends_at)

    def bytes_of(self, storages: list[int]) -> int:
        return sum(stored_bytes(self.profile.storages[i].num_bytes) for i in storages)

    def chosen(self, names: frozenset[str], table: dict[str, list[int]]) -> list[int]:
        return [i for name in names for i in table.get(name, ())]

    def num_names(self, before: Placement, after: Placement) -> int:
        """How many names `after` has more than `before`, in all parts."""
        return sum(len(b - a) for a, b in zip(_parts(before), _parts(after), strict=True))

    def between(self, before: Placement, after: Placement, num: int) -> Placement:
        """`after` with only the first `num` of the names that it has more than `before`."""
        parts = []
        for a, b in zip(_parts(before), _parts(after), strict=True):
            more = [name for name in self.order if name in b - a]
            parts.append(a | frozenset(more[:num]))
            num = max(0, num - len(more))
        return replace(after, states=parts[0], gradients=parts[1], parameters=parts[2])

    def bucket_sizes(self, placement: Placement) -> list[int]:
        """What each parameter that the optimizer steps brings into its bucket, in order."""
        sizes = []
        for name in self.order:
            if name not in self.gradients:
                continue
            streamed = 0
            for names, table in (
                (placement.parameters, self.parameters),
                (placement.gradients, self.gradients),
                (placement.states, self.states),
            ):
                if name in names:
                    streamed += self.bytes_of(table.get(name, []))
            sizes.append(streamed)
        return sizes

    def staging_bytes(self, placement: Placement) -> int:
        """Buffers for the buckets of the optimizer's step."""
        sizes = self.bucket_sizes(placement)
        own = [self.bytes_of(self.parameters[name]) for name in self.order if name in self.gradients]
        limits = [max(a, b) for a, b in zip(sizes, own, strict=True)]
        held = [sum(sizes[i] for i in bucket) for bucket in buckets_of(limits, placement.bucket_bytes)]
        return min(placement.num_buckets, len(held)) * max(held, default=0)  # buffers are of one size


def _parts(placement: Placement) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    return placement.states, placement.gradients, placement.parameters


def placed(state: ModelState, placement: Placement) -> Profile:
    """The profile of the same step with `placement` in force."""
    profile, step_at = state.profile, state.step_at
    if placement.is_empty:
        return profile
    storages = list(profile.storages)
    for i in (
        *state.chosen(placement.states, state.states),
        *state.chosen(placement.parameters, state.parameters),
    ):
        storages[i] = replace(storages[i], num_bytes=0)
    ends = _gradient_ends(state)
    first = step_at
    for i in state.chosen(placement.gradients, state.gradients):
        s = storages[i]
        if s.birth == 0:  # from an earlier micro-batch
            storages[i] = replace(s, num_bytes=0)
        else:
            first = min(first, s.birth)
            storages[i] = replace(s, death=ends.get(i, s.death))
    temporaries = most_at_once(profile, step_at)
    for i, s in enumerate(storages):
        if s.birth >= step_at and s.kind is Kind.TEMPORARY:
            storages[i] = replace(s, num_bytes=0)
    away_gradients = state.bytes_of(state.chosen(placement.gradients, state.gradients))
    for num_bytes, birth, death in (
        (_window_bytes(state, placement), 0, step_at),
        (min(away_gradients, placement.gradient_window_bytes), first, step_at),
        (state.staging_bytes(placement) + _bucket_temporaries(state, placement, temporaries), step_at, profile.ends_at),
    ):
        if num_bytes > 0 and birth < death:
            storages.append(Storage(num_bytes, Kind.STAGING, birth, death, "staging"))
    return replace(profile, storages=tuple(storages))


def _window_bytes(state: ModelState, placement: Placement) -> int:
    away = state.bytes_of(state.chosen(placement.parameters, state.parameters))
    return min(away, placement.window_bytes)


def _gradient_ends(state: ModelState) -> dict[int, int]:
    """When each gradient has been copied to the staging buffer, by storage."""
    profile = state.profile
    starts = [op.at for op in profile.ops]
    maker: dict[int, int] = {}
    for v in profile.values:
        maker.setdefault(v.storage, v.maker)
    ends = {}
    for storages in state.gradients.values():
        for i in storages:
            op = maker.get(i, -1)
            if op >= 0:
                last = op + _NUM_OPS_PER_NODE
                ends[i] = min(starts[last], state.step_at) if last < len(starts) else state.step_at
    return ends


def most_at_once(profile: Profile, step_at: int) -> int:
    """Peak of the temporaries of the plain optimizer step."""
    events: list[tuple[int, int]] = []
    for s in profile.storages:
        if s.birth >= step_at and s.kind is Kind.TEMPORARY:
            events += [(s.birth, s.num_bytes), (profile.ends_at if s.death == NEVER else s.death, -s.num_bytes)]
    now = most = 0
    for _, change in sorted(events):
        now += change
        most = max(most, now)
    return most


def _bucket_temporaries(state: ModelState, placement: Placement, plain_bytes: int) -> int:
    """Temporaries of the step of one bucket: in proportion if the step works on all parameters at once (foreach)."""
    own = [state.bytes_of(state.parameters[name]) for name in state.order if name in state.gradients]
    if not own or plain_bytes == 0:
        return 0
    if not any("._foreach_" in op.key.op for op in state.profile.ops if op.phase is Phase.STEP):  # one after the other
        return plain_bytes
    sizes = [max(a, b) for a, b in zip(state.bucket_sizes(placement), own, strict=True)]
    largest = max(sum(own[i] for i in bucket) for bucket in buckets_of(sizes, placement.bucket_bytes))
    return min(plain_bytes, -(-plain_bytes * largest // sum(own)))


def traffic(state: ModelState, placement: Placement, hardware: Hardware, moved_bytes: int = 0) -> Traffic:
    """What a step under `placement` moves, with `moved_bytes` of activations."""
    profile = state.profile
    parameters = state.bytes_of(state.chosen(placement.parameters, state.parameters))
    gradients = state.bytes_of(state.chosen(placement.gradients, state.gradients))
    states = state.bytes_of(state.chosen(placement.states, state.states))
    again = max(0, parameters - _window_bytes(state, placement))  # the end of the forward is there when backward begins
    is_accumulating = profile.micro_batches > 1
    read = {
        Phase.FORWARD: parameters,
        Phase.BACKWARD: again + (gradients if is_accumulating else 0) + moved_bytes,
        Phase.STEP: parameters + gradients + states,
    }
    trained = state.bytes_of(state.chosen(placement.parameters & state.gradients.keys(), state.parameters))
    written = {Phase.FORWARD: moved_bytes, Phase.BACKWARD: gradients, Phase.STEP: trained + states}
    lane = {phase: hardware.disk_s(read[phase], written[phase]) for phase in read}
    bucket = min(placement.bucket_bytes, read[Phase.STEP])
    fill = hardware.disk_s(bucket, 0) + hardware.disk_s(0, min(bucket, written[Phase.STEP]))
    return Traffic(read_bytes=read, written_bytes=written, lane_s=lane, fill_s=fill if states or gradients else 0.0)


def stalls(profile: Profile, moved: Traffic, recompute_s: float) -> dict[str, float]:
    """Seconds that each phase waits for the store: its lane works beside the phase's own computation."""
    own = {Phase.FORWARD: 0.0, Phase.BACKWARD: recompute_s, Phase.STEP: 0.0}
    for op in profile.ops:
        own[Phase.FORWARD if op.phase is Phase.LOSS else op.phase] += op.seconds
    found = {}
    for phase, lane_s in moved.lane_s.items():
        fill = moved.fill_s if phase is Phase.STEP else 0.0
        wait = max(lane_s - own[phase], fill)
        if wait > 0:
            found[phase.value] = wait
    return found
