"""A profile and a plan as tables and as JSON: the numbers are worked out once, in `findings`, and shown twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memopt.offload.sizes import stored_bytes
from memopt.policies.plan import Forecast, Plan
from memopt.policies.solve import Found, Solver
from memopt.profiler.profile import Kind, OpKey, Profile
from memopt.units import format_bytes, format_bytes_up

if TYPE_CHECKING:
    from pathlib import Path

    from memopt.demo import Result
    from memopt.profiler.calibration import Calibration
    from memopt.profiler.hardware import Hardware
    from memopt.remedies import Remedy

NUM_MODULES = 10

# Kinds in the order of the tables; what a forecast has beyond them comes after.
_LABELS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "optimizer state": "optimizer states",
    "activation": "activations",
    "recomputed": "activations, recomputed",
    "temporary": "temporaries",
    "staging buffer": "staging buffers",
    "input": "inputs",
    "kernel scratch": "kernel scratch",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleShare:
    """A group of like modules, `model.layers.*.mlp`: its parameters, and its activations when the forward ends."""

    module: str
    num_modules: int
    parameter_bytes: int
    activation_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DropGroup:
    """Drops in a group of like modules: how many of each op, their bytes, and the seconds to make them again once."""

    module: str
    num_modules: int  # that drop something
    of_modules: int
    ops: Mapping[str, int]
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskShare:
    """What of one kind a plan keeps on the disk: how many tensors, and their bytes there. Small ones stay in memory."""

    kind: str
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that a report says. Without a budget there is no plan; with one that does not fit there is none either."""

    target: str
    about: str
    profile: Profile
    plain: Forecast
    modules: tuple[ModuleShare, ...]
    budget_bytes: int | None = None
    plan: Plan | None = None
    smallest_bytes: int
    drops: tuple[DropGroup, ...] = ()
    on_disk: tuple[DiskShare, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether a plan fits the budget, None without a budget."""
        return None if self.budget_bytes is None else self.plan is not None


def findings(
    target: str,
    about: str,
    profile: Profile,
    *,
    budget_bytes: int | None = None,
    plan: Plan | None = None,
    smallest_bytes: int | None = None,
    remedies: tuple[Remedy, ...] = (),
    notes: tuple[str, ...] = (),
) -> Findings:
    """What is to be told of a profile and, if there is one, its plan."""
    solver = Solver(profile)
    return Findings(
        target=target,
        about=about,
        profile=profile,
        plain=solver.forecast(Found(frozenset(), solver.plain)),
        modules=module_shares(profile, solver),
        budget_bytes=budget_bytes,
        plan=plan,
        smallest_bytes=smallest_bytes if smallest_bytes is not None else profile.min_bytes,
        drops=drop_groups(profile, plan) if plan is not None else (),
        on_disk=disk_shares(profile, plan) if plan is not None else (),
        remedies=remedies,
        notes=(*profile.notes, *notes),
    )


def module_group(module: str) -> str:
    """The group that a module is shown in: numbers become `*`, and names end one part after the last number.

    `model.layers.3.mlp.up_proj` is in `model.layers.*.mlp`, `encoder.embed.tokens` in `encoder.embed`.
    """
    return ".".join("*" if part.isdigit() else part for part in _kept_parts(module)) or "(root)"


def _kept_parts(module: str) -> list[str]:
    parts = module.split(".") if module else []
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=None)
    return parts[:2] if last is None else parts[: last + 2]


def module_shares(profile: Profile, solver: Solver) -> tuple[ModuleShare, ...]:
    """The groups of modules with the most bytes of their own, the largest first."""
    parameters: Counter[str] = Counter()
    members: dict[str, set[str]] = {}
    for storage in profile.storages:
        if storage.kind is Kind.PARAMETER:
            module = storage.module.rpartition(".")[0]
            parameters[module_group(module)] += storage.num_bytes
            members.setdefault(module_group(module), set()).add(".".join(_kept_parts(module)))
    at_forward_end = replace(solver.plain, peak_at=max(0, profile.forward_ends_at))
    activations: Counter[str] = Counter()
    for module, num_bytes in solver.simulator.by_module(frozenset(), at_forward_end, depth=1000).items():
        name = "" if module == "(root)" else module
        activations[module_group(name)] += num_bytes
        members.setdefault(module_group(name), set()).add(".".join(_kept_parts(name)))
    shares = [
        ModuleShare(
            module=group,
            num_modules=len(members[group]),
            parameter_bytes=parameters[group],
            activation_bytes=activations[group],
        )
        for group in members
    ]
    return tuple(sorted(shares, key=lambda s: (-s.parameter_bytes - s.activation_bytes, s.module)))


def drop_groups(profile: Profile, plan: Plan) -> tuple[DropGroup, ...]:
    """What a plan drops by group of modules, the most bytes first."""
    ops = {op.key: op for op in profile.ops}
    everywhere: dict[str, set[str]] = {}
    for key in ops:
        everywhere.setdefault(module_group(key.module), set()).add(".".join(_kept_parts(key.module)))
    found: dict[str, list[tuple[OpKey, int, float]]] = {}
    for drop in plan.drops:
        op = ops.get(drop.key)
        num_bytes, seconds = 0, 0.0
        if op is not None:
            made = dict(zip(op.positions, op.makes, strict=True))
            values = [profile.values[made[p]] for p in drop.positions if p in made]
            num_bytes = sum(profile.storages[v.storage].num_bytes for v in values)
            seconds = op.seconds
        found.setdefault(module_group(drop.key.module), []).append((drop.key, num_bytes, seconds))
    groups = [
        DropGroup(
            module=group,
            num_modules=len({".".join(_kept_parts(key.module)) for key, _, _ in rows}),
            of_modules=max(len(everywhere.get(group, ())), 1),
            ops=dict(Counter(op_name(key.op) for key, _, _ in rows).most_common()),
            num_bytes=sum(num_bytes for _, num_bytes, _ in rows),
            seconds=sum(seconds for _, _, seconds in rows),
        )
        for group, rows in found.items()
    ]
    return tuple(sorted(groups, key=lambda g: (-g.num_bytes, g.module)))


def disk_shares(profile: Profile, plan: Plan) -> tuple[DiskShare, ...]:
    """What a plan keeps on the disk, by kind; together `plan.forecast.store_bytes`."""
    names = {
        Kind.PARAMETER: {a.name for a in plan.away if a.parameter},
        Kind.GRADIENT: {a.name for a in plan.away if a.gradient},
        Kind.OPTIMIZER_STATE: {a.name for a in plan.away if a.states},
    }
    sizes: dict[Kind, list[int]] = {kind: [] for kind in (*names, Kind.ACTIVATION)}
    for s in profile.storages:
        if s.kind in names and s.module in names[s.kind]:
            sizes[s.kind].append(stored_bytes(s.num_bytes))
    ops = {op.key: op for op in profile.ops}
    for move in plan.moves:
        if (op := ops.get(move.key)) is not None:
            made = dict(zip(op.positions, op.makes, strict=True))
            values = [profile.values[made[p]] for p in move.positions if p in made]
            sizes[Kind.ACTIVATION] += [stored_bytes(profile.storages[v.storage].num_bytes) for v in values]
    return tuple(
        DiskShare(kind=kind.value, num_tensors=sum(map(bool, found)), num_bytes=sum(found))
        for kind, found in sizes.items()
        if any(found)
    )


def op_name(op: str) -> str:
    """The short name of an overload: `aten.mm.default` is `mm`, and another library's keeps its namespace."""
    namespace, _, rest = op.partition(".")
    name = rest.partition(".")[0] or op
    return name if namespace == "aten" else f"{namespace}::{name}"


# Tables


def report(found: Findings) -> RenderableType:
    """All tables of a report, one below the other."""
    parts: list[RenderableType] = [_head(found), plain_table(found), modules_table(found)]
    if found.plan is not None:
        parts.append(plan_table(found.plan))
        if found.drops:
            parts.append(drops_table(found.drops))
        if found.on_disk:
            parts.append(disk_table(found.plan, found.on_disk))
            parts.append(Text(f"kept under {found.plan.nvme}", no_wrap=True, overflow="ignore"))
    if found.remedies:
        parts.append(remedies_table(found))
    parts.append(verdict(found))
    parts += [Text(f"note: {note}", style="dim") for note in found.notes]
    return Group(*parts)


def _head(found: Findings) -> Text:
    p = found.profile
    how = "op times measured" if p.mode == "run" else f"nothing allocated, op times by roofline, {p.hardware}"
    return Text.assemble((found.about, "bold"), f"\nmemory as on {p.device}; {how}; {len(p.ops)} ops\n")


def plain_table(found: Findings) -> Table:
    """What the plain step holds at its peak, by kind."""
    table = _table("Plain step at its peak", "what", "bytes", "share")
    total = found.plain.peak_bytes
    for label, num_bytes in _by_kind(found.plain.breakdown):
        table.add_row(label, format_bytes(num_bytes), _percent(num_bytes, total))
    table.add_section()
    table.add_row(f"peak ({found.plain.peak_at})", format_bytes(total), "100%", style="bold")
    return table


def modules_table(found: Findings) -> Table:
    """The largest groups of modules."""
    table = _table("Largest modules", "module", "modules", "parameters", "activations for backward")
    for share in found.modules[:NUM_MODULES]:
        table.add_row(
            share.module,
            str(share.num_modules),
            format_bytes(share.parameter_bytes),
            format_bytes(share.activation_bytes),
        )
    if rest := found.modules[NUM_MODULES:]:
        table.add_row(
            f"{len(rest)} others",
            str(sum(s.num_modules for s in rest)),
            format_bytes(sum(s.parameter_bytes for s in rest)),
            format_bytes(sum(s.activation_bytes for s in rest)),
        )
    return table


def plan_table(plan: Plan) -> Table:
    """Budget and forecast: peak by kind beside the plain step's, where it is, and the step time."""
    f = plan.forecast
    table = _table(f"Plan for {format_bytes(plan.budget_bytes)}", "forecast", "value", "of the budget")
    for label, num_bytes in _by_kind(f.breakdown):
        table.add_row(label, format_bytes(num_bytes), _percent(num_bytes, plan.budget_bytes))
    table.add_section()
    of_budget = _percent(f.peak_bytes, plan.budget_bytes)
    table.add_row(f"peak ({f.peak_at})", format_bytes(f.peak_bytes), of_budget, style="bold")
    table.add_row(
        "  plain step's peak", format_bytes(f.plain_peak_bytes), _percent(f.plain_peak_bytes, plan.budget_bytes)
    )
    table.add_row("step time", f"{_seconds(f.step_s)}", f"x{f.slowdown:.2f}")
    table.add_row("  plain step's", f"{_seconds(f.plain_step_s)}", "")
    table.add_row("gap to the best possible", f"at most {100 * plan.gap:.1f}%", "")
    return table


def drops_table(groups: Iterable[DropGroup]) -> Table:
    """What is dropped in the forward and recomputed in backward."""
    table = _table("Recomputed in backward", "module", "in", "ops", "bytes", "time")
    for group in groups:
        ops = ", ".join(f"{name} x{num}" if num > 1 else name for name, num in group.ops.items())
        table.add_row(
            group.module,
            f"{group.num_modules} of {group.of_modules}",
            ops,
            format_bytes(group.num_bytes),
            _seconds(group.seconds),
        )
    return table


def disk_table(plan: Plan, shares: Iterable[DiskShare]) -> Table:
    """What is on the disk between uses, what a step moves, and what of the step's time each lever takes."""
    f = plan.forecast
    table = _table("On disk", "what", "tensors", "value", "of the plain step")
    for share in shares:
        table.add_row(_LABELS.get(share.kind, share.kind), str(share.num_tensors), format_bytes(share.num_bytes), "")
    table.add_section()
    table.add_row("room taken", "", format_bytes(f.store_bytes), "", style="bold")
    table.add_row("read in a step", "", format_bytes(f.read_bytes), "")
    table.add_row("written in a step", "", format_bytes(f.written_bytes), "")
    table.add_row("disk is busy", "", _seconds(f.lane_s), _share(f.lane_s, f.plain_step_s))
    table.add_section()
    for cause, seconds in _added_s(f):
        table.add_row(cause, "", _seconds(seconds), f"+{_share(seconds, f.plain_step_s)}")
    return table


def _added_s(f: Forecast) -> list[tuple[str, float]]:
    """What a step takes beside the plain step's time, by cause."""
    waits = [(f"waiting for the disk, {phase}", seconds) for phase, seconds in f.stalls_s.items()]
    return [(cause, seconds) for cause, seconds in [("recomputation", f.recompute_s), *waits] if seconds > 0]


def remedies_table(found: Findings) -> Table:
    """Changes that were profiled and planned again."""
    table = _table("What would help (profiled again)", "change", "plain peak", "smallest budget", "under this budget")
    for remedy in found.remedies:
        table.add_row(
            remedy.change,
            format_bytes(remedy.plain_peak_bytes),
            format_bytes_up(remedy.smallest_bytes),
            "does not fit" if remedy.slowdown is None else f"fits, x{remedy.slowdown:.2f}",
        )
    return table


def verdict(found: Findings) -> Text:
    """One line: whether it fits, and the smallest budget that does."""
    smallest = f"the smallest budget is {format_bytes_up(found.smallest_bytes)} ({found.smallest_bytes} B)"
    if found.budget_bytes is None:
        return Text(f"No budget given: {smallest}; the plain step needs {format_bytes_up(found.plain.peak_bytes)}.")
    budget = format_bytes(found.budget_bytes)
    if found.plan is None:
        return Text(f"Does not fit {budget}: {smallest}.", style="bold red")
    if found.plan.is_plain:
        return Text(f"Fits {budget} as it is: nothing to recompute; {smallest}.", style="bold green")
    f = found.plan.forecast
    return Text(f"Fits {budget} at x{f.slowdown:.2f} of the step time; {smallest}.", style="bold green")


def demo_report(result: Result) -> RenderableType:
    """The demo's runs side by side."""
    s = result.shape
    table = _table(
        f"GPT of {result.num_parameters / 1e6:.1f}M parameters, batch {s.batch} x {s.seq}, {s.steps} steps, "
        f"{result.num_threads} threads",
        "budget",
        "bytes",
        "forecast peak",
        "measured peak",
        "step",
        "step ratio",
        "forecast",
        "recomputed",
        "equal",
    )
    for row in result.rows:
        table.add_row(
            row.name,
            "-" if row.budget_bytes is None else format_bytes(row.budget_bytes),
            format_bytes(row.forecast_bytes),
            Text(format_bytes(row.measured_bytes), style="" if row.is_within else "bold red"),
            _seconds(row.step_s),
            f"x{row.slowdown:.2f}",
            f"x{row.forecast_slowdown:.2f}",
            str(row.num_recomputed),
            Text("-" if row.budget_bytes is None else "yes" if row.is_equal else "NO"),
        )
    losses = result.rows[0].losses
    return Group(
        table,
        Text(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; budgets are shares of the plain run's measured peak"),
        Text("equal: every loss and the final weights are those of the plain run, bit for bit"),
        Text("good: equal numbers, every peak within its budget", style="bold green")
        if result.is_good
        else Text("NOT good: see the table", style="bold red"),
    )


def calibration_report(found: Calibration, assumed: Hardware, path: Path) -> RenderableType:
    """What was measured beside what the catalogue assumes."""
    h = found.hardware
    table = _table(
        f"{found.device} of {found.host}, {found.num_threads} threads, torch {found.torch_version}",
        "what",
        "measured",
        "catalogue",
    )
    rows = [
        ("float32 matrix products", "flops_per_s", "GFLOP/s"),
        ("bfloat16 matrix products", "half_flops_per_s", "GFLOP/s"),
        ("memory, element-wise ops", "bytes_per_s", "GB/s"),
        ("memory, gelu and exp", "transcendental_bytes_per_s", "GB/s"),
        ("op, launched", "launch_s", "us"),
        ("op, recorded", "record_s", "us"),
        ("op, replayed", "replay_s", "us"),
    ]
    if h.h2d_bytes_per_s:
        rows += [("pinned host to device", "h2d_bytes_per_s", "GB/s"), ("device to host", "d2h_bytes_per_s", "GB/s")]
    disk = [
        ("disk, read", "disk_read_bytes_per_s", "GB/s"),
        ("disk, written", "disk_write_bytes_per_s", "GB/s"),
        ("disk, both at once, in total", "disk_mixed_bytes_per_s", "GB/s"),
    ]
    for what, name, unit in rows:
        table.add_row(what, _rate(getattr(h, name), unit), _rate(getattr(assumed, name), unit))
    table.add_section()
    for what, name, unit in disk:
        measured = "not measured" if found.nvme is None else _rate(getattr(h, name), unit)
        table.add_row(what, measured, _rate(getattr(assumed, name), unit))
    parts: list[RenderableType] = [table]
    if found.nvme is None:
        parts.append(Text("The disk's rates are assumed: give --nvme PATH to measure the one that offload would use."))
    parts.append(
        Text(
            f"Profiles on this machine with {found.num_threads} threads use it from now on; it is kept in\n{path}",
            no_wrap=True,
            overflow="ignore",
        )
    )
    parts += [Text(f"note: {note}", style="dim") for note in found.notes]
    return Group(*parts)


def _rate(value: float, unit: str) -> str:
    if value == 0 and unit != "us":
        return "-"
    return f"{value * 1e6:.1f} {unit}" if unit == "us" else f"{value / 1e9:.2f} {unit}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=Text(title), title_justify="left", title_style="bold", expand=False)
    for i, column in enumerate(columns):
        is_text = i == 0 or column in ("ops", "under this budget", "equal")
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    return table


def _by_kind(breakdown: Mapping[str, int]) -> list[tuple[str, int]]:
    order = [*_LABELS, *(kind for kind in breakdown if kind not in _LABELS)]
    return [(_LABELS.get(kind, kind), breakdown[kind]) for kind in order if breakdown.get(kind)]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"


def _share(seconds: float, whole_s: float) -> str:
    return f"{100 * seconds / whole_s:.0f}%" if whole_s > 0 else "-"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


# JSON


def to_json(found: Findings) -> dict[str, Any]:
    """The report as one object of numbers; its keys are part of the interface."""
    p, f = found.profile, found.plain
    return {
        "target": found.target,
        "about": found.about,
        "device": p.device,
        "hardware": p.hardware,
        "mode": p.mode,
        "micro_batches": p.micro_batches,
        "fits": found.fits,
        "budget_bytes": found.budget_bytes,
        "smallest_budget_bytes": found.smallest_bytes,
        "plain": {
            "peak_bytes": f.peak_bytes,
            "peak_at": f.peak_at,
            "step_s": f.step_s,
            "by_kind": f.breakdown,
            "modules": [asdict(share) for share in found.modules],
        },
        "plan": None if found.plan is None else _plan_json(found.plan, found.drops, found.on_disk),
        "remedies": [{**asdict(r), "fits": r.slowdown is not None} for r in found.remedies],
        "notes": list(found.notes),
    }


def _plan_json(plan: Plan, drops: Iterable[DropGroup], on_disk: Iterable[DiskShare]) -> dict[str, Any]:
    f = plan.forecast
    return {
        "peak_bytes": f.peak_bytes,
        "peak_at": f.peak_at,
        "by_kind": f.breakdown,
        "step_s": f.step_s,
        "plain_step_s": f.plain_step_s,
        "recompute_s": f.recompute_s,
        "slowdown": f.slowdown,
        "gap": plan.gap,
        "levers": list(plan.levers),
        "num_recomputed": len(plan.drops),
        "drops": [asdict(group) for group in drops],
        "disk": None if plan.nvme is None else _disk_json(plan, on_disk),
    }


def _disk_json(plan: Plan, on_disk: Iterable[DiskShare]) -> dict[str, Any]:
    f = plan.forecast
    return {
        "nvme": plan.nvme,
        "store_bytes": f.store_bytes,
        "by_kind": {share.kind: share.num_bytes for share in on_disk},
        "num_tensors": {share.kind: share.num_tensors for share in on_disk},
        "read_bytes": f.read_bytes,
        "written_bytes": f.written_bytes,
        "lane_s": f.lane_s,
        "stalls_s": f.stalls_s,
    }


def demo_to_json(result: Result) -> dict[str, Any]:
    """The demo's result as one object."""
    data = asdict(result)
    for row, found in zip(data["rows"], result.rows, strict=True):
        row["is_within"] = found.is_within
    return {**data, "is_good": result.is_good}


def calibration_to_json(found: Calibration, path: Path) -> dict[str, Any]:
    """A calibration as one object: what is kept, and where."""
    return {**found.to_json(), "path": str(path)}
