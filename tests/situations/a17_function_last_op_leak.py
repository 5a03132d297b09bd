"""A custom Function that saves its own outputs ends a block; nothing of it may outlive the step.

Source: https://github.com/pytorch/pytorch/issues/161186
    https://github.com/pytorch/pytorch/issues/25340
Situation: A custom Function that saves one of its outputs is the last op of a recomputed block; stopping the
    recompute early leaves a cycle and memory grows every step.
Required: After each step (loss dropped, gc run) no saved tensor of the block is alive: live count stays 0 over steps.
"""

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from .harness import Case

SAVED: list[weakref.ref[Tensor]] = []


class ExpAndSin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y, z = x.exp(), x.sin()
        SAVED.append(weakref.ref(z))
        ctx.save_for_backward(x, y, z)
        return y, z

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_z: Tensor) -> Tensor:
        x, y, _z = ctx.saved_tensors
        return grad_y * y + grad_z * x.cos()


class ExpBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return ExpAndSin.apply(torch.tanh(self.f(x)))[0]


def build() -> Case:
    SAVED.clear()
    model, x, alive = nn.Sequential(ExpBlock(8), ExpBlock(8), nn.Linear(8, 1)), torch.randn(4, 8), []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> float:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        value = float(loss)
        del loss
        gc.collect()
        alive.append(sum(ref() is not None for ref in SAVED))
        return value

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: o.square().mean(),
        step=step,
        steps=4,
        extra=lambda m: alive,
        expect=[0, 0, 0, 0],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
    )
