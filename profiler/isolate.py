"""Run something in a forked child and bring back only its result: no trace of it stays in this process.

[Note: Why a fork] A fake step runs the user's forward. Deep copies keep its tensors and modules apart, but a forward
may also take from an iterator, count in a global, fill a cache or append to a list that a hook closes over. A child has
all of that by copy-on-write, and takes its changes with it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import time
import warnings
from collections.abc import Callable
from typing import NoReturn, TypeVar

import torch

T = TypeVar("T")

TIMEOUT_S = 300.0


class ChildError(RuntimeError):
    """The child could not be made, did not answer, or its result could not be brought back."""


def can_fork(device_type: str) -> bool:
    """Whether a child can do fake work for this device: CUDA does not survive a fork."""
    return hasattr(os, "fork") and device_type == "cpu"


def in_fork(f: Callable[[], T], timeout_s: float = TIMEOUT_S) -> T:
    """The result of `f()`, called in a forked child. What `f` raises is raised here.

    Raises ChildError if the fork failed, the child died or did not answer within `timeout_s` seconds.
    """
    read_fd, write_fd = os.pipe()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads: the child runs none of their code
            pid = os.fork()
    except OSError as e:
        os.close(read_fd)
        os.close(write_fd)
        raise ChildError(f"fork failed: {e}") from e
    if pid == 0:
        _run_child(f, read_fd, write_fd)
    os.close(write_fd)
    try:
        data = _read_all(read_fd, time.monotonic() + timeout_s)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.close(read_fd)
        os.waitpid(pid, 0)
    if not data:
        raise ChildError("the child ended without an answer")
    is_result, value = pickle.loads(data)
    if is_result:
        return value  # type: ignore[no-any-return]
    raise value


def _read_all(fd: int, deadline_s: float) -> bytes:
    chunks: list[bytes] = []
    poll = select.poll()  # select() refuses descriptors above 1023
    poll.register(fd, select.POLLIN)
    while True:
        if not poll.poll(1e3 * max(0.0, deadline_s - time.monotonic())):
            raise ChildError("the child did not answer in time")
        chunk = os.read(fd, 1 << 20)
        if not chunk:
            return b"".join(chunks)
        chunks.append(chunk)


def _run_child(f: Callable[[], object], read_fd: int, write_fd: int) -> NoReturn:
    """The child's whole life. It never returns and runs no exit handlers: those are its parent's."""
    try:
        os.close(read_fd)
        gc.disable()  # finalizers of the parent's objects are the parent's too
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(nowhere, fd)
        torch.set_num_threads(1)  # the pool's threads are not here
        try:
            answer = pickle.dumps((True, f()))
        except BaseException as e:
            answer = _dumped(e)
        view = memoryview(answer)
        while view:
            view = view[os.write(write_fd, view) :]
    finally:
        os._exit(0)


def _dumped(e: BaseException) -> bytes:
    try:
        data = pickle.dumps((False, e))
        pickle.loads(data)
    except Exception:
        data = pickle.dumps((False, ChildError(f"{type(e).__name__}: {e}")))
    return data
