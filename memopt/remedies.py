"""What would help where a budget does not fit or is slow: each change is profiled and planned again, never guessed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace

import torch

from memopt.api import EXACT, plan, profile_workload
from memopt.errors import InfeasibleBudgetError, MemoptError
from memopt.policies.quantize import quantizable, quantized
from memopt.policies.solve import least_peak_bytes
from memopt.profiler.hardware import Hardware
from memopt.profiler.profile import Profile
from memopt.quant.optimizer import codecs_of
from memopt.target import Target
from memopt.workload import Workload

QUANTIZE = 'optimizer states in 8 bits: allow "quantize" (changes their numbers)'
IS_SLOW = 1.10  # a slowdown from which on changes are looked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One change to the workload and what it was found to do."""

    change: str
    plain_peak_bytes: int
    smallest_bytes: int
    slowdown: float | None  # of its plan under the same budget against its own plain step; None: it does not fit


@dataclass(frozen=True, slots=True)
class Means:
    """What a plan may use, as `memopt.plan` takes it."""

    allow: Set[str] | None = None
    nvme: str | None = None


def remedies(
    target: Target,
    facts: Profile,
    budget_bytes: int,
    means: Means,
    hardware: Hardware | None,
    progress: Callable[[str], None],
) -> tuple[Remedy, ...]:
    """Changes to the target's workload, each with what it was found to do; none for a saved profile.

    `facts` is the profile of the workload as it is.
    """
    if target.workload is None:
        return ()
    found = []
    if target.workload.optimizer is not None and "quantize" not in (means.allow or ()):
        progress("trying 8-bit optimizer states")
        with contextlib.suppress(MemoptError):
            codecs_of(target.workload.optimizer)
            allow = (frozenset(means.allow) if means.allow is not None else EXACT) | {"quantize"}
            if means.nvme is None:
                allow -= {"offload"}
            found.append(_remedy(QUANTIZE, facts, budget_bytes, replace(means, allow=allow)))
    for change, make in _changes(target, target.workload):
        progress(f"trying {change}")
        try:
            found.append(_remedy(change, profile_workload(make(), "fake", hardware), budget_bytes, means))
        except (MemoptError, RuntimeError, ValueError):
            continue  # a change that this model does not stand is no remedy
    return tuple(found)


def _remedy(change: str, facts: Profile, budget_bytes: int, means: Means) -> Remedy:
    coded = quantizable(facts) if "quantize" in (means.allow or ()) else ()
    smallest_bytes, slowdown = least_peak_bytes(quantized(facts, coded)), None
    try:
        forecast = plan(facts, budget_bytes, means.allow, nvme=means.nvme).forecast
        slowdown, smallest_bytes = forecast.slowdown, min(smallest_bytes, forecast.peak_bytes)
    except InfeasibleBudgetError as e:
        smallest_bytes = min(smallest_bytes, e.smallest_bytes)
    return Remedy(
        change=change,
        plain_peak_bytes=facts.peak_bytes,
        smallest_bytes=smallest_bytes,
        slowdown=slowdown,
    )


def _changes(target: Target, workload: Workload) -> Iterator[tuple[str, Callable[[], Workload]]]:
    batch, rebatched = target.batch, target.rebatched
    if rebatched is not None and batch is not None and batch >= 2:
        half, twice = batch // 2, 2 * workload.micro_batches
        yield f"batch {half} instead of {batch}", lambda: rebatched(half)
        if batch % 2 == 0:
            yield (
                f"batch {half}, accumulated {twice} times per optimizer step",
                lambda: replace(rebatched(half), micro_batches=twice),
            )
    optimizer = workload.optimizer
    if optimizer is None:
        return
    is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
    if is_adam and not any(group.get("fused") for group in optimizer.param_groups):
        yield f"fused {type(optimizer).__name__} (fused=True)", lambda: _with_fused(workload, type(optimizer))
    if type(optimizer) is not torch.optim.SGD:
        yield (
            f"SGD without momentum instead of {type(optimizer).__name__} (changes the training)",
            lambda: replace(workload, optimizer=torch.optim.SGD(_parameters(optimizer))),
        )


def _with_fused(workload: Workload, kind: type[torch.optim.Optimizer]) -> Workload:
    assert workload.optimizer is not None
    make: Callable[..., torch.optim.Optimizer] = kind
    return replace(workload, optimizer=make(_parameters(workload.optimizer), fused=True))


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
