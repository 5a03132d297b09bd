"""Copies of a workload that a profile may run without leaving a trace on the user's objects.

A fake copy holds fake tensors: nothing is allocated. A real copy clones. Both are made by `copy.deepcopy`, so Python
state (counters, caches, tied weights) is the copy's own; hooks are rebuilt with copies of what they close over.
"""

from __future__ import annotations

import contextvars
import copy
import random
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_leaves

T = TypeVar("T")

_HOOK_DICTS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def deepcopies(objects: tuple[Any, ...], fake: FakeTensorMode | None) -> tuple[Any, ...]:
    """Deep copies of `objects` (one memo, so that what they share stays shared), with fake tensors if `fake` is
    given."""
    memo: dict[int, Any] = {}
    _enter_tensors(objects, memo, fake)
    with FakeCopyMode(fake) if fake is not None else nullcontext():
        made = copy.deepcopy(objects, memo)
        for x in made:
            if isinstance(x, nn.Module):
                _isolate_hooks(x, memo)
    return made


def _enter_tensors(objects: tuple[Any, ...], memo: dict[int, Any], fake: FakeTensorMode | None) -> None:
    """Enter copies of the tensors that are easily found into the memo: deepcopy refuses those that are not leaves, and
    torch's own conversion to fake tensors takes a millisecond for each."""
    storages: dict[int, torch.Tensor] = {}
    for x in objects:
        found: list[Any] = tree_leaves(x)
        if isinstance(x, nn.Module):
            found = [*x.parameters(), *x.buffers()]
        elif isinstance(x, torch.optim.Optimizer):
            found = [t for group in x.param_groups for t in group["params"]]
            found += [t for state in x.state.values() for t in state.values()]
        for t in found:
            if not isinstance(t, torch.Tensor) or id(t) in memo:
                continue
            if fake is None or type(t) not in (torch.Tensor, nn.Parameter) or t.layout is not torch.strided:
                if not t.is_leaf:
                    memo[id(t)] = _converted(t, fake)
                continue
            memo[id(t)] = _fake_like(t, storages, fake)
    memo[id(memo)] = [*memo.values()]  # as deepcopy does: keeps them alive


def _converted(t: torch.Tensor, fake: FakeTensorMode | None) -> torch.Tensor:
    own = t.detach()
    made = fake.from_tensor(own, static_shapes=True) if fake is not None else own.clone()
    return made.requires_grad_(t.requires_grad)


def _fake_like(t: torch.Tensor, storages: dict[int, torch.Tensor], fake: FakeTensorMode) -> torch.Tensor:
    """A fake tensor of the same geometry; tensors that share a storage do so here too."""
    storage = t.untyped_storage()
    with torch.no_grad(), in_kernel_invocation_manager(fake):
        flat = storages.get(storage._cdata)
        if flat is None:
            flat = storages[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
        meta = torch.empty(0, dtype=t.dtype, device="meta").set_(
            flat.untyped_storage(), t.storage_offset(), t.size(), t.stride()
        )
    # A model on the meta device is one for the CPU that was not filled.
    made: torch.Tensor = FakeTensor(fake, meta, torch.device("cpu") if t.device.type == "meta" else t.device)
    if isinstance(t, nn.Parameter):
        made = nn.Parameter(made, requires_grad=t.requires_grad)
        made.__dict__.update({k: v for k, v in t.__dict__.items() if k not in made.__dict__})
        return made
    return made.requires_grad_(t.requires_grad)


def _isolate_hooks(model: nn.Module, memo: dict[int, Any]) -> None:
    """Give the copy's hooks their own closures: a user's hook that counts or collects must not see a profile."""
    for module in model.modules():
        for name in _HOOK_DICTS:
            hooks = module.__dict__.get(name) or {}
            for key in list(hooks):
                own = _isolated(hooks[key], memo)
                if own is None:
                    del hooks[key]
                else:
                    hooks[key] = own


def _isolated(hook: Callable[..., Any], memo: dict[int, Any]) -> Callable[..., Any] | None:
    """A hook that acts on copies of all that it can change; None if they can't be copied."""
    if not isinstance(hook, types.FunctionType):
        return hook  # deepcopy has already copied a bound method's object or a callable's state
    try:
        cells = tuple(types.CellType(copy.deepcopy(c.cell_contents, memo)) for c in hook.__closure__ or ())
        scope = dict(hook.__globals__)
        for name in hook.__code__.co_names:
            if isinstance(scope.get(name), list | dict | set | bytearray):
                scope[name] = copy.deepcopy(scope[name], memo)
        own = types.FunctionType(
            hook.__code__, scope, hook.__name__, copy.deepcopy(hook.__defaults__, memo), cells or None
        )
        own.__kwdefaults__ = copy.deepcopy(hook.__kwdefaults__, memo)
    except Exception:
        return None
    return own


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Put back the state of torch's, Python's and numpy's global generators afterwards."""
    cpu, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        random.setstate(python)
        np.random.set_state(numpy)
        if devices:
            torch.cuda.set_rng_state_all(devices)


def in_own_context(f: Callable[[], T]) -> T:
    """Call `f` so that context variables that it sets are not seen outside."""
    return contextvars.copy_context().run(f)


@contextmanager
def autocast_without_cache(device_type: str) -> Iterator[None]:
    """Autocast as the caller has it, but without its cache of cast weights, which a profile must not fill."""
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    with torch.autocast(device_type, dtype=torch.get_autocast_dtype(device_type), cache_enabled=False):
        yield
