"""A streamed AdamW step, DeepSpeed's and ours: `python benchmarks/peer_deepspeed.py [--params 100e6 --nvme DIR]`.

One plain fused step, one streamed by memopt and one of DeepSpeed's per round, on equal parameters and gradients and on
the same disk; medians, and the ratio of each round. memopt keeps parameters and gradients in memory and moves the two
moments: 8 bytes per parameter read and 8 written. DeepSpeed runs ZeRO-3 in one process with its optimizer on NVMe
(pipelined both ways, float32 and so without a 16-bit copy). Its parameters are in memory, but it keeps float32 masters
and gradients on disk too: the step reads both and the moments (16 bytes) and writes masters and moments (12). Backward
writes the gradients (4), apart from what its buffers hold until the step waits for them, so the ratio by byte is
printed as well. DeepSpeed's seconds are those of `engine.step()` alone; backward has its own number. memopt has
3 buckets of 128 MiB, DeepSpeed as much in 12 buffers of 32 MiB (`--group`). Bytes are those that the kernel counts for
each process.

Needs deepspeed, a compiler, ninja and libaio's headers; deepspeed builds two extensions when it is first used.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench_optimizer import Pair, pair_of, parameters_of, seconds_of

NUM_BUFFERS = 12  # of one tensor of a group: four that are updated, four being read, four being written
EQUAL_TO = 1e-5  # the largest difference from plain AdamW that is called near


def disk_bytes() -> tuple[int, int]:
    """What this process has read from and written to disks."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def moved_since(before: tuple[int, int], num: int) -> list[float]:
    return [(b - a) / num for a, b in zip(before, disk_bytes(), strict=True)]


