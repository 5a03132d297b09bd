"""Several forwards are pending at once and are backpropagated in any order, some never.

Situation: A pipeline's 1F1B order, a backward in reverse, losses added over forwards, one graph dropped, and a
    validation forward in eval between forward and backward. Whatever belongs to "the current forward" belongs to the
    wrong one.
Required: As plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Block(8), nn.Dropout(0.3), nn.BatchNorm1d(8), Block(8), nn.Linear(8, 2))
    x, y, log = torch.randn(12, 6), torch.arange(12) % 2, []

    def loss_of(model: nn.Module, k: int) -> Tensor:
        part = slice(2 * k, 2 * k + 2 + k % 2)
        return F.cross_entropy(model(x[part]), y[part])

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        a, b = loss_of(model, 0), loss_of(model, 1)
        a.backward()
        c = loss_of(model, 2)
        model.eval()
        with torch.no_grad():
            log.append(float(loss_of(model, 3)))
        model.train()
        dropped = loss_of(model, 3)
        d = loss_of(model, 4)
        d.backward()
        del dropped
        (b + c * 0.5).backward()
        optimizer.step()
        return (a + b + c + d).detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: log,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
