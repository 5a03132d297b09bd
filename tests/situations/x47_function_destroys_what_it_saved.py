"""A custom Function reuses its saved tensor as workspace in backward.

Situation: The backward writes the gradient into the memory of the tensor it had saved, which in plain nobody else has
    saved. In a replay the same memory may be the source of other activations that are still to be replayed, or the
    cached result of a replay that another node shares.
Required: As plain.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class SquareInWorkspace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return x.mul_(grad).mul_(2.0)


class WorkspaceBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        s = self.f(x)  # saved by nobody but the Function
        t = s * 0.5 + 1.0  # made from s, saved by sin and exp below
        waves = torch.sin(t) * torch.exp(-t)
        squares = SquareInWorkspace.apply(s)  # runs last in forward, so its backward comes first
        return x + self.g(torch.tanh(squares) + waves)


def build() -> Case:
    model = nn.Sequential(WorkspaceBlock(8), WorkspaceBlock(8), nn.Linear(8, 2))
    x, y = torch.randn(5, 8), torch.arange(5) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
