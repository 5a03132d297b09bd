"""The only place where a plan meets a model.

A wrapped model keeps its class, its names and its hooks. Two entries in its `__dict__` are memopt's: `forward`, a bound
method (deepcopy binds the copy's to the copy; pickle finds the class's own), and `_memopt`, the `Attachment`.
"""

from __future__ import annotations

import copy
import functools
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload

from memopt.errors import UnsupportedError
from memopt.policies.plan import Plan
from memopt.profiler.frames import paths_of
from memopt.profiler.profile import OpKey
from memopt.session import Session
from memopt.tape import Decisions, Fate, Recording, is_recording
from memopt.workload import tensors_of

ATTRIBUTE = "_memopt"

Planner = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], "Plan | None"]


class Attachment:
    """What a wrapped model carries: how its training forward is run.

    Args:
        planner: gives the plan for a forward's inputs; None: no plan could be made, drop whatever can be replayed.
        inner: the `forward` that the instance itself had before, if any.
    """

    def __init__(self, planner: Planner, session: Session, inner: Callable[..., Any] | None) -> None:
        self.planner, self.session, self.inner = planner, session, inner
        self._paths: dict[int, str] = {}
        self._resolved: tuple[Plan, Decisions] | None = None

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's forward, under the plan if this is a training forward that a plan can serve."""
        inner = self.inner or functools.partial(type(model).forward, model)
        if not _is_training_forward():
            return inner(*args, **kwargs)
        if (reason := _why_not()) is not None:
            self.session.note(f"a forward ran without its plan: {reason}")
            return inner(*args, **kwargs)
        inputs = tensors_of((args, kwargs))
        self.session.note_forward(time.perf_counter(), inputs)
        plan = self.planner(model, args, kwargs)
        state = self.session.follow(plan)
        if plan is not None and not plan.drops and (state is None or not state.is_in_forward):
            return inner(*args, **kwargs)
        decisions = self._decisions(plan)
        if not self._paths:
            self._paths = paths_of(model)
        boundaries = _blocks_of(model) if plan is None else frozenset()
        parameters, activations = (state.parameters, state.activations) if state is not None else (None, None)
        try:
            with Recording(decisions, self._paths, boundaries, inputs, parameters, activations):
                return inner(*args, **kwargs)
        finally:
            if parameters is not None:
                parameters.end_forward()

    def _decisions(self, plan: Plan | None) -> Decisions | None:
        if plan is None:
            return None
        if self._resolved is None or self._resolved[0] is not plan:
            self._resolved = (plan, decisions_of(plan))
            self._paths = {}
        return self._resolved[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        """For a deepcopy of the model: the same settings, a session of its own, nothing planned or measured yet."""
        session = self.session.for_copy(memo)
        for_copy = getattr(self.planner, "for_copy", None)
        if for_copy is not None:
            session.plan = session.profile = None
        planner = for_copy(session) if for_copy is not None else self.planner
        return Attachment(planner, session, copy.deepcopy(self.inner, memo))

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ())  # a pickled model is the plain model


def _is_training_forward() -> bool:
    """Whether autograd will keep tensors of this forward, and this thread does not plan or record already."""
    return (
        torch.is_grad_enabled()
        and not is_recording()
        and torch._C._functorch.peek_interpreter_stack() is None  # torch.func refuses saved-tensor hooks
        and torch.autograd.forward_ad._current_level < 0
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    )


def _why_not() -> str | None:
    """What of the caller's is around this forward that a plan would disturb; None if nothing is."""
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return "saved-tensor hooks are forbidden around it"
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return "the caller's own saved-tensor hooks are around it (save_on_cpu, checkpoint or the like)"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "the caller's own dispatch mode is around it (a FLOP counter or the like)"
    return None


def _blocks_of(model: nn.Module) -> frozenset[int]:
    """Modules (by identity) that stand in the outermost lists and sequences: their outputs are kept without a plan."""
    blocks: set[int] = set()
    stack = [model]
    while stack:
        module = stack.pop()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
            blocks.update(id(child) for child in module)
        else:
            stack.extend(module.children())
    return frozenset(blocks)


def decisions_of(plan: Plan) -> Decisions:
    """The plan's drops and moves by module and overload. Ops that this torch does not have can't come: left out."""
    fates: dict[OpKey, Fate] = {drop.key: Fate(drops=drop.positions) for drop in plan.drops}
    for move in plan.moves:
        fates[move.key] = fates.get(move.key, Fate())._replace(moves=move.positions)
    found: dict[str, dict[OpOverload, dict[int, Fate]]] = {}
    for key, fate in fates.items():
        op = _overload_named(key.op)
        if op is not None:
            found.setdefault(key.module, {}).setdefault(op, {})[key.call] = fate
    return found


def _overload_named(name: str) -> OpOverload | None:
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError:
        return None
    return found if isinstance(found, OpOverload) else None


@functools.cache
def _forward_of(cls: type[nn.Module]) -> Callable[..., Any]:
    """A `forward` for instances of `cls` that hands over to the attachment; signature and name are the class's own."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        attachment = self.__dict__.get(ATTRIBUTE)
        if attachment is None:
            return cls.forward(self, *args, **kwargs)
        return attachment.run(self, args, kwargs)

    forward.__name__ = "forward"  # pickle looks the method up by this name and finds the class's
    return forward


def attach(model: nn.Module, planner: Planner, session: Session) -> None:
    """Put memopt on the model. Raises UnsupportedError if it is there already or the model can't carry it."""
    if attachment_of(model) is not None:
        raise UnsupportedError(type(model).__name__, "memopt is on this model already; call session.remove() first")
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedError(
            type(model).__name__, "a scripted module runs no Python; wrap the module it was made from"
        )
    inner = model.__dict__.get("forward")
    model.__dict__[ATTRIBUTE] = Attachment(planner, session, inner)
    model.__dict__["forward"] = types.MethodType(_forward_of(type(model)), model)  # type: ignore[arg-type]


def detach(model: nn.Module) -> None:
    """Take memopt off the model; what it was before stands again. Does nothing if it is not there."""
    attachment = attachment_of(model)
    if attachment is None:
        return
    del model.__dict__[ATTRIBUTE], model.__dict__["forward"]
    if attachment.inner is not None:
        model.__dict__["forward"] = attachment.inner


def attachment_of(model: nn.Module) -> Attachment | None:
    """What memopt put on the model, or None."""
    found = model.__dict__.get(ATTRIBUTE)
    return found if isinstance(found, Attachment) else None


def apply(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Session:
    """Make the model train under the plan, in place. The returned session is also a context manager that undoes it.

    With a plan that has nothing to do, nothing is installed. Raises UnsupportedError for a model that carries memopt
    already or an optimizer that can't be stepped in buckets, StoreError if the plan's disk can't be used.
    """
    if not isinstance(plan, Plan):
        raise ValueError(f"apply takes a Plan first, not {type(plan).__name__}; memopt.plan(profile, budget) makes one")
    if not isinstance(model, nn.Module):
        raise ValueError(f"apply takes a torch.nn.Module, not {type(model).__name__}")
    session = Session(model, optimizer, detach)
    session.plan = plan
    if not plan.is_plain:
        attach(model, fixed(plan), session)
        try:
            session.follow(plan)
        except BaseException:
            session.remove()
            raise
    elif attachment_of(model) is not None:
        raise UnsupportedError(type(model).__name__, "memopt is on this model already; call session.remove() first")
    return session


def fixed(plan: Plan) -> Planner:
    """A planner that gives the same plan for all inputs."""
    return lambda model, args, kwargs: plan
