"""Throughput of the disk store beside a plain O_DIRECT loop, and beside fio where it is installed.

    python benchmarks/bench_store.py [--directory . --mib 1024 --extent-mib 64 --threads 4 --request-mib 8 --rounds 5
                                      --json]

All move the same bytes between the same memory and preallocated files that were written once before, in the same
requests by the same number of threads: read everything, write everything, and read one half while writing the other.
They take turns, in changing order (shared machines drift); ratios are medians over the rounds of store / plain loop in
the same round. CPU seconds are those of the process. What was written is compared at the end, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from memopt.offload.nvme import NVMeStore
from memopt.offload.store import Extent, aligned_empty

MIB = 2**20
MODES = ("read", "write", "mixed")


@dataclass
class Peer:
    name: str
    run: Callable[[str], float]  # takes a mode, returns seconds
    seconds: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})

    def measure(self, mode: str) -> None:
        cpu = time.process_time()
        self.seconds[mode].append(self.run(mode))
        self.cpu_s[mode].append(time.process_time() - cpu)


def is_read(mode: str, i: int) -> bool:
    return mode == "read" or (mode == "mixed" and i % 2 == 0)


def store_peer(store: NVMeStore, extents: list[Extent], memory: torch.Tensor) -> Peer:
    def run(mode: str) -> float:
        start = time.perf_counter()
        transfers = []
        for i, extent in enumerate(extents):
            part = memory[extent.offset : extent.offset + extent.num_bytes]
            transfers.append((store.read if is_read(mode, i) else store.write)(extent, part))
        for transfer in transfers:
            transfer.wait()
        return time.perf_counter() - start

    return Peer("store", run)


def plain_peer(fd: int, memory: torch.Tensor, extent_bytes: int, request_bytes: int, num_threads: int) -> Peer:
    view = memoryview(memory.numpy())

    def run(mode: str) -> float:
        requests = iter([(o, is_read(mode, o // extent_bytes)) for o in range(0, len(view), request_bytes)])

        def work() -> None:
            for offset, reads in requests:  # shared: each thread takes the next one
                part = [view[offset : offset + request_bytes]]
                moved = os.preadv(fd, part, offset) if reads else os.pwritev(fd, part, offset)
                assert moved == len(part[0]), f"{moved} B of {len(part[0])}"

        threads = [threading.Thread(target=work) for _ in range(num_threads)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    return Peer("plain loop", run)


def fio_peer(path: str, total_bytes: int, request_bytes: int, num_threads: int) -> Peer | None:
    """fio on the plain loop's file; None where it is not installed."""
    if shutil.which("fio") is None:
        return None
    share = total_bytes // num_threads

    def run(mode: str) -> float:
        command = ["fio", "--name=peer", f"--filename={path}", "--direct=1", "--ioengine=psync", "--thread"]
        command += [
            f"--bs={request_bytes}",
            f"--numjobs={num_threads}",
            f"--size={share}",
            f"--offset_increment={share}",
        ]
        command += [f"--rw={'rw' if mode == 'mixed' else mode}", "--group_reporting", "--output-format=json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return float(json.loads(done.stdout)["jobs"][0]["job_runtime"]) / num_threads / 1000

    return Peer("fio", run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default=".")
    for name, default in (("mib", 1024), ("extent-mib", 64), ("threads", 4), ("request-mib", 8), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    extent_bytes, request_bytes = args.extent_mib * MIB, args.request_mib * MIB
    total_bytes = args.mib * MIB // extent_bytes * extent_bytes
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        content = aligned_empty(total_bytes)
        content.view(torch.int64).random_(generator=torch.Generator().manual_seed(0))
        memory = aligned_empty(total_bytes)
        memory.copy_(content)

        store = NVMeStore(directory, num_threads=args.threads, request_bytes=request_bytes, capacity_bytes=total_bytes)
        extents = store.reserve([extent_bytes] * (total_bytes // extent_bytes))
        path = os.path.join(directory, "plain")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if store.is_direct else 0), 0o600)
        os.posix_fallocate(fd, 0, total_bytes)

        peers = [
            store_peer(store, extents, memory),
            plain_peer(fd, memory, extent_bytes, request_bytes, args.threads),
            fio_peer(path, total_bytes, request_bytes, args.threads),
        ]
        peers_here = [peer for peer in peers if peer is not None]
        print(
            f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}, Python "
            f"{platform.python_version()}, torch {torch.__version__}; {total_bytes // MIB} MiB in extents of "
            f"{args.extent_mib} MiB, {args.threads} threads, requests of {args.request_mib} MiB, "
            f"{'O_DIRECT' if store.is_direct else 'page cache'}, {args.rounds} rounds"
            f"{'' if peers[2] else '; fio is not installed'}"
        )
        for peer in peers_here:  # the first write of a file is slower: warm-up
            peer.run("write")
        for i in range(args.rounds):
            for mode in MODES:
                for peer in peers_here if i % 2 == 0 else reversed(peers_here):
                    peer.measure(mode)

        memory.zero_()
        for extent in extents:
            store.read(extent, memory[extent.offset : extent.offset + extent.num_bytes]).wait()
        is_exact = torch.equal(memory, content) or "LOST BYTES"
        store.close()
        os.close(fd)

    plain, rows = peers_here[1], []
    gib = total_bytes / 2**30
    for peer in peers_here:
        for mode in MODES:
            ratio = statistics.median(p / s for s, p in zip(peer.seconds[mode], plain.seconds[mode], strict=True))
            rows.append(
                {
                    "name": peer.name,
                    "mode": mode,
                    "gb_per_s": round(total_bytes / statistics.median(peer.seconds[mode]) / 1e9, 3),
                    "of_plain": round(ratio, 3),
                    "cpu_s_per_gib": round(statistics.median(peer.cpu_s[mode]) / gib, 3),
                }
            )
            print(
                f"{peer.name:12} {mode:6} {rows[-1]['gb_per_s']:6.2f} GB/s  x{ratio:.3f} of the plain loop  "
                f"{rows[-1]['cpu_s_per_gib']:.3f} CPU-s per GiB"
            )
    print(f"what was written came back: {is_exact}")
    if args.json:
        print(json.dumps({"benchmark": "store", "is_exact": is_exact is True, "rows": rows}))


if __name__ == "__main__":
    main()
