"""The command line: `memopt report`, `memopt calibrate` and `memopt demo`.

Results go to stdout, progress and errors to stderr. Exit codes of a report: 0 fits, 2 usage or the user's own code,
3 does not fit, 4 unsupported. The demo: 0, or 1 if a number differs or a peak is over its budget.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from memopt import __version__
from memopt.api import check_levers, plan, profile, smallest_budget_bytes
from memopt.calibrate import assumed, calibrate
from memopt.demo import Shape, run_demo
from memopt.errors import InfeasibleBudgetError, MemoptError, UnsupportedError
from memopt.profiler.calibration import save_calibration
from memopt.profiler.hardware import Hardware, hardware_named
from memopt.profiler.profile import Profile
from memopt.remedies import IS_SLOW, Means, Remedy, remedies
from memopt.report import (
    Findings,
    calibration_report,
    calibration_to_json,
    demo_report,
    demo_to_json,
    findings,
    report,
    to_json,
)
from memopt.target import DtypeChoice, OptimizerChoice, Options, Target, TargetError, load_target, users_line
from memopt.units import parse_budget

DIFFERS, USAGE, DOES_NOT_FIT, UNSUPPORTED = 1, 2, 3, 4

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Trains a PyTorch model under a budget in bytes, at the smallest slowdown and with the same numbers.",
)


class Mode(StrEnum):
    """How a step is profiled."""

    FAKE = "fake"
    RUN = "run"


def main() -> None:
    """Entry point of the command `memopt`."""
    app()


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"memopt {__version__}")
        raise typer.Exit


@app.callback()
def _memopt(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command("report")
def report_command(
    target: Annotated[
        str,
        typer.Argument(
            help="module:factory or path/file.py:factory (a memopt.Workload, a dict of its fields or a module), "
            "a transformers config.json, or a profile that --save-profile wrote."
        ),
    ],
    budget: Annotated[
        str | None, typer.Option(help='"6GiB", "6GB" (they differ), "80%" of the device, or "min".')
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size; for a factory with such a parameter.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Sequence length; likewise.")] = None,
    optimizer: Annotated[
        OptimizerChoice | None, typer.Option(help="In place of the target's own; adamw for a config.json.")
    ] = None,
    dtype: Annotated[DtypeChoice | None, typer.Option(help="Of the parameters; by default the config's own.")] = None,
    micro_batches: Annotated[int | None, typer.Option(min=1, help="Backward calls per optimizer step.")] = None,
    mode: Annotated[
        Mode, typer.Option(help="fake: nothing is allocated. run: train a copy for two steps.")
    ] = Mode.FAKE,
    hardware: Annotated[str | None, typer.Option(help='Whose speed to assume: "h100", "rtx4090", "cpu", ...')] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help='Lever to allow, may be repeated: "recompute", "offload", "quantize"; "none" for the plain step.'
        ),
    ] = None,
    nvme: Annotated[
        Path | None, typer.Option(help="Directory on a disk for model state and activations that are offloaded.")
    ] = None,
    advice: Annotated[bool, typer.Option(help="Try what would help if it is slow or does not fit.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")] = False,
    save_profile: Annotated[Path | None, typer.Option(help="Write the profile here, as JSON.")] = None,
    save_plan: Annotated[Path | None, typer.Option(help="Write the plan here, as JSON.")] = None,
) -> None:
    """Say before anything is allocated what a training step needs and what it takes to fit a budget."""
    with _exit_codes(), _Progress() as progress:
        if save_plan is not None and budget is None:
            raise TargetError("--save-plan needs --budget: without one there is no plan")
        speed = hardware_named(hardware) if hardware is not None else None
        levers = None if allow is None else {lever for lever in allow if lever != "none"}
        where = None if nvme is None else str(nvme)
        check_levers(levers, where, None)
        options = Options(batch=batch, seq=seq, optimizer=optimizer, dtype=dtype, micro_batches=micro_batches)
        with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints is no part of the report
            progress(f"loading {target}")
            found = load_target(target, options)
            if budget is not None and budget.strip().lower() != "min":
                _check_budget(budget)
            facts = _profile_of(found, mode, hardware, progress)
            if save_profile is not None:
                facts.save(save_profile)
            told = _planned(found, facts, budget, Means(levers, where), speed, advice, progress)
        if save_plan is not None and told.plan is not None:
            told.plan.save(save_plan)
    _show(to_json(told) if as_json else report(told))
    if told.fits is False:
        raise typer.Exit(DOES_NOT_FIT)


def _check_budget(budget: str) -> None:
    """Raise for a budget that can't be read, before a long profile: a percentage is of a device that comes later."""
    parse_budget(budget, 2**40)


def _profile_of(found: Target, mode: Mode, hardware: str | None, progress: Callable[[str], None]) -> Profile:
    if found.profile is not None:
        if mode is Mode.RUN or hardware is not None:
            raise TargetError(
                f"{found.name} is a finished profile: --mode and --hardware would need the workload itself"
            )
        return found.profile
    assert found.workload is not None
    progress("profiling one step" + (" (for real, on a copy)" if mode is Mode.RUN else ""))
    try:
        return profile(found.workload, mode=mode.value, hardware=hardware)
    except MemoptError:
        raise
    except Exception as e:  # the step itself, when it is run for real
        raise TargetError(f"the step of {found.name} fails at {users_line(e)}") from e


