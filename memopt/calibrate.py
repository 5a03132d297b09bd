"""Measure this machine: how fast it computes, moves bytes, launches, records and replays ops, and what its disk does.

`profiler/calibration.py` keeps the result, and profiles from then on take their speeds from it.
"""

from __future__ import annotations

import copy
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import psutil
import torch
from torch import nn

from memopt.api import profile_workload
from memopt.apply import apply
from memopt.errors import UnsupportedError
from memopt.offload.nvme import NVMeStore
from memopt.offload.run_directory import RunDirectory
from memopt.offload.store import Extent, aligned_empty
from memopt.policies.simulate import VIEWS_PER_OP
from memopt.policies.solve import Found, Solver
from memopt.profiler.calibration import Calibration, load_calibration
from memopt.profiler.hardware import CATALOGUE, Hardware
from memopt.profiler.profile import Phase
from memopt.profiler.step import catalogued, device_name
from memopt.state import check_room
from memopt.workload import Workload

Progress = Callable[[str], None]

MIB = 2**20
# Quartiles further apart, or more of the CPUs in use before we begin: figures are not to be trusted much.
_MOST_SPREAD = 1.5
_MOST_BUSY_PERCENT = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How large what is measured is, and how often: medians are over `num_rounds`, or more of what is short."""

    matrix: int = 1024  # rows and columns of float32 matrices
    half_matrix: int = 512  # of bfloat16 ones: a CPU without such instructions takes seconds for large ones
    tensor_bytes: tuple[int, ...] = (16 * MIB, 64 * MIB)
    num_rounds: int = 5
    rounds_s: float = 0.3  # as many rounds as fill it
    num_layers: int = 4  # of a network whose ops cost little but their launch
    num_steps: int = 100  # of it
    disk_bytes: int = 256 * MIB
    watch_s: float = 0.5  # looking at what others do, before anything is measured


def effort_for(device: torch.device) -> Effort:
    """Sizes that fill the device for some milliseconds."""
    if device.type == "cuda":
        return Effort(matrix=8192, half_matrix=8192, tensor_bytes=(256 * MIB, 1024 * MIB))
    return Effort()


def calibrate(
    device: str = "cpu", nvme: str | None = None, *, effort: Effort | None = None, progress: Progress | None = None
) -> Calibration:
    """Measure `device` with torch's present number of threads, and the disk under the directory `nvme` if it is given.

    Without `nvme` the disk's rates are those of an earlier calibration, if there is one, else the catalogue's. Takes
    some seconds, up to `effort.disk_bytes` of memory and the same on the disk.

    Raises ValueError for what is no device, UnsupportedError for one that can't be measured here, StoreError if the
    disk can't be used.
    """
    target = _device(device)
    effort = effort or effort_for(target)
    progress = progress or (lambda text: None)
    clock = _Clock(target, effort)
    progress("what else runs here")
    # Spreads do not show a neighbour who takes the same share all the time.
    if (busy := psutil.cpu_percent(interval=effort.watch_s)) > _MOST_BUSY_PERCENT:
        clock.notes.append(f"others used {busy:.0f}% of the CPUs: figures are too low; calibrate again when it is idle")
    with torch.random.fork_rng(devices=[target] if target.type == "cuda" else []):
        torch.manual_seed(0)
        found = _compute(target, effort, clock, progress)
        found = _overheads(found, target, effort, clock, progress)
        if target.type == "cuda":
            found = _copies(found, target, effort, clock, progress)
        if nvme is not None:
            found = _disk(found, nvme, effort, clock, progress)
    name = device_name(target)
    if nvme is None and (earlier := load_calibration(name, torch.get_num_threads())) is not None:
        nvme = earlier.nvme
        if nvme is not None:
            found = _with_disk_of(found, earlier.hardware)
            clock.notes.append(f"the disk under {nvme} was measured on {earlier.measured_at[:10]}, not now")
    return Calibration(
        hardware=found,
        host=socket.gethostname(),
        device=name,
        num_threads=torch.get_num_threads(),
        torch_version=str(torch.__version__),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        nvme=nvme,
        notes=(*clock.notes, *clock.doubts()),
    )


def assumed(calibration: Calibration) -> Hardware:
    """The catalogue's entry that a calibration takes the place of."""
    if calibration.device == "cpu":
        return CATALOGUE["cpu"]
    return catalogued(torch.device("cuda"))


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise ValueError(f'no device {name!r}: give "cpu" or "cuda"') from e
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"--device {name}", 'calibrate knows "cpu" and "cuda"')
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(f"--device {name}", "torch finds no CUDA device here")
    return device


