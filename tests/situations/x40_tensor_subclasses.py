"""Inputs and parameters are tensor subclasses, with __torch_function__ or __torch_dispatch__.

Situation: A metadata-carrying subclass passes through the model; a parameter is a wrapper subclass without a storage
    of its own, which unwraps itself in every op and counts them.
Required: As plain; types of outputs as plain; what a tape does not know passes through untouched.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .harness import Case


class Tagged(torch.Tensor):
    """Stays itself in every op, by torch's own __torch_function__."""


class Doubled(torch.Tensor):
    """Holds a tensor and acts as twice that tensor; every op unwraps it."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Doubled":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(t: Any) -> Any:
            return t.inner * 2.0 if isinstance(t, Doubled) else t

        if func is torch.ops.aten.detach.default:
            return Doubled(args[0].inner)
        return func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {}))


class Net(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(d, d), nn.Linear(d, 2)
        self.scale = Doubled(torch.rand(d))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.f(x)) * self.scale
        return self.g(torch.sin(h) * h.exp() + x)


def build() -> Case:
    x, y, kinds = torch.randn(5, 8).as_subclass(Tagged), torch.arange(5) % 2, []

    def loss(output: Tensor) -> Tensor:
        kinds.append(type(output).__name__)
        return F.cross_entropy(output, y)

    return Case(
        model=Net(8),
        batch=((x,), {}),
        loss=loss,
        extra=lambda m: kinds,
        expect=["Tagged"] * 3,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
