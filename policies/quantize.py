"""Plan with 8-bit optimizer states: which there are, and the profiled step as it is with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

from memopt.policies.placement import most_at_once
from memopt.profiler.profile import Kind, Phase, Profile, Storage
from memopt.quant.sizes import LEAST_CODED, TILE, coded_bytes, work_bytes

_ITEM_BYTES = (2, 4)  # of a state's element; doubles stay as they are
_CODEC_BYTES = 20  # of memory traffic that decoding and encoding an element of a state takes as long as


def quantizable(profile: Profile, keep_fp32: str | Iterable[str] = ()) -> tuple[str, ...]:
    """Names of the parameters whose optimizer states can be in 8 bits, but for those that match a pattern."""
    patterns = patterns_of(keep_fp32)
    states = _states(profile)
    return tuple(
        name
        for name, numel in profile.parameters
        if numel >= LEAST_CODED and states.get(name) and not any(fnmatchcase(name, pattern) for pattern in patterns)
    )


def patterns_of(keep_fp32: str | Iterable[str]) -> tuple[str, ...]:
    """One pattern or several, as a tuple."""
    return (keep_fp32,) if isinstance(keep_fp32, str) else tuple(keep_fp32)


def quantized(profile: Profile, names: Iterable[str]) -> Profile:
    """The profile of the same step with the optimizer states of these parameters in 8 bits."""
    sizes, states = dict(profile.parameters), _states(profile)
    chosen = {name: states[name] for name in names if name in states}
    if not chosen:
        return profile
    storages = list(profile.storages)
    for name, indices in chosen.items():
        for i in indices:
            storages[i] = replace(storages[i], num_bytes=coded_bytes(sizes[name]))
    step_at = next((op.at for op in profile.ops if op.phase is Phase.STEP), profile.ends_at)
    temporaries = _temporaries(profile, set(chosen), step_at)
    for i, s in enumerate(storages):
        if s.birth >= step_at and s.kind is Kind.TEMPORARY:
            storages[i] = replace(s, num_bytes=0)
    num_states = max(len(indices) for indices in chosen.values())
    work = work_bytes(max(sizes[name] for name in chosen), num_states)
    if step_at < profile.ends_at:
        storages.append(Storage(work + temporaries, Kind.STAGING, step_at, profile.ends_at, "8-bit states"))
    num_coded = sum(sizes[name] * len(indices) for name, indices in chosen.items())
    ops = list(profile.ops)
    if ops:
        ops[-1] = replace(ops[-1], seconds=ops[-1].seconds + _CODEC_BYTES * num_coded / profile.rates.bytes_per_s)
    return replace(profile, storages=tuple(storages), ops=tuple(ops))


def saved_bytes(profile: Profile, names: Iterable[str]) -> int:
    """What 8-bit states of these parameters take less than those that the profile has."""
    before, after = profile.storages, quantized(profile, names).storages
    return sum(a.num_bytes - b.num_bytes for a, b in zip(before, after, strict=False) if a.kind is Kind.OPTIMIZER_STATE)


def _states(profile: Profile) -> dict[str, list[int]]:
    """The storages of each parameter's states that have an entry for each of its elements."""
    sizes = dict(profile.parameters)
    found: dict[str, list[int]] = {}
    for i, s in enumerate(profile.storages):
        if s.kind is Kind.OPTIMIZER_STATE and s.num_bytes in [item * sizes.get(s.module, 0) for item in _ITEM_BYTES]:
            found.setdefault(s.module, []).append(i)
    return found


def _temporaries(profile: Profile, chosen: set[str], step_at: int) -> int:
    """Temporaries of a step whose largest part is a tile, or all that is stepped as it was."""
    plain = most_at_once(profile, step_at)
    stepped = {name: numel for name, numel in profile.parameters if name in _states(profile)}
    if not plain or not stepped:
        return plain
    tile = max(min(TILE, stepped[name]) for name in chosen)
    rest = [numel for name, numel in stepped.items() if name not in chosen]
    if any("._foreach_" in op.key.op for op in profile.ops if op.phase is Phase.STEP):  # all parameters at once
        return min(plain, -(-plain * max(tile, sum(rest)) // sum(stepped.values())))
    return min(plain, -(-plain * max(tile, *rest, 0) // max(stepped.values())))
