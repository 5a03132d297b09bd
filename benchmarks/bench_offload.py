"""Training with its state on disk against plain training and against what the disk allows.

    python benchmarks/bench_offload.py [--layers 12 --d 768 --batch 2 --sequence 128 --steps 5 --nvme DIR --json]

A byte-level GPT with fused AdamW. Rows: plain; plans at shares of the plain peak, down to the least. For each: forecast
and measured peak (the allocator's own events over the whole run), time per step against plain, and against the bound
max(compute, bytes that must move / the disk's mixed bandwidth), measured in the same run by a raw O_DIRECT loop. One
step of each row per round; medians. Losses must be equal.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from gpt import GPT, batch, loss_of
from torch.profiler import ProfilerActivity, profile

import memopt
from memopt.offload.nvme import NVMeStore
from memopt.offload.run_directory import RunDirectory
from memopt.offload.store import aligned_empty

MIXED_BYTES = 2**29


@dataclass
class Row:
    name: str
    plan: memopt.Plan | None
    step: Callable[[], float]
    peak_bytes: int
    losses: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def run(self) -> float:
        start = time.perf_counter()
        self.losses.append(self.step())
        self.times.append(time.perf_counter() - start)
        return self.times[-1]


def disk_bytes_per_s(path: str) -> float:
    """Reads and writes at the same time, in total."""
    directory = RunDirectory(path)
    store = NVMeStore(directory.path)
    sizes = [2**26] * (MIXED_BYTES // 2**26)
    there, here = store.reserve(sizes), store.reserve(sizes)
    buffers = [aligned_empty(2**26) for _ in range(4)]
    for extent in [*there, *here]:
        store.write(extent, buffers[0]).wait()
    start = time.perf_counter()
    for a, b in zip(there, here, strict=True):
        transfers = [store.read(a, buffers[1]), store.write(b, buffers[2])]
        for transfer in transfers:
            transfer.wait()
    seconds = time.perf_counter() - start
    store.close()
    directory.close()
    return 2 * MIXED_BYTES / seconds


def peak_of(original: GPT, plan: memopt.Plan | None, ids: torch.Tensor, target: torch.Tensor) -> int:
    """Peak of the third step. The profiler must see the whole run: it knows only the blocks that it saw come."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step = trainer(original, plan, ids, target)
        for i in range(3):
            with torch.autograd.profiler.record_function(f"step {i}"):
                step()
    del step
    gc.collect()
    events = sorted(prof.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    (span,) = [e for e in events if e.name() == "step 2"]
    now = peak = 0
    for event in events:
        if event.name() == "[memory]":
            now += event.nbytes()
            if span.start_ns() <= event.start_ns() <= span.end_ns():
                peak = max(peak, now)
    return peak + ids.nbytes


def trainer(original: GPT, plan: memopt.Plan | None, ids: torch.Tensor, target: torch.Tensor) -> Callable[[], float]:
    model = copy.deepcopy(original)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if plan is not None:
        memopt.apply(plan, model, optimizer)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(model(ids), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--nvme", default=tempfile.gettempdir())
    for name, default in (("layers", 12), ("d", 768), ("batch", 2), ("sequence", 128), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(0)
    original = GPT(args.layers, args.d, args.d // 64)
    ids, target = batch(args.batch, args.sequence)
    model = copy.deepcopy(original)
    workload = memopt.Workload(
        model,
        args=(ids,),
        loss=lambda logits: loss_of(logits, target),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
    )
    facts = memopt.profile(workload, mode="run")
    del model, workload
    options = {"allow": {"recompute", "offload"}, "nvme": args.nvme}
    plans: dict[str, memopt.Plan | None] = {"plain": None}
    for share in (0.7, 0.5, 0.35):
        plans[f"{share:.0%} of the plain peak"] = memopt.plan(facts, int(share * facts.peak_bytes), **options)
    plans["the least"] = memopt.plan(facts, "min", **options)
    num = sum(p.numel() for p in original.parameters())
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}; GPT of {num / 1e6:.0f}M "
        f"parameters, batch {args.batch} x {args.sequence}, fused AdamW; {args.steps} rounds"
    )
    rows = [
        Row(name, plan, trainer(original, plan, ids, target), peak_of(original, plan, ids, target))
        for name, plan in plans.items()
    ]
    disk = []
    for i in range(args.steps + 1):
        disk.append(disk_bytes_per_s(args.nvme))
        for row in rows:
            row.run()
        if i == 0:  # the first step makes the optimizer's states
            for row in rows:
                row.times.clear()
    plain_s = statistics.median(rows[0].times)
    rate = statistics.median(disk)
    print(f"disk, mixed: {rate / 1e9:.2f} GB/s; plain step {plain_s:.3f} s")
    found = []
    for row in rows:
        ratio = statistics.median(a / b for a, b in zip(row.times, rows[0].times, strict=True))
        forecast = row.plan.forecast if row.plan else None
        moved = forecast.read_bytes + forecast.written_bytes if forecast else 0
        bound = max(plain_s, moved / rate)
        found.append(
            {
                "name": row.name,
                "peak_mib": round(row.peak_bytes / 2**20, 1),
                "forecast_mib": round(forecast.peak_bytes / 2**20, 1) if forecast else None,
                "time": round(ratio, 3),
                "forecast_time": round(forecast.slowdown, 3) if forecast else 1.0,
                "of_bound": round(statistics.median(row.times) / bound, 3),
                "moved_mib": round(moved / 2**20),
                "losses_equal": row.losses == rows[0].losses,
            }
        )
        r = found[-1]
        print(
            f"{r['name']:28} peak {r['peak_mib']:7.1f} MiB  forecast {r['forecast_mib'] or 0:7.1f}  "
            f"time x{r['time']:.2f} (forecast x{r['forecast_time']:.2f}, x{r['of_bound']:.2f} of the bound)  "
            f"moves {r['moved_mib']} MiB  {'equal losses' if r['losses_equal'] else 'DIFFERENT LOSSES'}"
        )
    if args.json:
        print(json.dumps({"benchmark": "offload", "disk_gb_per_s": round(rate / 1e9, 2), "rows": found}))


if __name__ == "__main__":
    main()
