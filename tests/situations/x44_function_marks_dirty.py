"""Custom Functions work in place (mark_dirty), and return their input as it is.

Situation: An in-place activation as a Function, one that returns its input unchanged with another gradient, one that
    writes its result over its input and saves the result; their outputs share the input's storage.
Required: As plain.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class LeakyInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x > 0)
        ctx.mark_dirty(x)
        return x.mul_(torch.where(x > 0, 1.0, 0.2))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return torch.where(positive, grad, 0.2 * grad)


class ExpInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return grad * result


class ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.neg() * ctx.strength, None


class DirtyBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.g, self.domain = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        h = LeakyInPlace.apply(self.f(x))
        k = ExpInPlace.apply(-h * h)
        reversed_h = ReverseGradient.apply(torch.sin(k), 0.3)
        return x + self.g(k * torch.sin(h)) + torch.tanh(self.domain(reversed_h))


def build() -> Case:
    model = nn.Sequential(DirtyBlock(8), DirtyBlock(8), nn.Linear(8, 2))
    x, y = torch.randn(5, 8), torch.arange(5) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
