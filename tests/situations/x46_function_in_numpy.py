"""A custom Function computes in numpy, forward and backward.

Situation: Its forward leaves torch (numpy sorts and cumulates) and wraps the result by from_numpy, so that the
    storage's maker is unseen; it saves that result and a view of an activation.
Required: As plain: a storage whose maker was not seen is kept.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class SoftRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        array = x.detach().numpy()
        order = np.argsort(array, axis=1, kind="stable")
        sums = np.cumsum(np.tanh(np.take_along_axis(array, order, 1)), axis=1, dtype=np.float32)
        result = torch.from_numpy(sums)
        ctx.save_for_backward(result, x[:, 1:], torch.from_numpy(order))
        return result * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        result, tail, order = ctx.saved_tensors
        weights = np.cumsum(grad.numpy()[:, ::-1], axis=1)[:, ::-1] * (1.0 + 0.01 * result.numpy())
        out = np.zeros_like(weights)
        np.put_along_axis(out, order.numpy(), weights, 1)
        return torch.from_numpy(out) * (1 + 0.1 * tail.mean())


class RankBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.f(x))
        ranked = SoftRank.apply(h)
        return x + self.g(torch.exp(-ranked.square()) * h)


def build() -> Case:
    model = nn.Sequential(RankBlock(8), RankBlock(8), nn.Linear(8, 2))
    x, y = torch.randn(5, 8), torch.arange(5) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
