"""Parameters get another storage between forward and backward.

Situation: Averaged weights are swapped in for a quick evaluation by `p.data = shadow`, before backward and swapped
    back after it. Autograd saved the storages of the forward and plain torch is right; a replay that reads the
    parameter object reads the shadow.
Required: The gradient belongs to the weights of the forward; as plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Block(8), nn.LayerNorm(8), Block(8), nn.Linear(8, 2))
    x, y, scores = torch.randn(5, 6), torch.arange(5) % 2, []
    shadow = [p.detach().clone() * 0.5 for p in model.parameters()]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        trained = [p.data for p in model.parameters()]
        for p, averaged in zip(model.parameters(), shadow, strict=True):
            p.data = averaged
        with torch.no_grad():
            scores.append(float(F.cross_entropy(model(x), y)))
        if i == 1:  # the gradients are made while the shadow is in place
            loss.backward()
        for p, kept in zip(model.parameters(), trained, strict=True):
            p.data = kept
        if i != 1:
            loss.backward()
        optimizer.step()
        for averaged, p in zip(shadow, model.parameters(), strict=True):
            averaged.mul_(0.9).add_(p.detach(), alpha=0.1)
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: scores,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
