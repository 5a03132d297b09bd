"""Saved-tensor hooks are forbidden around one of the forwards.

Situation: The user runs a step under torch.autograd.graph.disable_saved_tensors_hooks, as torch.func does; entering a
    pair of hooks raises there.
Required: That step runs as plain; the steps before and after it are not disturbed.
"""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Block(8), nn.Dropout(0.2), Block(8), nn.Linear(8, 2))
    x, y = torch.randn(5, 6), torch.arange(5) % 2

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        forbidden = torch.autograd.graph.disable_saved_tensors_hooks("no hooks here")
        with forbidden if i in (0, 2) else contextlib.nullcontext():
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
