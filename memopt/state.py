"""What a plan keeps on a store between uses: parameters, gradients, optimizer states, activations."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from memopt.errors import StoreError, UnsupportedError
from memopt.offload.activations import OffloadedActivations
from memopt.offload.gradients import OffloadedGradients
from memopt.offload.nvme import NVMeStore, free_bytes
from memopt.offload.optimizer import BucketedOptimizer
from memopt.offload.parameters import OffloadedParameters
from memopt.offload.run_directory import RunDirectory
from memopt.policies.plan import Plan
from memopt.quant.optimizer import QuantizedOptimizer, can_be_coded, codecs_of
from memopt.stepping import why_not_in_parts


class OffloadedState:
    """A model's state on a store, as a plan says. `remove` brings all of it back.

    Raises StoreError if the directory can't be used or has too little room, UnsupportedError for an optimizer that
    can't be stepped in buckets.
    """

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        quantized: QuantizedOptimizer | None,
        note: Callable[[str], None],
    ) -> None:
        assert plan.nvme is not None, "a plan that offloads says where to"
        if optimizer is not None and (reason := why_not_in_parts(optimizer)) is not None:
            raise UnsupportedError(type(optimizer).__name__, reason)
        check_room(plan.nvme, plan.forecast.store_bytes)
        named = dict(model.named_parameters())
        away = [(named[a.name], a) for a in plan.away if a.name in named]
        self.directory = RunDirectory(plan.nvme)
        self.store = NVMeStore(self.directory.path)
        self.parameters: OffloadedParameters | None = None
        self.gradients: OffloadedGradients | None = None
        self.optimizer: BucketedOptimizer | None = None
        self.activations: OffloadedActivations | None = None
        try:
            if plan.moves:
                self.activations = OffloadedActivations(self.store, plan.activation_window_bytes, note)
            if chosen := [p for p, a in away if a.parameter]:
                self.parameters = OffloadedParameters(chosen, self.store, plan.window_bytes, note)
            if chosen := [p for p, a in away if a.gradient]:
                self.gradients = OffloadedGradients(chosen, self.store, plan.gradient_window_bytes, note)
            if optimizer is not None and away:
                states = {id(p) for p, a in away if a.states}
                self.optimizer = BucketedOptimizer(
                    optimizer,
                    states,
                    self.store,
                    plan.bucket_bytes,
                    plan.num_buckets,
                    self.parameters,
                    self.gradients,
                    note,
                    quantized.core if quantized is not None else None,
                    quantized.admits if quantized is not None else None,
                )
                self.optimizer.install()
        except BaseException:
            self.remove()
            raise

    def begin_step(self) -> None:
        """A training forward begins."""
        if self.parameters is not None:
            self.parameters.begin_step()
        if self.gradients is not None:
            self.gradients.begin_step()
        if self.activations is not None:
            self.activations.begin_step()

    @property
    def is_in_forward(self) -> bool:
        """Whether the tape has something to do with it while the forward runs."""
        return self.parameters is not None or self.activations is not None

    def away(self) -> set[int]:
        """Addresses of the tensors that are away now."""
        parts = (self.parameters, self.gradients, self.optimizer)
        items = [item for part in parts if part is not None for item in part.items.values()]
        return {item.mapped.data_ptr() for item in items if item.is_away}

    def remove(self) -> None:
        """Bring everything back into memory, take the hooks off and delete what is on the disk."""
        try:
            if self.activations is not None:
                self.activations.close()
            if self.optimizer is not None:
                self.optimizer.remove()
            if self.gradients is not None:
                self.gradients.take_back()
            if self.parameters is not None:
                self.parameters.take_back()
        finally:
            self.store.close()
            self.directory.close()


def key_of(plan: Plan, optimizer: torch.optim.Optimizer | None) -> tuple[object, ...]:
    """What of a plan model state is placed and coded by: two plans with the same key share one placement."""
    return (
        plan.away,
        bool(plan.moves),
        plan.window_bytes,
        plan.gradient_window_bytes,
        plan.activation_window_bytes,
        plan.bucket_bytes,
        plan.num_buckets,
        plan.nvme,
        plan.quantized,
        plan.nonfinite,
        id(optimizer),
    )


def quantized_optimizer(
    plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer | None, note: Callable[[str], None]
) -> QuantizedOptimizer | None:
    """The optimizer's states in 8 bits, installed, if the plan says so.

    Raises ValueError without an optimizer, UnsupportedError for one that looks beyond the element.
    """
    if not plan.quantized:
        return None
    if optimizer is None:
        raise ValueError("the plan keeps optimizer states in 8 bits: give the optimizer, apply(plan, model, optimizer)")
    chosen = set(plan.quantized)
    names = {id(p): name for name, p in model.named_parameters() if name in chosen}
    made = QuantizedOptimizer(optimizer, codecs_of(optimizer), names, plan.nonfinite, note)
    kept = [
        name for name, p in model.named_parameters() if p.requires_grad and not (id(p) in names and can_be_coded(p))
    ]
    if kept:
        shown = ", ".join(kept[:8]) + (f" and {len(kept) - 8} more" if len(kept) > 8 else "")
        note(f"optimizer states of {len(kept)} parameters stay as they are (small, kept or of another kind): {shown}")
    made.install(is_stepper=not plan.away)
    return made


def check_room(nvme: str, num_bytes: int) -> None:
    """Raise StoreError if the disk under `nvme` has less than `num_bytes` free."""
    if free_bytes(_nearest(nvme)) < num_bytes:
        raise StoreError(nvme, errno.ENOSPC, num_bytes)


def check_directory(nvme: str) -> None:
    """Raise StoreError unless `nvme` is a directory that can be written, or can be made."""
    path = _nearest(nvme)
    if not path.is_dir():
        raise StoreError(nvme, errno.ENOTDIR, 0)
    if not os.access(path, os.W_OK | os.X_OK):
        raise StoreError(nvme, errno.EACCES, 0)


def _nearest(nvme: str) -> Path:
    """The path itself, or of its parents the first that is there."""
    path = Path(nvme).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path