class _Clock:
    """Takes medians of several rounds, and remembers what varied."""

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self.device, self.effort = device, effort
        self.notes: list[str] = []
        self.spreads: dict[str, float] = {}

    def now(self) -> float:
        """Seconds of a steady clock, when the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def median_s(self, what: str, run: Callable[[], object]) -> float:
        """Seconds of `run`, after one call that is not counted."""
        run()
        seconds: list[float] = []
        while len(seconds) < self.effort.num_rounds or sum(seconds) < self.effort.rounds_s:
            seconds.append(self._once(run))
        return self.median_of(what, seconds)

    def median_of(self, what: str, seconds: list[float]) -> float:
        lower, median, upper = statistics.quantiles(seconds, n=4, method="inclusive")
        self.spreads[what] = upper / lower
        return median

    def _once(self, run: Callable[[], object]) -> float:
        start = self.now()
        run()
        return self.now() - start

    def doubts(self) -> list[str]:
        """A line if rounds differ much."""
        varied = {what: spread for what, spread in self.spreads.items() if spread > _MOST_SPREAD}
        if not varied:
            return []
        listed = ", ".join(f"{what} x{spread:.1f}" for what, spread in varied.items())
        return [f"rounds differ ({listed}): the machine was busy; calibrate again when it is idle"]


def _compute(device: torch.device, effort: Effort, clock: _Clock, progress: Progress) -> Hardware:
    """Matrix products, and element-wise ops that move bytes or compute on them.

    What an op makes is allocated by it, as in training: on a CPU, malloc gives large tensors fresh pages each time,
    which costs more than the op itself, and small ones memory that it has. Hence two sizes, of which the bytes count
    alike.
    """
    base = catalogued(device)
    flops = {}
    for dtype, n in ((torch.float32, effort.matrix), (torch.bfloat16, effort.half_matrix)):
        kind = str(dtype).removeprefix("torch.")
        progress(f"matrix products in {kind}")
        a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        flops[dtype] = 2 * n**3 / clock.median_s(f"{kind} products", lambda a=a, b=b: a @ b)  # type: ignore[misc]
    progress("memory")
    moving_s, computing_s = [], []  # per byte
    for num_bytes in effort.tensor_bytes:
        a, b = (torch.randn(num_bytes // 4, device=device) for _ in range(2))
        of = f"of {num_bytes // MIB} MiB"
        moving_s.append(clock.median_s(f"additions {of}", lambda a=a, b=b: a + b) / (3 * num_bytes))  # type: ignore[misc]
        gelu = clock.median_s(f"gelu {of}", lambda a=a: nn.functional.gelu(a))  # type: ignore[misc]
        exp = clock.median_s(f"exp {of}", lambda a=a: a.exp())  # type: ignore[misc]
        computing_s.append((gelu + exp) / (4 * num_bytes))
    memory_bytes = base.memory_bytes
    if device.type == "cuda":
        memory_bytes = int(torch.cuda.get_device_properties(device).total_memory)
    return replace(
        base,
        name=f"{device_name(device)} (calibrated)",
        flops_per_s=flops[torch.float32],
        half_flops_per_s=flops[torch.bfloat16],
        bytes_per_s=1 / statistics.mean(moving_s),
        transcendental_bytes_per_s=1 / statistics.mean(computing_s),
        memory_bytes=memory_bytes,
    )


class _Layer(nn.Module):
    """Ops of a usual network on so few elements that each costs its launch alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


@dataclass(slots=True)
class _Times:
    """Seconds of each step's forward and backward."""

    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)


def _overheads(hardware: Hardware, device: torch.device, effort: Effort, clock: _Clock, progress: Progress) -> Hardware:
    """What an op costs beside its work: launched, recorded in the forward, replayed in backward.

    The simulator's own formula, solved for its constants: a small network trains plainly and with half of its values
    dropped, and the profile says how many ops that is.
    """
    progress("small ops")
    num_threads = torch.get_num_threads()
    # Some kernels wake all threads for a few elements, and on a busy machine wait milliseconds for them.
    torch.set_num_threads(1)
    try:
        return _overheads_of_one_thread(hardware, device, effort, clock)
    finally:
        torch.set_num_threads(num_threads)


