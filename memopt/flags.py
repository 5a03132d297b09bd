"""Global switches that decide which kernel an op takes, and so its bits: a replay runs under those of its forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Flags = tuple[Any, ...]

_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_num_threads, torch.set_num_threads),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_deterministic_algorithms, torch._C._set_deterministic_algorithms),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_cudnn_allow_tf32, torch._C._set_cudnn_allow_tf32),
    (torch._C._get_float32_matmul_precision, torch._C._set_float32_matmul_precision),
)
_GETTERS = tuple(get for get, _ in _SWITCHES)


def backend_flags() -> Flags:
    """The switches as they are now."""
    return tuple([get() for get in _GETTERS])


@contextmanager
def under_flags(flags: Flags) -> Iterator[None]:
    """Set the switches, and put them back afterwards."""
    before = backend_flags()
    _set(flags, before)
    try:
        yield
    finally:
        _set(before, flags)


def _set(flags: Flags, now: Flags) -> None:
    for (_, put), value, old in zip(_SWITCHES, flags, now, strict=True):
        if value != old:
            put(value)
