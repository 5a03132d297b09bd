"""One AdamW step with its states on disk: `python benchmarks/bench_optimizer.py [--params 100e6 --nvme DIR --json]`.

Parameters and gradients are in memory, the two moments on disk: 16 bytes per parameter move in each step. Rows: the
plain fused step, the streamed one, and a raw loop that reads and writes the same bytes through the same store and does
nothing else. One of each per round; medians. Parameters must come out equal, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from memopt.offload.nvme import NVMeStore
from memopt.offload.optimizer import BucketedOptimizer
from memopt.offload.run_directory import RunDirectory
from memopt.offload.store import aligned_empty

BUCKET_BYTES = 128 * 2**20


def seconds_of(f: Callable[[], object]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def parameters_of(num: int, width: int = 2048) -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    found = [torch.nn.Parameter(torch.randn(width, width)) for _ in range(max(1, num // width**2))]
    for p in found:
        p.grad = torch.randn_like(p)
    return found


@dataclass(frozen=True, slots=True)
class Pair:
    """The same parameters twice, under a plain AdamW and under one whose moments are on a store."""

    plain: list[torch.nn.Parameter]
    streamed: list[torch.nn.Parameter]
    optimizers: tuple[torch.optim.AdamW, torch.optim.AdamW]
    store: NVMeStore

    @property
    def num(self) -> int:
        return sum(p.numel() for p in self.plain)

    @property
    def is_equal(self) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.plain, self.streamed, strict=True))


@contextmanager
def pair_of(num: int, nvme: str) -> Iterator[Pair]:
    """A pair of about `num` parameters each; what is on the disk is deleted afterwards."""
    plain, streamed = parameters_of(num), parameters_of(num)
    directory = RunDirectory(nvme)
    store = NVMeStore(directory.path)
    a, b = (torch.optim.AdamW(params, lr=1e-3, fused=True) for params in (plain, streamed))
    bucketed = BucketedOptimizer(b, {id(p) for p in streamed}, store, BUCKET_BYTES, 3, None, None, print)
    bucketed.install()
    yield Pair(plain, streamed, (a, b), store)
    bucketed.remove()
    store.close()
    directory.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--params", type=float, default=100e6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--nvme", default=tempfile.gettempdir())
    args = parser.parse_args()
    with pair_of(int(args.params), args.nvme) as pair:
        compare(pair, args.rounds, args.json)


def compare(pair: Pair, rounds: int, as_json: bool) -> None:
    num, store, optimizers = pair.num, pair.store, pair.optimizers
    raw = store.reserve([BUCKET_BYTES // 2] * (-(-8 * num // (BUCKET_BYTES // 2))))
    buffers = [aligned_empty(BUCKET_BYTES // 2) for _ in range(2)]

    def move() -> None:
        for a, b in zip(raw, [*raw[1:], raw[0]], strict=True):
            for transfer in [store.read(a, buffers[0]), store.write(b, buffers[1])]:
                transfer.wait()

    for optimizer in optimizers:
        optimizer.step()
    move()
    times: dict[str, list[float]] = {"plain": [], "streamed": [], "raw": []}
    for _ in range(rounds):
        times["plain"].append(seconds_of(optimizers[0].step))
        times["streamed"].append(seconds_of(optimizers[1].step))
        times["raw"].append(seconds_of(move))
    is_equal = pair.is_equal
    median = {name: statistics.median(t) for name, t in times.items()}
    ratio = statistics.median(a / b for a, b in zip(times["streamed"], times["raw"], strict=True))
    seconds = {name: 1e8 / num * median[name] for name in times}
    where = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"{where}, {num / 1e6:.0f}M parameters")
    print(
        f"per 100M parameters: plain {seconds['plain']:.3f} s, streamed {seconds['streamed']:.3f} s, the bytes alone "
        f"{seconds['raw']:.3f} s; streamed / bytes alone x{ratio:.2f}; {'equal' if is_equal else 'DIFFERENT'}"
    )
    if as_json:
        rounded = {name: round(s, 4) for name, s in seconds.items()}
        print(json.dumps({"benchmark": "optimizer", **rounded, "over_raw": round(ratio, 3), "equal": is_equal}))


if __name__ == "__main__":
    main()
