"""How long profiling and planning take for deep models: `python benchmarks/bench_planning.py [--json]`.

A GPT of d=2048 in bf16 on the meta device, batch 8 x 1024, AdamW fused; nothing is allocated. For each depth: seconds
of the fake profile, of planning at 60% between the least and the plain peak, and the plan's gap. Median of three.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from gpt import GPT, loss_of

import memopt


def seconds_of(layers: int) -> dict[str, float]:
    with torch.device("meta"):
        model = GPT(layers, 2048, 16).bfloat16()
    ids = target = torch.zeros(8, 1024, dtype=torch.long)
    workload = memopt.Workload(
        model,
        args=(ids,),
        loss=lambda logits: loss_of(logits, target),
        optimizer=torch.optim.AdamW(model.parameters(), fused=True),
    )
    profiling, planning, gap = [], [], 0.0
    for _ in range(3):
        start = time.perf_counter()
        profile = memopt.profile(workload)
        profiling.append(time.perf_counter() - start)
        budget = int(profile.min_bytes + 0.6 * (profile.peak_bytes - profile.min_bytes))
        start = time.perf_counter()
        gap = memopt.plan(profile, budget).gap
        planning.append(time.perf_counter() - start)
    return {
        "layers": layers,
        "profile_s": round(statistics.median(profiling), 2),
        "plan_s": round(statistics.median(planning), 2),
        "gap": round(gap, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layers", type=int, nargs="*", default=[12, 32, 126])
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; shared machine: medians of 3")
    rows = [seconds_of(layers) for layers in args.layers]
    for row in rows:
        print(
            f"{row['layers']:4} layers: profile {row['profile_s']:6.2f} s, plan {row['plan_s']:6.2f} s, "
            f"gap {100 * row['gap']:.1f}%"
        )
    if args.json:
        print(json.dumps({"benchmark": "planning", "rows": rows}))


if __name__ == "__main__":
    main()
