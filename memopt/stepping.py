"""Stepping a user's own optimizer object in parts, with all that stands around a step happening once.

A torch optimizer steps the parameters in its `param_groups`. Shown a part of them at a time, it needs a part of its
state at a time. Class, schedulers, hyper-parameters, hooks and `state_dict` stay what they were. That the results are
the same is not believed but tried: `why_not_in_parts` steps a few small parameters of its own both ways.
"""

from __future__ import annotations

import contextlib
import copy
import random
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

ATTRIBUTE = "_memopt_step"

Core = Callable[[Optimizer], Any]  # one step of the parameters that the optimizer shows


class Stepper(Protocol):
    """What steps an optimizer instead of its class."""

    def step(self, closure: Callable[[], Any] | None) -> Any:
        """One step. Returns the closure's value, None without one."""

    def loaded(self) -> None:
        """The optimizer has got new states from a checkpoint."""


class Attached:
    """`stepper` in the place of `optimizer.step`, until `remove`."""

    def __init__(self, optimizer: Optimizer, stepper: Stepper) -> None:
        self.optimizer, self.stepper = optimizer, stepper
        self._before = optimizer.__dict__.get("step")
        optimizer.__dict__[ATTRIBUTE] = stepper
        optimizer.__dict__["step"] = types.MethodType(_step, optimizer)
        self._load_hook = optimizer.register_load_state_dict_post_hook(_loaded)

    def remove(self) -> bool:
        """Put the object back. Returns whether there was anything to do."""
        optimizer = self.optimizer
        if optimizer.__dict__.get(ATTRIBUTE) is not self.stepper:
            return False
        self._load_hook.remove()
        del optimizer.__dict__[ATTRIBUTE]
        step = optimizer.__dict__.get("step")
        if getattr(step, "__func__", None) is _step:
            if self._before is not None:
                optimizer.__dict__["step"] = self._before
            else:
                del optimizer.__dict__["step"]
        # else a scheduler has wrapped ours: `_step` goes on to the class's own step when it finds no attachment
        return True


