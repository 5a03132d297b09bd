"""The user offloads activations already: save_on_cpu around the call and inside a block.

Situation: torch.autograd.graph.save_on_cpu around the forward in every second step, and always inside one block; on a
    CPU it keeps aliases.
Required: As plain.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from .blocks import Block
from .harness import Case


class Offloaded(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.block = Block(d)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.block(x)).mul_(1.5)
        with save_on_cpu():
            return torch.tanh(self.block(h) * h)


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Offloaded(8), nn.Dropout(0.2), Block(8), nn.Linear(8, 2))
    x, y = torch.randn(5, 6), torch.arange(5) % 2

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        with save_on_cpu() if i % 2 else contextlib.nullcontext():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        steps=4,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
