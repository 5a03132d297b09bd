"""The model is reached by other ways than model(x).

Situation: model.forward(x) directly, a subclass that overrides __call__, another method than forward in training, a
    child called alone, the wrapped model as a part of a larger unwrapped one, DataParallel without devices around it.
Required: As plain by every way.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.a, self.b, self.drop, self.calls = nn.Linear(6, 8), Block(8), Block(8), nn.Dropout(0.2), 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return super().__call__(*args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(self.drop(self.encode(x))))

    def encode(self, x: Tensor) -> Tensor:
        return torch.sin(self.a(self.inp(x)))


class Larger(nn.Module):
    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x) * torch.sigmoid(self.encoder.encode(x)))


def build() -> Case:
    encoder = Encoder()
    larger = Larger(encoder)
    parallel = nn.DataParallel(larger)
    x, y = torch.randn(5, 6), torch.arange(5) % 2
    frozen_head = torch.randn(8, 2)
    ways = [
        lambda model: larger(x),
        lambda model: model.forward(x) @ frozen_head,
        lambda model: model.encode(x) @ frozen_head,
        lambda model: torch.exp(-model.b(model.inp(x))) @ frozen_head,
        lambda model: parallel(x),
        lambda model: model(x) @ frozen_head,
    ]

    def step(model: Encoder, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(ways[i](model), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=encoder,
        batch=((x,), {}),
        loss=lambda o: o.square().mean(),
        step=step,
        steps=6,
        extra=lambda m: m.calls,
        expect=3,
        optimizer=lambda p: torch.optim.SGD([*p, *larger.head.parameters()], lr=0.1),
    )
