"""Step time at equal measured peaks: plain, torch.utils.checkpoint, selective checkpointing, and memopt.

    python benchmarks/bench_recompute.py [--layers 8 --d 384 --batch 8 --sequence 256 --rounds 15 --json]

Peers: each block under torch.utils.checkpoint; every second block; each block under torch's selective checkpointing
that keeps matrix products and attention. memopt gets each peer's measured peak as its budget, and the plain peak with
1% to spare. All variants take one step per round in turn (shared machines drift); ratios are medians over the rounds of
time / plain time of the same round. Peaks are the allocator's own events. Losses must be equal.
torch's auto-SAC (torch.distributed._tools) plans but does not apply; whether its estimator runs here is tried and said.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from gpt import GPT, batch, loss_of
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import memopt

KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}

AUTO_SAC = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.sac_estimator import SACEstimator
with FakeTensorMode():
    model, estimator = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), SACEstimator()
    with estimator("operator-level-cost-model"):
        model(torch.zeros(4, 8))
print(list(estimator.sac_mod_stats))
"""


@dataclass
class Variant:
    name: str
    step: Callable[[], float]
    peak_bytes: int = 0
    forecast_bytes: int | None = None
    times: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def selective() -> object:
    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def variant(name: str, original: GPT, ids: torch.Tensor, target: torch.Tensor, prepare: Callable[..., None]) -> Variant:
    model = copy.deepcopy(original)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    prepare(model, optimizer)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(model(ids), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    made = Variant(name, step)
    made.losses += [step(), step()]
    # The gradients of the step before are freed at its begin, which the profiler does not see: they are not counted.
    held = sum(p.nbytes for p in model.parameters()) + ids.nbytes + target.nbytes
    held += sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    made.peak_bytes = held + peak_above(lambda: made.losses.append(step()))
    return made


def peak_above(f: Callable[[], object]) -> int:
    """Peak bytes above the start, by the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        f()
    now = peak = 0
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 8), ("d", 384), ("batch", 8), ("sequence", 256), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    original = GPT(args.layers, args.d, args.d // 32)
    ids, target = batch(args.batch, args.sequence)
    every, second = frozenset(range(args.layers)), frozenset(range(0, args.layers, 2))
    auto_sac = subprocess.run([sys.executable, "-c", AUTO_SAC], capture_output=True, text=True)
    print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}; "
        f"GPT {args.layers} layers, d={args.d}, batch {args.batch} x {args.sequence}; {args.rounds} rounds"
    )
    reason = (auto_sac.stderr.strip().splitlines() or [""])[-1]
    print(f"torch's auto-SAC estimator here: exit {auto_sac.returncode} {reason[:100]}")

    def checkpointed(blocks: frozenset[int], contexts: object = None) -> Callable[..., None]:
        def prepare(model: GPT, optimizer: torch.optim.Optimizer) -> None:
            model.checkpoints, model.context_fn = blocks, contexts

        return prepare

    make = functools.partial(variant, original=original, ids=ids, target=target)
    plain = make("plain", prepare=lambda model, optimizer: None)
    peers = [
        make("checkpoint, each block", prepare=checkpointed(every)),
        make("selective checkpoint", prepare=checkpointed(every, selective)),
        make("checkpoint, every second block", prepare=checkpointed(second)),
    ]
    profiled = copy.deepcopy(original)
    workload = memopt.Workload(
        profiled,
        args=(ids,),
        loss=lambda logits: loss_of(logits, target),
        optimizer=torch.optim.AdamW(profiled.parameters(), fused=True),
    )
    found = memopt.profile(workload)

    def ours(name: str, budget: int) -> Variant:
        plan = memopt.plan(found, budget)
        made = make(name, prepare=lambda model, optimizer: memopt.apply(plan, model, optimizer))
        made.forecast_bytes = plan.forecast.peak_bytes
        return made

    variants = [plain]
    for peer in peers:
        variants += [peer, ours(f"memopt at the peak of: {peer.name}", peer.peak_bytes)]
    middle = (plain.peak_bytes + peers[0].peak_bytes) // 2
    variants.append(ours("memopt half way to the plain peak", middle))
    variants.append(ours("memopt, ample budget", int(1.01 * plain.peak_bytes)))
    for _ in range(args.rounds):
        for v in variants:
            start = time.perf_counter()
            v.losses.append(v.step())
            v.times.append(time.perf_counter() - start)
    rows = []
    for v in variants:
        ratio = statistics.median(t / p for t, p in zip(v.times, plain.times, strict=True))
        row = {
            "name": v.name,
            "peak_mib": round(v.peak_bytes / 2**20, 1),
            "forecast_mib": round(v.forecast_bytes / 2**20, 1) if v.forecast_bytes else None,
            "time": round(ratio, 3),
            "least_time": round(min(v.times) / min(plain.times), 3),
            "losses_equal": v.losses == plain.losses,
        }
        rows.append(row)
        print(
            f"{v.name:58} peak {row['peak_mib']:8.1f} MiB  time x{ratio:.3f} (best of all x{row['least_time']:.3f})  "
            f"{'equal losses' if row['losses_equal'] else 'LOSSES DIFFER'}"
        )
    print(f"plain step {1e3 * statistics.median(plain.times):.0f} ms")
    if args.json:
        print(json.dumps({"benchmark": "recompute", "auto_sac_exit": auto_sac.returncode, "rows": rows}))


if __name__ == "__main__":
    main()
