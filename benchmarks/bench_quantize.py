"""8-bit optimizer states: `python benchmarks/bench_quantize.py [--part speed|training|stress --steps 1500 --json]`.

Rows: fused float32 AdamW of torch, memopt's 8-bit states under the same optimizer object, and, where they can be
imported, bitsandbytes' and torchao's AdamW8bit, all in one run.

- speed: one step of `--params` parameters; medians of alternating rounds.
- training: a small GPT on the text of Python's standard library, and an embedding model on tokens of a Zipf
  distribution; mean loss of the last 100 steps against float32's.
- stress: each block has one large and 255 tiny gradients, then none; the largest update against float32's.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, loss_of
from torch import Tensor, nn
from torch.nn import functional as F

from memopt.quant.optimizer import CodedState, QuantizedOptimizer, codecs_of

Make = Callable[[list[nn.Parameter], float], Any]


def fused(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr, weight_decay=0.01, fused=True)


def memopt(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    optimizer = fused(params, lr)
    names = {id(p): str(i) for i, p in enumerate(params)}
    QuantizedOptimizer(optimizer, codecs_of(optimizer), names, "raise", print).install()
    return optimizer


def bitsandbytes(params: list[nn.Parameter], lr: float) -> Any:
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(params, lr=lr, weight_decay=0.01)


def torchao(params: list[nn.Parameter], lr: float) -> Any:
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, lr=torch.tensor(lr), weight_decay=0.01)


MAKERS: dict[str, Make] = {"fused float32": fused, "memopt": memopt, "bitsandbytes": bitsandbytes, "torchao": torchao}


def present() -> dict[str, Make]:
    """Those that can be made here."""
    found = {}
    for name, make in MAKERS.items():
        try:
            make([nn.Parameter(torch.zeros(8192))], 1e-3)
            found[name] = make
        except Exception as e:
            print(f"{name}: left out, {type(e).__name__}: {str(e).splitlines()[0][:90]}")
    return found


# Speed


def speed(makers: dict[str, Make], num: int, rounds: int) -> dict[str, dict[str, float]]:
    torch.manual_seed(0)
    params = {name: [nn.Parameter(torch.randn(2048, 2048) * 0.02) for _ in range(num // 2**22)] for name in makers}
    gradients = [torch.randn(2048, 2048) * 1e-3 for _ in range(num // 2**22)]
    for own in params.values():
        for p, g in zip(own, gradients, strict=True):
            p.grad = g
    optimizers = {name: make(params[name], 1e-4) for name, make in makers.items()}
    times: dict[str, list[float]] = {name: [] for name in makers}
    for i in range(rounds + 1):
        for name, optimizer in optimizers.items():
            if name in ("bitsandbytes", "torchao") and i > 2:
                continue  # they take minutes
            start = time.perf_counter()
            optimizer.step()
            if i:
                times[name].append(time.perf_counter() - start)
    count = sum(g.numel() for g in gradients)
    seconds = {name: statistics.median(t) for name, t in times.items()}
    own = optimizers["memopt"].state.values()
    held = sum(t.nbytes for s in own if isinstance(s, CodedState) for t in s.values() if t.numel() > 1)
    for name, s in seconds.items():
        print(f"{name}: {count / s / 1e6:.0f} M parameters/s, x{s / seconds['fused float32']:.2f} of fused float32")
    print(f"memopt's states: {held / count:.4f} bytes per parameter")
    return {
        "million_per_s": {name: round(count / s / 1e6, 1) for name, s in seconds.items()},
        "over_fused": {name: round(s / seconds["fused float32"], 2) for name, s in seconds.items()},
        "bytes_per_parameter": {"memopt": round(held / count, 4)},
    }


# Training


def standard_library() -> Tensor:
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8).long()


def gpt_losses(make: Make, steps: int) -> Iterator[float]:
    torch.manual_seed(0)
    text = standard_library()
    model = GPT(layers=3, d=128, heads=4)
    optimizer = make(list(model.parameters()), 1e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(0, text.numel() - 65, (8,), generator=generator)
        windows = text[starts[:, None] + torch.arange(65)]
        loss = loss_of(model(windows[:, :-1]), windows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def embedding_losses(make: Make, steps: int) -> Iterator[float]:
    """The next token is a fixed function of the token, or any: rare rows get a gradient once in thousands of steps."""
    torch.manual_seed(0)
    num = 20_000
    model = nn.Sequential(nn.Embedding(num, 64), nn.Linear(64, 256, bias=False), nn.GELU(), nn.Linear(256, 200))
    optimizer = make(list(model.parameters()), 1e-2)
    generator = torch.Generator().manual_seed(1)
    weights = 1 / torch.arange(1, num + 1)
    for _ in range(steps):
        tokens = torch.multinomial(weights, 512, replacement=True, generator=generator)
        noise = torch.randint(0, 200, (512,), generator=generator)
        target = torch.where(torch.rand(512, generator=generator) < 0.8, tokens * 7919 % 200, noise)
        loss = F.cross_entropy(model(tokens), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def training(makers: dict[str, Make], steps: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for task, losses_of in (("gpt", gpt_losses), ("embedding", embedding_losses)):
        found[task] = {}
        for name, make in makers.items():
            start = time.perf_counter()
            try:
                last = list(losses_of(make, steps))[-100:]
            except Exception as e:
                print(f"{task}, {name}: did not finish, {type(e).__name__}: {str(e).splitlines()[0][:90]}")
                continue
            found[task][name] = statistics.mean(last)
            gap = found[task][name] / found[task]["fused float32"] - 1
            seconds = time.perf_counter() - start
            print(f"{task}, {name}: loss {found[task][name]:.4f} ({100 * gap:+.2f}%), {seconds:.0f} s", flush=True)
    return found


# Stress


def stress(makers: dict[str, Make]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {name: {} for name in makers}
    for tiny in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6):
        g = torch.full((64, 256), tiny)
        g[:, 0] = 1.0
        for name, make in makers.items():
            p = nn.Parameter(torch.zeros(64 * 256))
            optimizer = make([p], 1e-3)
            most = 0.0
            for i in range(60):
                before = p.detach().clone()
                p.grad = g.view(-1).clone() if i < 20 else torch.zeros_like(p)
                optimizer.step()
                most = max(most, float((p.detach() - before).abs().max()))
            moved = p.detach().view(64, 256)[:, 1:].abs().mean()
            found[name][f"{tiny:g}"] = round(most * 1e3, 3)
            print(f"tiny {tiny:g}, {name}: largest update {most * 1e3:.2f} lr, tiny ones moved {moved * 1e3:.2f} lr")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", choices=["speed", "training", "stress"], action="append")
    parser.add_argument("--params", type=float, default=100e6)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args()
    parts = args.part or ["speed", "stress", "training"]
    print(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    makers = present()
    result: dict[str, Any] = {"benchmark": "quantize"}
    if "speed" in parts:
        result["speed"] = speed(makers, int(args.params), args.rounds)
    if "stress" in parts:
        result["stress"] = stress(makers)
    if "training" in parts:
        result["training"] = training(makers, args.steps)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
