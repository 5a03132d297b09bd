"""The one training loop that every situation runs in, plainly or with `apply` changing its model and optimizer.

A situation is a module with `build() -> Case`. `run(build)` is the plain run and says what must come out;
`run(build, apply)` is the same loop after `apply(case)` has changed the case in place. `differences(plain, ours)` names
what is not the same, bit for bit.
"""

import copy
import gc
import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Required, TypedDict

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


class Case(TypedDict, total=False):
    """What a situation is made of. `apply` may change any of it before the training starts."""

    model: Required[nn.Module]
    batch: Required[tuple[tuple[Any, ...], dict[str, Any]]]  # args and kwargs of one training forward
    loss: Required[Callable[[Any], Tensor] | None]  # output of the model -> scalar; None where `step` needs none
    optimizer: Required[Callable[[list[nn.Parameter]], Optimizer] | None]  # trainable parameters -> optimizer
    step: Callable[[Any, Any, int], Tensor | float]  # its own training step (model, optimizer, i) -> loss
    steps: int  # training steps, 3 unless stated
    extra: Callable[[Any], Any]  # further values that must be equal, read from the trained model
    expect: Any  # what `extra` gives in the plain run: without it, the situation did not arise
    info: Callable[[Any], Any]  # facts about the plain run, not compared
    accept: Callable[["Result"], bool]  # where more than one outcome is right: decides in place of equality
    wrap: Callable[[Any], Any]  # how to treat a further model that the step makes; `apply` may replace it
    resume: bool  # c03 only: False gives the uninterrupted run
    rewrap: Callable[[Callable[..., Optimizer]], Callable[..., Optimizer]]  # c11 only: applied to later factories


class Result(TypedDict, total=False):
    """What a run gives. Every field but `info` is compared, or `accepted` alone where the case has an `accept`."""

    losses: Required[list[float]]
    sha: Required[str]  # of the final state_dict
    grads_sha: Required[str]  # of the final gradients, None included
    rng: Required[float]  # the next draw of the torch generator, then Python's and numpy's
    pyrng: Required[float]
    nprng: Required[float]
    left_on: Required[list[str]]  # modes and hooks that are still installed after the run
    extra: Any
    info: Any
    accepted: bool


def run(build: Callable[[], Case], apply: Callable[[Case], object] | None = None) -> Result:
    """Trains one freshly built situation and returns what came out; process-wide settings are as before afterwards."""
    with _isolated():
        torch.set_num_threads(1)
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        case = build()
        case.setdefault("wrap", lambda model: model)
        if apply is not None:
            apply(case)
        model = case["model"]
        losses = _train(case)
        result = Result(
            losses=losses,
            sha=_sha({k: v for k, v in model.state_dict().items() if torch.is_tensor(v)}),
            grads_sha=_sha({name: p.grad for name, p in model.named_parameters()}),
            rng=float(torch.rand(())),
            pyrng=random.random(),
            nprng=float(np.random.rand()),
            left_on=[],
        )
        if "extra" in case:
            result["extra"] = copy.deepcopy(case["extra"](model))  # a later run must not write into it
        if "expect" in case and apply is None:
            assert result["extra"] == case["expect"], f"not the situation: {result['extra']} != {case['expect']}"
        if "info" in case:
            result["info"] = case["info"](model)
        if "accept" in case:
            result["accepted"] = bool(case["accept"](result))
        result["left_on"] = _left_on()
        return result


def differences(plain: Result, ours: Result) -> list[str]:
    """Tells each compared field that is not the same bit for bit; empty where the situation is handled."""
    if "accepted" in plain:
        return [] if ours.get("accepted") else [f"not accepted: {ours}"]
    found = dict(ours)
    return [
        f"{field}: plain {value}, ours {found.get(field)}"
        for field, value in plain.items()
        if field != "info" and found.get(field) != value
    ]


def _train(case: Case) -> list[float]:
    model, (args, kwargs) = case["model"], case["batch"]
    make, step, losses = case["optimizer"], case.get("step"), []
    optimizer = make([p for p in model.parameters() if p.requires_grad]) if make else None
    for i in range(case.get("steps", 3)):
        if step is not None:
            losses.append(float(step(model, optimizer, i)))
            continue
        if optimizer is not None:
            optimizer.zero_grad()
        assert case["loss"] is not None, "a case without `step` needs a `loss`"
        loss = case["loss"](model(*args, **kwargs))
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _sha(tensors: dict[str, Tensor | None]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(name.encode())
        if t is None:
            continue
        t = t.detach().cpu()
        t = t.to_dense() if t.layout != torch.strided else t
        t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
        digest.update(t.double().flatten().numpy().tobytes())
    return digest.hexdigest()[:16]


def _left_on() -> list[str]:
    """Names the modes and hooks of this thread; a run that cleans up after itself leaves none."""
    left = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
    left += [type(mode).__name__ for mode in _get_current_function_mode_stack()]
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        left.append("saved_tensors_hooks")
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():
        left.append("disable_saved_tensors_hooks")
    if not torch.is_grad_enabled():
        left.append("no_grad")
    return left


@contextmanager
def _isolated() -> Iterator[None]:
    """Gives back the generators and process-wide settings that a situation may change, also where it raised."""
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    threads, dtype, grad = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
    anomaly = torch.is_anomaly_enabled()
    gc.freeze()  # a situation that collects garbage to count what is alive need not walk what was there before
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(grad)
        torch.autograd.set_detect_anomaly(anomaly)
        torch.set_rng_state(generators[0])
        random.setstate(generators[1])
        np.random.set_state(generators[2])
