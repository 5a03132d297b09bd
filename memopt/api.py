"""`profile` and `plan`: from a workload to facts, from facts and a budget to a plan."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

import psutil
import torch

from memopt.errors import FakeStepError, InfeasibleBudgetError, UnsupportedError
from memopt.policies.offload import OffloadSolver
from memopt.policies.plan import Plan
from memopt.policies.quantize import quantizable, quantized
from memopt.policies.solve import Progress, Solver, least_peak_bytes
from memopt.profiler.hardware import Hardware, hardware_named
from memopt.profiler.profile import Profile
from memopt.profiler.step import profile_step
from memopt.state import check_directory, check_room
from memopt.units import parse_budget
from memopt.workload import Workload, own_loss

logger = logging.getLogger("memopt")

Budget = int | str | Callable[[Profile], int]

LEVERS = frozenset({"recompute", "offload", "shard", "quantize"})
AVAILABLE = frozenset({"recompute", "offload", "quantize"})
EXACT = AVAILABLE - {"quantize"}  # the default: no plan of these changes a number
NONFINITE = ("skip", "raise")

# Small scratch that no rule covers (threads' partial sums and the like): room for it is part of every forecast.
SCRATCH_SHARE = 0.002


def profile(workload: Workload, mode: str = "fake", hardware: str | None = None) -> Profile:
    """What one training step of `workload` keeps in memory and for how long.

    Args:
        mode: "fake" runs the step on fake tensors: nothing is allocated, times come from a roofline. "run" trains a
            copy of the model for two steps and measures each op; it needs room for the copy.
        hardware: a name from the catalogue ("h100", "cpu") for the roofline; by default the model's device, as
            `memopt calibrate` measured it if it did.

    If fake tensors can't follow the step (it depends on the values of its data, or an op has no fake form), a real one
    is profiled instead, and a note says so. Raises UnsupportedError for what can't be profiled, ValueError for bad
    arguments.
    """
    if not isinstance(workload, Workload):
        raise ValueError(f"profile takes a memopt.Workload, not {type(workload).__name__}")
    if mode not in ("fake", "run"):
        raise ValueError(f'mode must be "fake" or "run", not {mode!r}')
    named = hardware_named(hardware) if hardware is not None else None
    try:
        found = profile_workload(workload, mode, named)
    except FakeStepError as e:
        if any(p.is_meta for p in workload.model.parameters()):
            raise
        logger.warning("memopt: %s. Profiling a real step on a copy of the model instead.", e)
        found = profile_workload(workload, "run", named)
        found = replace(found, notes=(*found.notes, f"profiled for real: {e}"))
    return replace(found, min_bytes=least_peak_bytes(found))


def profile_workload(workload: Workload, mode: str, hardware: Hardware | None) -> Profile:
    """A profile with its plain peak; `min_bytes` is not worked out yet."""
    return with_peak(
        profile_step(
            workload.model,
            workload.args,
            workload.kwargs,
            workload.loss or own_loss,
            workload.optimizer,
            mode=mode,
            hardware=hardware,
            micro_batches=workload.micro_batches,
        )
    )


def with_peak(found: Profile) -> Profile:
    """The profile with the plain step's simulated peak and the kernels' scratch."""
    plain = Solver(found).plain
    scratch = int(SCRATCH_SHARE * plain.peak_bytes)
    return replace(found, peak_bytes=plain.peak_bytes + scratch, scratch_bytes=scratch)


def plan(
    profile: Profile,
    budget: Budget,
    allow: Iterable[str] | None = None,
    *,
    nvme: str | None = None,
    host_budget: int | str | None = None,
    keep_fp32: str | Iterable[str] = (),
    nonfinite: str = "skip",
    device_bytes: int | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The fastest plan found whose forecast peak is within `budget`.

    Args:
        budget: bytes; a text such as "24GiB" or "24GB"; "80%" of `device_bytes`; "min" for the least that can be
            reached; or a function from the profile to bytes.
        allow: levers that may be used, by default all that keep the numbers exact and can be used here: "recompute",
            and "offload" if `nvme` is given. "quantize" keeps optimizer states in 8 bits, which changes numbers.
        nvme: directory on a disk for model state that is offloaded; made if it is not there.
        host_budget: bytes of host memory for offload. On a CPU the host is the device, and `budget` holds for it.
        keep_fp32: names or patterns ("embed*") of parameters whose optimizer states stay as they are.
        nonfinite: with 8-bit states, what a step does that has a gradient which is NaN or infinite: "skip" leaves it
            out and says so, "raise" raises NonFiniteGradientError. Nothing is changed either way.
        device_bytes: memory of the target device, for a percentage; by default that of the device here, or the
            catalogue's.
        progress: called with a line of text now and then.

    Raises InfeasibleBudgetError if no plan fits, ValueError for a budget or lever that is not understood, StoreError if
    the disk has too little room.
    """
    levers = check_levers(allow, nvme, host_budget)
    check_nonfinite(nonfinite)
    _check_device(profile, nvme)
    is_min = isinstance(budget, str) and budget.strip().lower() == "min"
    budget_bytes = None if is_min else budget_in_bytes(profile, budget, device_bytes)
    nvme = nvme if "offload" in levers else None
    names = quantizable(profile, keep_fp32) if "quantize" in levers else ()
    solve = functools.partial(_solved, budget_bytes=budget_bytes, levers=levers, nvme=nvme, progress=progress)
    if names:
        made = _better(lambda: solve(profile), lambda: _quantized(profile, names, nonfinite, solve), is_min)
    else:
        made = solve(profile)
    if nvme is not None:
        check_room(nvme, made.forecast.store_bytes)
    return made


