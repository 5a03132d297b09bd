"""The forward reads and moves Python state: attributes, a global, a context variable.

Situation: A temperature is annealed by a counter in forward, a global counts the calls, a context variable that the
    loop sets only around the forward selects the scale.
Required: Each is read and moved as often as plain (a plan made at the first forward counts as none); values as plain.
"""

import contextvars

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case

SCALE: contextvars.ContextVar[float] = contextvars.ContextVar("scale")
CALLS = {"n": 0}


class Annealed(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.calls, self.seen = nn.Linear(d, d), 0, 0
        self.temperature = 2.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        CALLS["n"] += 1
        self.temperature *= 0.9
        self.seen += x.shape[0]
        return x + torch.tanh(self.f(x) / self.temperature) * SCALE.get() * (1 + CALLS["n"] % 3)


def build() -> Case:
    CALLS["n"] = 0
    model = nn.Sequential(Annealed(8), Annealed(8), nn.Linear(8, 2))
    x, y = torch.randn(6, 8), torch.arange(6) % 2

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        token = SCALE.set(1.0 + 0.5 * i)
        try:
            loss = F.cross_entropy(model(x), y)
        finally:
            SCALE.reset(token)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: [CALLS["n"], m[0].calls, m[1].calls, m[0].seen, m[0].temperature],
        expect=[6, 3, 3, 18, 2.0 * 0.9 * 0.9 * 0.9],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
