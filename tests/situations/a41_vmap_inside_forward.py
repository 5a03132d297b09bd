"""torch.vmap over stacked heads inside a forward.

Source: https://github.com/pytorch/pytorch/issues/122729
    https://github.com/pytorch/pytorch/pull/131191
Situation: A block uses torch.vmap over stacked heads inside its forward and is then recomputed or offloaded.
Required: Same as plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Heads(nn.Module):
    def __init__(self, d: int, h: int = 3) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(h, d, d) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.vmap(lambda w: torch.tanh(x @ w), randomness="error")(self.w).mean(0)


def build() -> Case:
    model = nn.Sequential(Heads(6), Heads(6), nn.Linear(6, 2))
    x, y = torch.randn(5, 6), torch.arange(5) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