def _better(exact: Callable[[], Plan], coded: Callable[[], Plan], is_min: bool) -> Plan:
    """The faster plan of the two, or the smaller one. Raises the second's InfeasibleBudgetError if neither fits."""
    try:
        a = exact()
    except InfeasibleBudgetError:
        return coded()
    if a.is_plain and not is_min:
        return a  # nothing is faster than the plain step
    try:
        b = coded()
    except InfeasibleBudgetError:
        return a
    return min(a, b, key=lambda p: p.forecast.peak_bytes if is_min else p.forecast.step_s)


def _quantized(profile: Profile, names: tuple[str, ...], nonfinite: str, solve: Callable[[Profile], Plan]) -> Plan:
    """The fastest plan found with the optimizer states of these parameters in 8 bits; seconds are against plain."""
    made = solve(quantized(profile, names))
    forecast = replace(made.forecast, plain_peak_bytes=profile.peak_bytes, plain_step_s=profile.step_s)
    gap = max(0.0, 1 - profile.step_s / forecast.step_s) if forecast.step_s > 0 else 0.0
    levers = (*made.levers, "quantize")
    return replace(made, forecast=forecast, gap=gap, levers=levers, quantized=names, nonfinite=nonfinite)


def _solved(
    profile: Profile, budget_bytes: int | None, levers: frozenset[str], nvme: str | None, progress: Progress | None
) -> Plan:
    """The fastest plan found by recomputation and offload; without a budget the smallest."""
    solver = _solver(profile, levers, nvme, progress)
    if budget_bytes is None:
        budget_bytes = _least_bytes(solver, levers)
    if isinstance(solver, OffloadSolver):
        assert nvme is not None
        return solver.solve(budget_bytes, nvme)
    return solver.solve(budget_bytes) if "recompute" in levers else solver.solve_without_recompute(budget_bytes)


def _solver(
    profile: Profile, levers: frozenset[str], nvme: str | None, progress: Progress | None
) -> Solver | OffloadSolver:
    if nvme is not None:
        return OffloadSolver(profile, profile.rates, "recompute" in levers, progress)
    return Solver(profile, progress)


def _least_bytes(solver: Solver | OffloadSolver, levers: frozenset[str]) -> int:
    if isinstance(solver, OffloadSolver):
        return solver.least_bytes()
    return solver.peak_bytes(solver.least().outcome if "recompute" in levers else solver.plain)


def _check_device(profile: Profile, nvme: str | None) -> None:
    if nvme is not None and profile.device != "cpu":
        raise UnsupportedError(f"offload from {profile.device}", "this version offloads from the CPU's memory only")


def smallest_budget_bytes(
    profile: Profile, allow: Iterable[str] | None = None, *, nvme: str | None = None, progress: Progress | None = None
) -> int:
    """The least peak that a plan can reach: what `plan` takes "min" for. Raises as `plan` does."""
    levers = check_levers(allow, nvme, None)
    _check_device(profile, nvme)
    nvme = nvme if "offload" in levers else None
    names = quantizable(profile) if "quantize" in levers else ()
    profiles = [profile, quantized(profile, names)] if names else [profile]
    return min(_least_bytes(_solver(p, levers, nvme, progress), levers) for p in profiles)


def check_nonfinite(nonfinite: str) -> None:
    """Raise ValueError for a treatment of NaN and infinite gradients that does not exist."""
    if nonfinite not in NONFINITE:
        raise ValueError(f"nonfinite={nonfinite!r} is not known; known: {', '.join(NONFINITE)}")


def budget_in_bytes(profile: Profile, budget: Budget, device_bytes: int | None) -> int:
    """A budget other than "min" as a number of bytes."""
    value = budget(profile) if callable(budget) else budget
    return parse_budget(value, device_bytes or _device_bytes(profile))


def _device_bytes(profile: Profile) -> int | None:
    """Memory of the device that a profile is for, None if it is not known."""
    if profile.device == "cpu":
        return int(psutil.virtual_memory().total)
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)
    return profile.rates.memory_bytes or None


def check_levers(allow: Iterable[str] | None, nvme: str | None, host_budget: int | str | None) -> frozenset[str]:
    """The levers that may be used. Raises for those that do not exist, or that this version can't follow."""
    asked = None if allow is None else frozenset([allow] if isinstance(allow, str) else allow)
    if unknown := (asked or frozenset()) - LEVERS:
        raise ValueError(f"unknown levers {sorted(unknown)}; known: {sorted(LEVERS)}")
    if missing := (asked or frozenset()) - AVAILABLE:
        raise UnsupportedError(
            f"allow={sorted(asked or ())}",
            f"{sorted(missing)} can't be applied by this version; it has {sorted(AVAILABLE)}",
        )
    if asked is not None and "offload" in asked and nvme is None:
        raise ValueError('allow={"offload"} needs a directory on a disk: give nvme="/path"')
    if asked is not None and "offload" not in asked and nvme is not None:
        raise ValueError(f'nvme={nvme!r} is for offload, which allow={sorted(asked)} leaves out: add "offload"')
    if nvme is not None:
        check_directory(nvme)
    if host_budget is not None:
        parse_budget(host_budget, int(psutil.virtual_memory().total))
        if nvme is None:
            raise ValueError("host_budget= is for offload: give nvme= too")
    return asked if asked is not None else EXACT
