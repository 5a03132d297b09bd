"""The wrapped model is deep-copied, before and in the middle of training, and the copies train as well.

Situation: An EMA copy and a target network are made from the wrapped model; the target is trained too, with its own
    optimizer; the copy shares nothing with the original, and neither runs on the other's weights.
Required: As plain for all copies.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Block(8), nn.BatchNorm1d(8), nn.Dropout(0.2), Block(8), nn.Linear(8, 2))
    x, y = torch.randn(5, 6), torch.arange(5) % 2
    copies: dict[str, nn.Module] = {}
    sums: list[list[float]] = []

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        if i == 0:
            copies["average"] = copy.deepcopy(model).requires_grad_(False)
        if i == 1:
            copies["second"] = copy.deepcopy(model)
        loss = train(model, optimizer)
        if i >= 1:
            loss = loss + train(copies["second"], torch.optim.SGD(copies["second"].parameters(), lr=0.3))
        with torch.no_grad():
            for average, p in zip(copies["average"].parameters(), model.parameters(), strict=True):
                average.lerp_(p, 0.1)
            loss = loss + copies["average"](x).square().mean()
        sums.append([float(sum(p.double().sum() for p in net.parameters())) for net in (model, *copies.values())])
        return loss

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        steps=4,
        extra=lambda m: sums,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