def _overheads_of_one_thread(hardware: Hardware, device: torch.device, effort: Effort, clock: _Clock) -> Hardware:
    plain = nn.Sequential(*(_Layer() for _ in range(effort.num_layers))).to(device)
    taped = copy.deepcopy(plain)
    x = torch.randn(4, 8, device=device)
    facts = profile_workload(Workload(plain, args=(x,), loss=lambda y: y.sum()), "fake", hardware)
    solver = Solver(facts)
    dropped = frozenset(sorted(solver.simulator.droppable)[::2])
    outcome = solver.run(dropped)
    plan = solver.plan(facts.peak_bytes, Found(dropped, outcome))
    num_forward = sum(op.phase is Phase.FORWARD for op in facts.ops)
    plain_times, taped_times = _Times(), _Times()
    with apply(plan, taped):
        for model, times in ((plain, _Times()), (taped, _Times())):
            _small_step(model, x, clock, times)
        for _ in range(effort.num_steps):  # in turns: what a busy machine adds falls on both
            _small_step(plain, x, clock, plain_times)
            _small_step(taped, x, clock, taped_times)
    # Minima: half a step is shorter than a time slice, so one without an interruption is among many.
    forward_s, backward_s = min(plain_times.forward_s), min(plain_times.backward_s)
    recorded_s = min(taped_times.forward_s) - forward_s
    replayed_s = min(taped_times.backward_s) - backward_s
    launch_s = (forward_s + backward_s) / len(facts.ops)
    return replace(
        hardware,
        launch_s=launch_s,
        record_s=max(0.0, recorded_s / (num_forward * (1 + VIEWS_PER_OP))),
        replay_s=max(0.0, replayed_s / max(1, outcome.num_replayed) - launch_s),
    )


def _small_step(model: nn.Module, x: torch.Tensor, clock: _Clock, times: _Times) -> None:
    model.zero_grad()
    start = clock.now()
    loss = model(x).sum()
    middle = clock.now()
    loss.backward()
    times.forward_s.append(middle - start)
    times.backward_s.append(clock.now() - middle)


def _copies(hardware: Hardware, device: torch.device, effort: Effort, clock: _Clock, progress: Progress) -> Hardware:
    """Copies between pinned host memory and the device."""
    progress("copies to and from the device")
    num_bytes = max(effort.tensor_bytes)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    here = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return replace(
        hardware,
        h2d_bytes_per_s=num_bytes / clock.median_s("H2D copies", lambda: there.copy_(here, non_blocking=True)),
        d2h_bytes_per_s=num_bytes / clock.median_s("D2H copies", lambda: here.copy_(there, non_blocking=True)),
    )


def _disk(hardware: Hardware, nvme: str, effort: Effort, clock: _Clock, progress: Progress) -> Hardware:
    """All of a file read, all of it written, and one half read while the other is written, in turns."""
    progress(f"the disk under {nvme}")
    check_room(nvme, effort.disk_bytes)
    directory = RunDirectory(nvme)
    try:
        store = NVMeStore(directory.path)
        try:
            seconds = _disk_rounds(store, effort)
            if not store.is_direct:
                clock.notes.append(f"{nvme} has no O_DIRECT: the page cache is part of its figures")
        finally:
            store.close()
    finally:
        directory.close()
    read, write, mixed = (
        effort.disk_bytes / clock.median_of(f"disk {mode}", seconds[mode]) for mode in ("read", "write", "mixed")
    )
    return replace(hardware, disk_read_bytes_per_s=read, disk_write_bytes_per_s=write, disk_mixed_bytes_per_s=mixed)


def _disk_rounds(store: NVMeStore, effort: Effort) -> dict[str, list[float]]:
    """Seconds of each round by mode."""
    # Extents of one request each: the store's threads take them in order, so reads and writes mix.
    sizes = [store.request_bytes] * (effort.disk_bytes // store.request_bytes)
    if rest := effort.disk_bytes % store.request_bytes:
        sizes.append(rest)
    extents = store.reserve(sizes)
    memory = aligned_empty(extents[-1].offset + extents[-1].num_bytes)
    memory.view(torch.int64).random_()  # some disks and file systems keep zeros for nothing
    # First a write of all: what was never written is read without the disk.
    _move(store, extents, memory, lambda i: False)
    seconds: dict[str, list[float]] = {"read": [], "write": [], "mixed": []}
    is_read = {"read": lambda i: True, "write": lambda i: False, "mixed": lambda i: i % 2 == 0}
    for _ in range(effort.num_rounds):
        for mode, found in seconds.items():
            start = time.perf_counter()
            _move(store, extents, memory, is_read[mode])
            found.append(time.perf_counter() - start)
    return seconds


def _move(store: NVMeStore, extents: list[Extent], memory: torch.Tensor, is_read: Callable[[int], bool]) -> None:
    begun = []
    for i, extent in enumerate(extents):
        part = memory[extent.offset : extent.offset + extent.reserved_bytes]
        begun.append((store.read if is_read(i) else store.write)(extent, part))
    for transfer in begun:
        transfer.wait()


def _with_disk_of(hardware: Hardware, other: Hardware) -> Hardware:
    return replace(
        hardware,
        disk_read_bytes_per_s=other.disk_read_bytes_per_s,
        disk_write_bytes_per_s=other.disk_write_bytes_per_s,
        disk_mixed_bytes_per_s=other.disk_mixed_bytes_per_s,
    )
