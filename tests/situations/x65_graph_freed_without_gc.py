"""A dropped graph frees its memory at once, without the garbage collector.

Situation: The collector is off, as in long runs it often is. After the loss is dropped, with and without a backward,
    after an exception in the forward, nothing of the step may be alive; a cycle between a graph and its tape keeps
    every step.
Required: The number of the step's tensors that are alive after each step is that of plain: zero.
"""

import gc
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Traced(nn.Module):
    def __init__(self, d: int, alive: list[Any]) -> None:
        super().__init__()
        self.f, self.alive, self.fails = nn.Linear(d, d), alive, False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.f(x))
        k = h * torch.sigmoid(h)
        self.alive += [weakref.ref(h), weakref.ref(k), weakref.ref(h.untyped_storage())]
        if self.fails:
            raise ValueError("a bad batch")
        return x + torch.sin(k)


def build() -> Case:
    alive: list[Any] = []
    counts: list[int] = []
    model = nn.Sequential(Traced(8, alive), nn.Dropout(0.2), Traced(8, alive), nn.Linear(8, 2))
    x, y = torch.randn(5, 8), torch.arange(5) % 2

    def one_step(model: nn.Sequential, optimizer: torch.optim.Optimizer, i: int) -> float:
        optimizer.zero_grad()
        model[2].fails = i == 2
        try:
            loss = F.cross_entropy(model(x), y)
        except ValueError:
            return -1.0
        if i != 1:
            loss.backward(retain_graph=i == 3)
            optimizer.step()
        return float(loss)

    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, i: int) -> float:
        was_on = gc.isenabled()
        gc.disable()
        try:
            loss = one_step(model, optimizer, i)
            counts.append(sum(ref() is not None for ref in alive))
        finally:
            if was_on:
                gc.enable()
        return loss

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        steps=5,
        extra=lambda m: counts,
        expect=[0] * 5,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
