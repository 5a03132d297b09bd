"""Threads that each run their kernels alone, for work that is many small kernels in a row."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

_MOST = 4  # beyond, Python's own share of the work is what they wait for


class Team:
    """As many threads as torch has for one kernel, up to some; made at first use."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0

    @property
    def num(self) -> int:
        """How many there are; 1 where one thread per kernel, or very many, make them useless."""
        threads = torch.get_num_threads()
        return threads if 1 < threads <= _MOST else 1

    def run(self, work: Callable[[], None]) -> None:
        """Call `work` once in each thread and wait for all. Raises what the first of them raised."""
        futures: list[Future[None]] = [self._threads().submit(work) for _ in range(self.num)]
        errors = [e for future in futures if (e := future.exception()) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Let the threads go."""
        pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            pool.shutdown()

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None or self._pid != os.getpid():  # a fork has none of its parent's threads
            num = self.num
            started = threading.Barrier(num + 1)
            self._pool = ThreadPoolExecutor(num, "memopt-quant")
            self._pid = os.getpid()
            for _ in range(num):
                self._pool.submit(_begin, started)
            started.wait()
            torch.set_num_threads(num)  # what the new threads set is also what threads to come would take
        return self._pool


def _begin(started: threading.Barrier) -> None:
    torch.set_num_threads(1)  # of this thread's kernels
    torch.set_grad_enabled(False)
    started.wait()
