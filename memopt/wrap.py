"""`wrap_model` and `wrap_optimizer`: a budget on a model, planned when its first training batch is there."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from memopt.api import Budget, check_levers, check_nonfinite, plan, with_peak
from memopt.apply import attach, attachment_of, detach
from memopt.errors import InfeasibleBudgetError, StoreError, UnsupportedError
from memopt.policies.plan import Plan
from memopt.policies.quantize import patterns_of
from memopt.policies.solve import least_peak_bytes
from memopt.profiler.profile import Profile
from memopt.profiler.step import profile_step
from memopt.quant.optimizer import codecs_of
from memopt.session import Session
from memopt.stepping import why_not_in_parts
from memopt.units import parse_budget
from memopt.workload import assumed_loss

logger = logging.getLogger("memopt")

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


@dataclass(frozen=True, slots=True)
class _Case:
    """What a plan was made for: input sizes and what else changes the memory of a step."""

    shapes: tuple[tuple[int, ...], ...]
    others: tuple[Any, ...]  # dtypes, training flag, trainable parameters, gradients that are there
    plan: Plan | None = None

    def serves(self, other: _Case) -> bool:
        """Whether a plan for this case is one for the other: alike, and no size larger."""
        return (
            self.others == other.others
            and len(self.shapes) == len(other.shapes)
            and all(
                len(a) == len(b) and all(m >= n for m, n in zip(a, b, strict=True))
                for a, b in zip(self.shapes, other.shapes, strict=True)
            )
        )


class LazyPlanner:
    """Plans at a training forward whose inputs no earlier plan serves, from the real inputs, by a fake profile."""

    def __init__(
        self,
        session: Session,
        budget: Budget,
        allow: Iterable[str] | None,
        nvme: str | None,
        host_budget: int | str | None,
        keep_fp32: tuple[str, ...],
        nonfinite: str,
    ) -> None:
        self.session, self.budget, self.nvme, self.host_budget = session, budget, nvme, host_budget
        self.keep_fp32, self.nonfinite = keep_fp32, nonfinite
        self.asked, self.allow = allow, check_levers(allow, nvme, host_budget)
        self.cases: list[_Case] = []
        self.is_planning = False

    def for_copy(self, session: Session) -> LazyPlanner:
        """For a deepcopy of the model: the same settings, nothing planned."""
        return LazyPlanner(
            session, self.budget, self.asked, self.nvme, self.host_budget, self.keep_fp32, self.nonfinite
        )

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan | None:
        case = _case_of(model, args, kwargs)
        for known in self.cases:
            if known.serves(case):
                return known.plan
        made = self._plan(model, args, kwargs, case)
        # The newest first: it is the largest of its kind, or another kind.
        self.cases = [replace(case, plan=made), *(c for c in self.cases if not case.serves(c))]
        return made

    def _plan(self, model: nn.Module, args: Any, kwargs: Any, case: _Case) -> Plan | None:
        session = self.session
        attachment = attachment_of(model)
        assert attachment is not None
        try:
            profile = self._profile(model, args, kwargs, case)
            made = self._planned(profile)
        except (InfeasibleBudgetError, StoreError):
            raise
        except Exception as e:
            note = f"no plan for {type(model).__name__}: {_first_line(e)}. Everything that can be is recomputed."
            if note not in session.notes:
                logger.warning("memopt: %s", note)
                session.notes.append(note)
            return None
        session.profile, session.plan = profile, replace(made, input_shapes=case.shapes)
        logger.info("%s", session.report())
        return session.plan

    def _planned(self, profile: Profile) -> Plan:
        optimizer, allow, nvme = self.session.optimizer, self.allow, self.nvme
        if nvme is None:
            allow -= {"offload"}
        elif optimizer is not None and (reason := why_not_in_parts(optimizer)) is not None:
            self.session.note(f"nothing is offloaded: {type(optimizer).__name__} can't be stepped in buckets: {reason}")
            allow, nvme = allow - {"offload"}, None
        if "quantize" in allow and optimizer is not None:
            try:
                codecs_of(optimizer)
            except UnsupportedError as e:
                self.session.note(f"optimizer states stay as they are: {e}")
                allow -= {"quantize"}
        host_budget = self.host_budget if nvme is not None else None
        return plan(
            profile,
            self.budget,
            allow,
            nvme=nvme,
            host_budget=host_budget,
            keep_fp32=self.keep_fp32,
            nonfinite=self.nonfinite,
        )

    def _profile(self, model: nn.Module, args: Any, kwargs: Any, case: _Case) -> Profile:
        has_gradients = bool(case.others[-1])
        detached = _without_memopt(model)
        with detached:
            profile = profile_step(
                model,
                args,
                kwargs,
                assumed_loss,
                self.session.optimizer,
                mode="fake",
                micro_batches=2 if has_gradients else 1,
                keeps_output=True,
            )
        profile = with_peak(profile)
        return replace(profile, min_bytes=least_peak_bytes(profile))


class _without_memopt:
    """The model without memopt's entries while it is copied."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.entries = {k: self.model.__dict__.pop(k) for k in ("forward", "_memopt")}
        if self.entries["_memopt"].inner is not None:
            self.model.__dict__["forward"] = self.entries["_memopt"].inner

    def __exit__(self, *exception: Any) -> None:
        self.model.__dict__.update(self.entries)