class Product(torch.nn.Module):
    """The gradient of its output by the weight is `gradient`, exactly."""

    def __init__(self, weight: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.gradient = weight, gradient

    def forward(self, total: torch.Tensor) -> torch.Tensor:
        return total + self.weight.flatten() @ self.gradient.flatten()


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    offload = {
        "device": "nvme",
        "nvme_path": args.nvme,
        "pin_memory": False,
        "buffer_count": NUM_BUFFERS,
        "pipeline_read": True,
        "pipeline_write": True,
    }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # 1.0 if left out
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": int(args.group),
            "reduce_bucket_size": int(args.group),
            "offload_optimizer": offload,
        },
        "aio": {
            "block_size": 2**20,
            "queue_depth": args.queue_depth,
            "intra_op_parallelism": args.aio_threads,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def serve(args: argparse.Namespace) -> None:
    """The process with DeepSpeed in it: a line on stdin is one step, or where to save parameters; a line back each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    deepspeed.init_distributed("gloo")
    params = parameters_of(int(args.params))
    layers = []
    for p in params:
        gradient, p.grad = p.grad, None
        assert gradient is not None
        layers.append(Product(p, gradient))
    num = sum(p.numel() for p in params)
    model = torch.nn.Sequential(*layers)
    adam = DeepSpeedCPUAdam(params, lr=1e-3, weight_decay=1e-2, adamw_mode=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config_of(args))
    print(json.dumps({"version": deepspeed.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        if path := line.strip():
            with deepspeed.zero.GatheredParameters(params):
                torch.save([p.detach().clone() for p in params], path)
            print("{}", file=answers, flush=True)
            continue
        start = disk_bytes()
        loss = engine(torch.zeros(()))
        backward = seconds_of(lambda total=loss: engine.backward(total))
        answer = {"backward_moved": moved_since(start, num), "backward": backward}
        middle = disk_bytes()
        answer |= {"step": seconds_of(engine.step), "moved": moved_since(middle, num)}
        print(json.dumps(answer), file=answers, flush=True)
    torch.distributed.destroy_process_group()


class DeepSpeed:
    """DeepSpeed in a process of its own."""

    def __init__(self, args: argparse.Namespace, directory: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_LOG_LEVEL": "error"}
        command = [
            sys.executable,
            "-W",
            "ignore",
            __file__,
            "--serve",
            "--nvme",
            directory,
            "--params",
            str(args.params),
        ]
        command += ["--group", str(args.group), "--queue-depth", str(args.queue_depth)]
        command += ["--aio-threads", str(args.aio_threads)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **own, **ranks})
        self.version = self.answer()["version"]

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            sys.exit(f"deepspeed's process ended with {self.process.wait()}; its messages are above")
        return json.loads(line)

    def ask(self, line: str = "") -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--params", type=float, default=100e6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--nvme", default=tempfile.gettempdir())
    parser.add_argument("--group", type=float, default=2 * 2048**2, help="parameters that DeepSpeed updates at a time")
    parser.add_argument("--queue-depth", type=int, default=32)
    parser.add_argument("--aio-threads", type=int, default=4)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if importlib.util.find_spec("deepspeed") is None:
        print("peer_deepspeed: this needs deepspeed, which can't be imported here", file=sys.stderr)
        sys.exit(2)
    if args.serve:
        serve(args)
        return
    with pair_of(int(args.params), args.nvme) as pair:
        compare(pair, args)


def compare(pair: Pair, args: argparse.Namespace) -> None:
    num, optimizers = pair.num, pair.optimizers
    with tempfile.TemporaryDirectory(dir=args.nvme) as swapped:
        peer = DeepSpeed(args, swapped)
        for optimizer in optimizers:
            optimizer.step()
        peer.ask()
        rounds = []
        for index in range(args.rounds):
            times = {"plain": seconds_of(optimizers[0].step)}
            before = disk_bytes()
            times["memopt"] = seconds_of(optimizers[1].step)
            ours = moved_since(before, num)
            theirs = peer.ask()
            times |= {"deepspeed": theirs["step"], "deepspeed_backward": theirs["backward"]}
            rounds.append(times)
            print(f"round {index + 1}: " + ", ".join(f"{name} {s:.3f} s" for name, s in times.items()))
        peer.ask(saved := str(Path(swapped, "parameters.pt")))
        others = torch.load(saved)
        peer.close()
    is_equal = pair.is_equal
    difference = max((a - b).abs().max().item() for a, b in zip((p.detach() for p in pair.plain), others, strict=True))
    seconds = {name: 1e8 / num * statistics.median(times[name] for times in rounds) for name in rounds[0]}
    ratio = statistics.median(times["deepspeed"] / times["memopt"] for times in rounds)
    by_byte = ratio * sum(ours) / sum(theirs["moved"])
    where = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"{where}, deepspeed {peer.version}, {num / 1e6:.0f}M parameters")
    print(
        f"per 100M parameters: plain {seconds['plain']:.3f} s, memopt {seconds['memopt']:.3f} s, deepspeed "
        f"{seconds['deepspeed']:.3f} s (and backward {seconds['deepspeed_backward']:.3f} s); deepspeed / memopt "
        f"x{ratio:.2f}, by byte x{by_byte:.2f}"
    )
    amounts = [
        f"{name} {r:.1f} read {w:.1f} written"
        for name, (r, w) in {
            "memopt": ours,
            "deepspeed": theirs["moved"],
            "its backward": theirs["backward_moved"],
        }.items()
    ]
    print(f"bytes per parameter: {'; '.join(amounts)}")
    print(
        f"against plain AdamW: memopt {'equal' if is_equal else 'DIFFERENT'}, deepspeed differs by at most "
        f"{difference:.1e}, {'near' if difference <= EQUAL_TO else 'NOT NEAR'}"
    )
    if args.json:
        found = {name: round(s, 4) for name, s in seconds.items()} | {"ratio": round(ratio, 3)}
        found |= {"ratio_by_byte": round(by_byte, 3), "equal": is_equal, "deepspeed_difference": difference}
        print(json.dumps({"benchmark": "peer_deepspeed", **found}))


if __name__ == "__main__":
    main()