def _stepped(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    return self.__dict__[ATTRIBUTE].step(closure)


def _step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of `optimizer.step`. With torch's hooks around the whole, and what a scheduler counts."""
    if self.__dict__.get(ATTRIBUTE) is None:
        return type(self).step(self, *args, **kwargs)
    self._opt_called = True  # type: ignore[attr-defined]  # what a scheduler that was made before would note
    return Optimizer.profile_hook_step(_stepped)(self, *args, **kwargs)


_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers ask for it


def _loaded(optimizer: Optimizer) -> None:
    stepper = optimizer.__dict__.get(ATTRIBUTE)
    if stepper is not None:
        stepper.loaded()


def value_of(closure: Callable[[], Any] | None) -> Any:
    """What a step's closure returns, with gradients enabled as torch's own optimizers do it; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def core_step(optimizer: Optimizer) -> Core:
    """The class's step without what torch wraps around it (hooks, profiling), which happens once per step."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return step


def is_torchs_own(optimizer: Optimizer) -> bool:
    """Whether the class is one of torch: its step writes through no `.data`, and keeps nothing on the object."""
    return type(optimizer).__module__.startswith("torch.optim")


class Groups:
    """An optimizer's param_groups, stepped in parts. What a step changes in a group's settings is changed once.

    [Note: Group counters] Some optimizers count steps in their groups. Each bucket sees what the first one saw, and the
    group keeps what the last one left, so the count moves by one. Parameters without a gradient, and groups of them
    only, come with the first bucket.
    """

    def __init__(self, optimizer: Optimizer, core: Core | None = None) -> None:
        self.optimizer, self.groups = optimizer, optimizer.param_groups
        self.all = [group["params"] for group in self.groups]
        self.before = [{k: v for k, v in group.items() if k != "params"} for group in self.groups]
        self._shown: set[int] = set()
        self._is_first = True
        self._core = core if core is not None else core_step(optimizer)

    def step(self, parameters: Sequence[torch.Tensor], is_last: bool) -> None:
        """Step these of the groups' parameters, as one of several parts."""
        stepped, is_first = {id(p) for p in parameters}, self._is_first
        shown = {
            i: [p for p in params if id(p) in stepped or (is_first and p.grad is None)]
            for i, params in enumerate(self.all)
        }
        self.step_shown({i: params for i, params in shown.items() if params or (is_first and not self.all[i])}, is_last)

    def step_shown(self, shown: Mapping[int, list[torch.Tensor]], is_last: bool) -> None:
        """Step these, which stand for parameters of the groups with these indices, as one of several parts."""
        for i, params in shown.items():
            group = self.groups[i]
            if i in self._shown:
                group.clear()
                group.update(self.before[i])
            self._shown.add(i)
            group["params"] = params
        self.optimizer.param_groups = [self.groups[i] for i in shown]
        with _hooks_in_part(self.optimizer, self._is_first, is_last):
            self._core(self.optimizer)
        self._is_first = False

    def settle(self, settings: Mapping[int, dict[str, Any]]) -> None:
        """Take over the settings that a step elsewhere, on a copy of the optimizer, has left."""
        for i, found in settings.items():
            self.groups[i].update(found)
            self._shown.add(i)

    def restore(self) -> None:
        self.optimizer.param_groups = self.groups
        for group, params in zip(self.groups, self.all, strict=True):
            group["params"] = params


@contextlib.contextmanager
def _hooks_in_part(optimizer: Optimizer, is_first: bool, is_last: bool) -> Iterator[None]:
    """A step that calls the step of its base runs torch's hooks in there as well: once, not in each part."""
    hidden = {"_optimizer_step_pre_hooks": not is_first, "_optimizer_step_post_hooks": not is_last}
    before = {name: optimizer.__dict__.get(name) for name, is_hidden in hidden.items() if is_hidden}
    optimizer.__dict__.update((name, OrderedDict()) for name in before)
    try:
        yield
    finally:
        optimizer.__dict__.update(before)


# Whether an optimizer can be stepped in parts


def why_not_in_parts(optimizer: Optimizer) -> str | None:
    """Why this optimizer can't be stepped in parts; None if it can."""
    step = optimizer.__dict__.get("step")
    if step is not None and ATTRIBUTE not in optimizer.__dict__ and not hasattr(step, "_wrapped_by_lr_sched"):
        return "its `step` was replaced on the object, and stepping it in parts would skip that"
    if not is_per_parameter(optimizer):
        return "stepped in parts it gives other numbers (it uses all parameters together, or keeps state of its own)"
    return None


def is_per_parameter(optimizer: Optimizer) -> bool:
    """Whether stepping a few parameters one by one gives the same bits as stepping them together; tried on copies."""
    try:
        with same_dice():
            together, parts = (_probe(optimizer, in_parts) for in_parts in (False, True))
    except Exception:
        return False
    return len(together) == len(parts) and all(torch.equal(a, b) for a, b in zip(together, parts, strict=True))


@contextlib.contextmanager
def same_dice() -> Iterator[None]:
    """Put the random generators back afterwards."""
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(generators[0])
        random.setstate(generators[1])
        np.random.set_state(generators[2])


def roll_dice_again() -> None:
    """Seed the random generators: what is tried twice finds the same ones. Inside `same_dice`."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def _probe(optimizer: Optimizer, in_parts: bool) -> list[torch.Tensor]:
    """Parameters and states after three steps of a copy of `optimizer` on small parameters of its own."""
    own = blank_copy(optimizer)
    roll_dice_again()
    generator = torch.Generator().manual_seed(0)
    parameters: list[torch.Tensor] = []
    for group in own.param_groups:
        dtype = next((p.dtype for p in group["params"] if p.is_floating_point()), torch.float32)
        group["params"] = [
            torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in ((4, 3), (5,), (2, 2))
        ]
        parameters += group["params"]
    for scale in (1.0, 1e3, 1e-3):  # a bound on all gradients together may hold back large ones only
        for p in parameters:
            p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)
        groups = Groups(own)
        parts = [[p] for p in parameters] if in_parts else [parameters]
        try:
            for part in parts:
                groups.step(part, is_last=part is parts[-1])
        finally:
            groups.restore()
    states = [t for p in parameters for t in own.state[p].values() if isinstance(t, torch.Tensor)]
    return [*parameters, *states]


def blank_copy(optimizer: Optimizer) -> Optimizer:
    """A new object of the same class with the same settings, and no state.

    Raises ValueError if the object keeps tensors outside of `state`: they would be of the whole, not of a bucket.
    """
    own = object.__new__(type(optimizer))
    for name, x in optimizer.__dict__.items():
        if name in ("step", ATTRIBUTE, "grad_scale", "found_inf"):
            continue
        if name not in _OF_EVERY_OPTIMIZER:
            if any(isinstance(t, torch.Tensor) for t in tree_leaves(x)) or isinstance(x, dict | list | set):
                raise ValueError(f"{type(optimizer).__name__}.{name} keeps state of its own")
            x = copy.deepcopy(x)
        own.__dict__[name] = x
    own.__dict__.update(
        state=defaultdict(dict),
        param_groups=[
            {k: v if k == "params" else _own_setting(v) for k, v in group.items()} for group in optimizer.param_groups
        ],
    )
    return own


def _own_setting(x: Any) -> Any:
    """A setting may be a tensor or a list, which a step must not share with the original."""
    return x.detach().clone() if isinstance(x, torch.Tensor) else copy.deepcopy(x)


_OF_EVERY_OPTIMIZER = frozenset(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).__dict__)
