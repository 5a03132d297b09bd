"""The user calls the wrapped model itself through torch.utils.checkpoint.

Situation: The whole model is the checkpointed function, non-reentrant and reentrant. In plain its forward runs twice,
    by the user's choice: BatchNorm counts twice, a Python counter too. A library's hooks inside the region hide the
    region's own.
Required: What plain does with the same calls: losses, statistics and counters.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .blocks import Block
from .harness import Case


class Counting(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.block, self.drop, self.calls = nn.BatchNorm1d(d), Block(d), nn.Dropout(0.2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.drop(torch.tanh(self.block(self.norm(x))))


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Counting(8), Counting(8), nn.Linear(8, 2))
    x, y = torch.randn(5, 6), torch.arange(5) % 2

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        batch = x.clone().requires_grad_()
        out = model(batch) if i == 0 else checkpoint(model, batch, use_reentrant=i == 2)
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        steps=4,
        extra=lambda m: [m[1].calls, int(m[1].norm.num_batches_tracked)],
        expect=[7, 7],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
