"""Autocast regions nested, one weight used at several precisions, accumulation over both.

Situation: bf16 autocast with an inner float32 region and an inner float16 region, a shared weight cast once per
    region and cached, a forward outside of autocast in the same step, cache_enabled=False; the cast copies are what
    autograd saves.
Required: As plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class Precisions(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.block, self.norm = nn.Linear(d, d), Block(d), nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.f(x))
        with torch.autocast("cpu", enabled=False):
            h = torch.sin(self.f(h.float())) + self.norm(x.float())
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            h = h + self.f(torch.sigmoid(h)) * self.block(h)
        return x + F.softmax(self.f(h), -1) * h @ self.f.weight.t()


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Precisions(8), nn.Dropout(0.2), nn.Linear(8, 2))
    x, y = torch.randn(9, 6), torch.arange(9) % 2

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> float:
        optimizer.zero_grad()
        total = 0.0
        for k in range(3):
            part = slice(3 * k, 3 * k + 3)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=k != 1, cache_enabled=k != 2):
                loss = F.cross_entropy(model(x[part]), y[part]) / 3
            loss.backward()
            total += float(loss)
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        return total

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
