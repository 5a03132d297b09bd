"""What is to be trained: a model, one batch, a loss and an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Workload:
    """One training step, as the user would write it: `loss(model(*args, **kwargs)).backward(); optimizer.step()`.

    Args:
        model: any module; it is not changed by a profile.
        args, kwargs: one batch, of the largest shapes that are to fit.
        loss: takes the model's output, returns a tensor of one element. By default the output itself, its `.loss` or
            its `["loss"]`.
        optimizer: counted with its states, also if it has not stepped yet. None: nothing of it is counted.
        micro_batches: backward calls per optimizer step; above one, gradients are there during the forward.

    Raises ValueError for what is not a model or optimizer.
    """

    model: nn.Module
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], torch.Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    micro_batches: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise ValueError(f"Workload(model=...) takes a torch.nn.Module, not {type(self.model).__name__}")
        given: object = self.args
        if isinstance(given, torch.Tensor):
            raise ValueError("Workload(args=...) takes a tuple of arguments; for one tensor write args=(tensor,)")
        if not isinstance(self.kwargs, Mapping):
            raise ValueError(f"Workload(kwargs=...) takes a dict of arguments, not {type(self.kwargs).__name__}")
        if self.optimizer is not None and not isinstance(self.optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"Workload(optimizer=...) takes a torch.optim.Optimizer, not {type(self.optimizer).__name__}"
            )
        if self.micro_batches < 1:
            raise ValueError(f"Workload(micro_batches=...) must be at least 1, not {self.micro_batches}")


def loss_in(output: Any) -> Any:
    """The loss that a model's output carries: the output itself, its `.loss` or its `["loss"]`; else None."""
    if isinstance(output, torch.Tensor):
        return output if output.numel() == 1 else None
    if isinstance(output, Mapping):
        return output.get("loss")
    return getattr(output, "loss", None)


def own_loss(output: Any) -> torch.Tensor:
    """`loss_in`, or a ValueError that says what to give."""
    loss = loss_in(output)
    if loss is None:
        raise ValueError(
            f"the output ({type(output).__name__}) carries no loss: give Workload(loss=...), a function from "
            f"the output "
            "to a tensor of one element"
        )
    return loss  # type: ignore[no-any-return]


def assumed_loss(output: Any) -> torch.Tensor:
    """A loss for planning when only the forward is known: the output's own, or one that holds what cross entropy holds.

    A float32 copy and its logarithmic softmax of each tensor that requires a gradient: no less than the usual losses
    keep.
    """
    loss = loss_in(output)
    if loss is not None and loss.requires_grad:
        return loss  # type: ignore[no-any-return]
    parts = [
        torch.log_softmax(t.float(), -1).mean() if t.dim() > 0 else t.float()
        for t in tensors_of(output)
        if t.requires_grad and t.is_floating_point()
    ]
    if not parts:
        parts = [t.abs().mean() for t in tensors_of(output) if t.requires_grad]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def tensors_of(x: Any) -> list[torch.Tensor]:
    """Tensors in nested dicts, lists, tuples and plain objects' attributes."""
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    stack = [x]
    while stack:
        y = stack.pop()
        if isinstance(y, torch.Tensor):
            found.append(y)
            continue
        if id(y) in seen or isinstance(y, str | bytes | int | float | type | nn.Module) or y is None:
            continue
        seen.add(id(y))
        if isinstance(y, Mapping):
            stack.extend(y.values())
        elif isinstance(y, list | tuple | set):
            stack.extend(y)
        elif hasattr(y, "__dict__"):
            stack.extend(vars(y).values())
    return found[::-1]
