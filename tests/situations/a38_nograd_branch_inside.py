"""A no_grad branch, detach and gradients mixed in one block.

Source: https://github.com/pytorch/pytorch/pull/37266
    https://github.com/pytorch/pytorch/issues/83074
Situation: A block contains a torch.no_grad() sub-forward, detach and stop-gradient mixing; reentrant forms turn
    everything on and reach parameters plain training never touches.
Required: Parameters only used under no_grad keep grad None; others as plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class Mixed(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.train_path, self.teacher = Block(d), Block(d)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            t = self.teacher(x)
        y = self.train_path(x)
        return y + 0.5 * (t - y.detach())


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Mixed(8), Mixed(8), nn.Linear(8, 2))
    x, y = torch.randn(5, 6), torch.arange(5) % 2
    teachers = [name for name, _ in model.named_parameters() if "teacher" in name]
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        extra=lambda m: [name for name, p in m.named_parameters() if p.grad is None],
        expect=teachers,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    )
