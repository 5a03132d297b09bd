"""The wrapped model is called inside a custom Function, and again, with gradients, inside its backward.

Situation: A reversible or adjoint method: the forward runs the model under no_grad, the backward runs it under
    enable_grad and differentiates there, while the outer backward is running.
Required: As plain: a training forward inside a backward is an ordinary one.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, model: nn.Module, x: Tensor, *params: Tensor) -> Tensor:
        ctx.model = model
        ctx.save_for_backward(x)
        return x + 0.5 * model(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x + 0.5 * ctx.model(x)
            grads = torch.autograd.grad(y, [x, *ctx.model.parameters()], grad)
        return None, *grads


def build() -> Case:
    model = nn.Sequential(Block(8), nn.Tanh(), Block(8))
    x, y, head = torch.randn(5, 8), torch.arange(5) % 2, torch.randn(8, 2)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        h = model(x)  # an ordinary training forward, still pending when the adjoint ones run
        for _ in range(3):
            h = Adjoint.apply(model, torch.sin(h), *model.parameters())
        loss = F.cross_entropy(h @ head, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: o.square().mean(),
        step=step,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
