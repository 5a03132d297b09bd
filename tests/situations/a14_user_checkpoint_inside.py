"""The model already uses torch.utils.checkpoint inside.

Source: https://github.com/pytorch/pytorch/pull/90105
Situation: The user's model already calls torch.utils.checkpoint inside (one region non-reentrant, one reentrant); the
    optimizer library wraps the outer blocks too (nested recomputation).
Required: Works and matches plain; must not recompute exponentially or fail with metadata errors.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .blocks import Block
from .harness import Case


class Outer(nn.Module):
    def __init__(self, d: int, reentrant: bool) -> None:
        super().__init__()
        self.a, self.b, self.dr, self.r = Block(d), Block(d), nn.Dropout(0.2), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return self.dr(self.b(checkpoint(self.a, x, use_reentrant=self.r)))


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Outer(8, False), Outer(8, True), nn.Linear(8, 2))
    x, y = torch.randn(7, 6), torch.arange(7) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    )
