"""A memo of what ops return under fake tensors: torch works out a fake result in about 250 us, this one in 40.

The k-th layer of a model runs the same ops on the same shapes as the first. The memo knows an op by its overload and
the geometry of its arguments, and repeats the geometry of the result. Whatever it does not understand (constants,
tensors that are not fake, results that share storage among themselves) takes torch's own way each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from memopt.profiler.ops import facts_of, tensors_in

_PRIMITIVES = (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_DEVICE_OF = torch.ops.prim.device.default


@dataclass(frozen=True, slots=True)
class _Fresh:
    """A result with a storage of its own."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How to make the result again: fresh tensors, views by torch's own view kernels, or the written argument
    itself."""

    fresh: tuple[_Fresh, ...] = ()
    is_view: bool = False
    argument: int = -1
    container: type | None = None  # tuple or list of results; None for a single one


class GeometryMemo:
    """Calls ops on the fake tensors of one `FakeTensorMode`."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self._fake = fake
        self._recipes: dict[Any, _Recipe | None] = {}

    def __call__(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of `func`, as FakeTensorMode would give it. Raises what it raises."""
        if func is _DEVICE_OF and type(args[0]) is FakeTensor:
            return args[0].fake_device
        key = self._key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        if key not in self._recipes:
            out = func(*args, **kwargs)
            self._recipes[key] = self._recipe_of(func, args, kwargs, out)
            return out
        recipe = self._recipes[key]
        return func(*args, **kwargs) if recipe is None else self._repeat(recipe, func, args, kwargs)

    def _key(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts: list[Any] = [func]
        has_tensor = False
        stack: list[Any] = [*args, *kwargs.values()]
        parts.append(len(args))
        parts.extend(kwargs)
        while stack:
            x = stack.pop()
            kind = type(x)
            if kind is FakeTensor:
                if x.constant is not None or x.fake_mode is not self._fake or x.layout is not torch.strided:
                    return None
                has_tensor = True
                parts.append((x.shape, x.stride(), x.storage_offset(), x.dtype, x.fake_device, x.is_conj(), x.is_neg()))
            elif isinstance(x, list | tuple):
                parts.append(len(x))
                stack.extend(x)
            elif isinstance(x, _PRIMITIVES):
                parts.append((kind, x))
            else:
                return None
        if not has_tensor and not kwargs:
            return None
        return tuple(parts)

    def _recipe_of(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> _Recipe | None:
        facts = facts_of(func)
        results = out if isinstance(out, list | tuple) else [out]
        if not all(type(t) is FakeTensor and t.layout is torch.strided and t.constant is None for t in results):
            return None
        if facts.is_mutable:
            same = [i for i, a in enumerate(args) if len(results) == 1 and a is results[0]]
            return _Recipe(argument=same[0]) if same else None
        inputs = {t.untyped_storage()._cdata for t in tensors_in((args, tuple(kwargs.values())))}
        storages = [t.untyped_storage()._cdata for t in results]
        container = type(out) if isinstance(out, list | tuple) else None
        if container not in (None, list, tuple):
            return None
        if all(s in inputs for s in storages):
            return _Recipe(is_view=True, container=container)
        if len(set(storages)) < len(storages) or inputs & set(storages):
            return None
        fresh = tuple(_Fresh(tuple(t.shape), t.stride(), t.dtype, t.fake_device) for t in results)
        recipe = _Recipe(fresh=fresh, container=container)
        again = self._repeat(recipe, func, args, kwargs)
        made = again if isinstance(again, list | tuple) else [again]
        same_bytes = all(
            a.untyped_storage().nbytes() == b.untyped_storage().nbytes() and b.storage_offset() == 0
            for a, b in zip(made, results, strict=True)
        )
        return recipe if same_bytes else None

    def _repeat(self, recipe: _Recipe, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if recipe.argument >= 0:
            return args[recipe.argument]
        with in_kernel_invocation_manager(self._fake):
            if recipe.is_view:
                out = func(*args, **kwargs)
                raw = list(out) if recipe.container else [out]
                device = next(tensors_in(args)).fake_device  # type: ignore[attr-defined]
                devices = [device] * len(raw)
            else:
                raw = [torch.empty_strided(f.size, f.stride, dtype=f.dtype, device="meta") for f in recipe.fresh]
                devices = [f.device for f in recipe.fresh]
        results = [FakeTensor(self._fake, t, d) for t, d in zip(raw, devices, strict=True)]
        return recipe.container(results) if recipe.container else results[0]