def _planned(
    found: Target,
    facts: Profile,
    budget: str | None,
    means: Means,
    speed: Hardware | None,
    advice: bool,
    progress: Callable[[str], None],
) -> Findings:
    """The findings with a plan if one fits, and with what would help if none does or it is slow."""
    notes = []
    if speed is not None and speed.name != "cpu" and facts.device == "cpu":
        notes.append(f"op times are those of {speed.name}; bytes are counted as torch allocates them on the CPU")
    smallest_bytes = facts.min_bytes
    if means.nvme is not None or "quantize" in (means.allow or ()):
        smallest_bytes = smallest_budget_bytes(facts, means.allow, nvme=means.nvme, progress=progress)
    if budget is None:
        return findings(found.name, found.about, facts, smallest_bytes=smallest_bytes, notes=tuple(notes))
    device_bytes = (speed.memory_bytes or None) if speed is not None else None
    made = None
    progress("planning")
    try:
        wanted = smallest_bytes if means.nvme is not None and budget.strip().lower() == "min" else budget
        made = plan(facts, wanted, means.allow, nvme=means.nvme, device_bytes=device_bytes, progress=progress)
        budget_bytes, smallest_bytes = made.budget_bytes, min(smallest_bytes, made.forecast.peak_bytes)
    except InfeasibleBudgetError as e:
        budget_bytes, smallest_bytes = e.budget_bytes, min(smallest_bytes, e.smallest_bytes)
    tried: tuple[Remedy, ...] = ()
    if advice and (made is None or made.forecast.slowdown >= IS_SLOW):
        tried = remedies(found, facts, budget_bytes, means, speed, progress)
    return findings(
        found.name,
        found.about,
        facts,
        budget_bytes=budget_bytes,
        plan=made,
        smallest_bytes=smallest_bytes,
        remedies=tried,
        notes=tuple(notes),
    )


@app.command("calibrate")
def calibrate_command(
    nvme: Annotated[
        Path | None, typer.Option(help="Directory whose disk is measured too: the one that offload is to use.")
    ] = None,
    device: Annotated[str, typer.Option(help='"cpu" or "cuda".')] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")] = False,
) -> None:
    """Measure this machine, so that forecasts and plans made here are for it. Some seconds; best while it is idle."""
    with _exit_codes(), _Progress() as progress:
        found = calibrate(device, None if nvme is None else str(nvme.absolute()), progress=progress)
        path = save_calibration(found)
    _show(calibration_to_json(found, path) if as_json else calibration_report(found, assumed(found), path))


@app.command("demo")
def demo_command(
    steps: Annotated[int, typer.Option(min=3, help="Training steps of each run.")] = Shape().steps,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")] = False,
) -> None:
    """Train a small GPT plainly and under budgets of 70% and 45% of its peak, and compare numbers, memory and time."""
    with _exit_codes(), _Progress() as progress:
        result = run_demo(Shape(steps=steps), progress)
    _show(demo_to_json(result) if as_json else demo_report(result))
    if not result.is_good:
        raise typer.Exit(DIFFERS)


def _show(what: dict[str, Any] | RenderableType) -> None:
    if isinstance(what, dict):
        typer.echo(json.dumps(what))
        return
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console = Console(file=sys.stdout, width=120)  # a pipe has no width of its own: 80 would fold the tables
    console.print(what, crop=False)  # a path is of use only whole


class _Progress:
    """The line on stderr that says what is being done; where stderr is no terminal, a line for each stage.

    No thread draws it: the profiler forks, and a child must not inherit a lock that another thread holds.
    """

    def __init__(self) -> None:
        self.is_terminal = sys.stderr.isatty()
        self.stage = ""

    def __enter__(self) -> Callable[[str], None]:
        return self.tell

    def tell(self, text: str) -> None:
        stage = text.partition(",")[0]
        if self.is_terminal:
            sys.stderr.write(f"\r\x1b[K{text[:100]} ...")
        elif stage != self.stage:
            sys.stderr.write(f"memopt: {stage}\n")
        self.stage = stage
        sys.stderr.flush()

    def __exit__(self, *exception: object) -> None:
        if self.is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


@contextlib.contextmanager
def _exit_codes() -> Iterator[None]:
    """Turn what memopt refuses, and what files refuse, into a line on stderr and an exit code."""
    try:
        yield
    except InfeasibleBudgetError as e:
        code, error = DOES_NOT_FIT, str(e)
    except UnsupportedError as e:
        code, error = UNSUPPORTED, str(e)
    except (MemoptError, ValueError, OSError) as e:
        code, error = USAGE, str(e)
    else:
        return
    typer.echo(f"memopt: error: {' '.join(error.split())}", err=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    main()