def _case_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Case:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    num_trainable = num_gradients = 0
    for p in model.parameters():
        if p.requires_grad:
            num_trainable += 1
            num_gradients += p.grad is not None
    return _Case(
        shapes=tuple(tuple(t.shape) for t in tensors),
        others=(
            tuple(t.dtype for t in tensors),
            tuple(t.requires_grad for t in tensors),
            model.training,
            torch.is_autocast_enabled(tensors[0].device.type) if tensors else False,
            num_trainable,
            num_gradients > 0,
        ),
    )


def _first_line(e: BaseException) -> str:
    text = str(e).strip().splitlines()
    return f"{type(e).__name__}: {text[0] if text else ''}"[:300]


@overload
def wrap_model(
    model: M,
    budget: Budget,
    allow: Iterable[str] | None = None,
    *,
    nvme: str | None = None,
    host_budget: int | str | None = None,
    keep_fp32: str | Iterable[str] = (),
    nonfinite: str = "skip",
) -> M: ...
@overload
def wrap_model(
    model: None = None,
    budget: Budget = ...,
    allow: Iterable[str] | None = None,
    *,
    nvme: str | None = None,
    host_budget: int | str | None = None,
    keep_fp32: str | Iterable[str] = (),
    nonfinite: str = "skip",
) -> Callable[[Callable[..., M]], Callable[..., M]]: ...


def wrap_model(
    model: Any = None,
    budget: Budget | None = None,
    allow: Iterable[str] | None = None,
    *,
    nvme: str | None = None,
    host_budget: int | str | None = None,
    keep_fp32: str | Iterable[str] = (),
    nonfinite: str = "skip",
) -> Any:
    """Keep a model's training within a budget: `wrap_model(model, budget="6GiB")` returns the same object.

    Without a model it is a decorator for a class or a factory: `@wrap_model(budget="6GiB")`. The plan is made at the
    first training forward, from its inputs, and again for larger ones. All arguments and the errors are those of
    `memopt.plan`; InfeasibleBudgetError comes from that first forward.

    Raises ValueError for a budget or lever that is not understood, UnsupportedError for a model that carries memopt
    already.
    """
    if model is None or (isinstance(model, type) or (not isinstance(model, nn.Module) and callable(model))):
        if model is not None:
            raise ValueError('wrap_model takes a module, or as a decorator a budget: @memopt.wrap_model(budget="6GiB")')
        budget = _check(budget, allow, nvme, host_budget, nonfinite)
        wrap = functools.partial(
            wrap_model,
            budget=budget,
            allow=allow,
            nvme=nvme,
            host_budget=host_budget,
            keep_fp32=patterns_of(keep_fp32),
            nonfinite=nonfinite,
        )
        return functools.partial(_decorated, wrap=wrap)
    if not isinstance(model, nn.Module):
        raise ValueError(f"wrap_model takes a torch.nn.Module, not {type(model).__name__}")
    budget = _check(budget, allow, nvme, host_budget, nonfinite)
    session = Session(model, None, detach)
    attach(model, LazyPlanner(session, budget, allow, nvme, host_budget, patterns_of(keep_fp32), nonfinite), session)
    return model


def _check(
    budget: Budget | None,
    allow: Iterable[str] | None,
    nvme: str | None,
    host_budget: int | str | None,
    nonfinite: str,
) -> Budget:
    """The budget, if it and the levers can be understood."""
    if budget is None:
        raise ValueError('wrap_model needs a budget: bytes, "24GiB", "80%", "min" or a function of the profile')
    if not callable(budget) and not (isinstance(budget, str) and budget.strip().lower() == "min"):
        parse_budget(budget, 2**40)  # a percentage is of a device that is known only later
    check_levers(allow, nvme, host_budget)
    check_nonfinite(nonfinite)
    return budget


def _decorated(target: Callable[..., Any], *, wrap: Callable[[Any], Any]) -> Callable[..., Any]:
    if inspect.isclass(target):
        if not issubclass(target, nn.Module):
            raise ValueError(f"@wrap_model decorates a torch.nn.Module class or a factory, not {target.__name__}")
        original = target.__init__

        @functools.wraps(original)
        def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if type(self) is target:  # a subclass is wrapped where it is decorated itself
                wrap(self)

        target.__init__ = __init__  # type: ignore[method-assign]
        return target

    @functools.wraps(target)
    def factory(*args: Any, **kwargs: Any) -> Any:
        return wrap(target(*args, **kwargs))

    return factory


def wrap_optimizer(optimizer: O, model: nn.Module) -> O:
    """Count the optimizer's states and its step in the plans of a wrapped model; returns the same object.

    Raises ValueError for what is not an optimizer, or a model that `wrap_model` did not see.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"wrap_optimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    session = session_of(model)
    if session is None:
        raise UnsupportedError(
            type(model).__name__, "memopt is not on this model: wrap_model(model, budget=...) comes first"
        )
    if session.optimizer is not None and session.optimizer is not optimizer:
        session.notes.append(
            f"a second optimizer ({type(optimizer).__name__}) took the place of "
            f"{type(session.optimizer).__name__} in the plan"
        )
    session.optimizer = optimizer
    attachment = attachment_of(model)
    if attachment is not None and isinstance(attachment.planner, LazyPlanner):
        attachment.planner.cases.clear()
    return optimizer


def session_of(model: nn.Module) -> Session | None:
    """The session of a wrapped model, or None."""
    attachment = attachment_of(model)
    return attachment.session if attachment is not None else None
