"""A custom Function saves a leaf that it made inside its forward.

Source: https://github.com/pytorch/pytorch/issues/103726
Situation: A custom Function saves a tensor that is neither input nor output (made inside forward, requiring grad);
    some recompute hooks crash on its missing grad accumulator.
Required: Works and matches plain.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class SigmoidOfProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        wt = nn.Parameter(w.detach().t().contiguous())  # an extra leaf made inside
        s = torch.sigmoid(x @ wt)
        ctx.save_for_backward(x, wt, s)
        return s.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, wt, s = ctx.saved_tensors
        grad = grad * s * (1 - s)
        return grad @ wt.t(), grad.t() @ x


class SigmoidBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(d, d) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + SigmoidOfProduct.apply(x, self.w)


def build() -> Case:
    model = nn.Sequential(SigmoidBlock(8), SigmoidBlock(8), nn.Linear(8, 2))
    x, y = torch.randn(6, 8), torch.arange(6) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.2),
    )
