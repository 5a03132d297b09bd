"""One layer serves as all layers, and the depth depends on the data.

Situation: ALBERT style: the same block is called up to eight times per forward; after each call a halting unit
    decides by value (.item()) whether to stop; a loop runs until convergence, under a bound.
Required: As plain: the k-th call is the k-th call, also when there are more of them than when the plan was made.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class Recurrent(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.inp, self.block, self.norm = nn.Linear(6, d), Block(d), nn.LayerNorm(d)
        self.halt, self.out, self.depths = nn.Linear(d, 1), nn.Linear(d, 2), []

    def forward(self, x: Tensor) -> Tensor:
        h, depth, remaining = self.inp(x), 0, torch.ones(x.shape[0], 1)
        while depth < 8 and remaining.max().item() > 0.3:
            h = self.norm(torch.sin(self.block(h)))
            remaining = remaining * torch.sigmoid(1.0 - self.halt(h) - 0.8 * x.abs().max())
            depth += 1
        self.depths.append(depth)
        return self.out(h * (1 + remaining))


def build() -> Case:
    x, y = torch.randn(5, 6), torch.arange(5) % 2

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x * (1.0, 0.3, 0.1, 0.6)[i]), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=Recurrent(8),
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        steps=4,
        extra=lambda m: m.depths,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
