"""Custom Functions with every unusual habit.

Situation: Outputs that are not differentiable, set_materialize_grads(False) with None gradients, a tensor kept as a
    ctx attribute, saved_tensors read twice, an empty tensor saved and filled afterwards, None saved, setup_context, a
    Function called inside a Function's forward, once_differentiable, a gradient computed by autograd inside backward.
Required: As plain.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .harness import Case


class TopValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        values, indices = x.topk(k)
        ctx.mark_non_differentiable(indices)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(indices, None)
        ctx.shape = x.shape
        return values, indices, values.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None, grad_square: Tensor | None) -> tuple[Tensor, None]:
        indices, _none = ctx.saved_tensors
        assert grad_square is None, "the squares are not used"
        return torch.zeros(ctx.shape).scatter_(1, indices, grad), None


class SwishByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        late = torch.empty_like(x)
        ctx.save_for_backward(x, late)
        ctx.product = x * 0.5  # on the context, where autograd does not look
        late.copy_(torch.sigmoid(x))  # filled after it was named
        return x * late

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, s = ctx.saved_tensors
        again, _s = ctx.saved_tensors
        return grad * (s + ctx.product * 2.0 * s * (1 - s)) + 0.0 * (x - again)


class CubeWithContext(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        square = x * x
        return SwishByHand.apply(square * x) * scale, square

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        x, scale, square = ctx.saved_tensors
        with torch.enable_grad():
            inner = (square * x).detach().requires_grad_()
            out = SwishByHand.apply(inner)
            (inner_grad,) = torch.autograd.grad(out, inner, grad * scale)
        return inner_grad * 3 * square, (grad * out.detach()).sum(0)


class OddBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.g, self.scale = nn.Linear(d, d), nn.Linear(3, d), nn.Parameter(torch.rand(d))

    def forward(self, x: Tensor) -> Tensor:
        h = SwishByHand.apply(self.f(x))
        cube, square = CubeWithContext.apply(torch.sin(h), self.scale)
        values, indices, _squares = TopValues.apply(cube.tanh() + square, 3)
        return x + self.g(values * torch.cos(indices.float())) * h


def build() -> Case:
    model = nn.Sequential(OddBlock(6), OddBlock(6), nn.Linear(6, 2))
    x, y = torch.randn(5, 6), torch.arange(5) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
