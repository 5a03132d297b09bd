"""Tensors made under inference_mode take part in a training forward.

Situation: Features of a frozen encoder are computed under torch.inference_mode, once outside and once inside the
    forward. They have no version counter (asking for one raises), and may not be saved, only used by ops that save
    nothing of them.
Required: As plain, and the RuntimeError of saving one stays an error.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class OnFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.block, self.out = nn.Linear(6, 8).requires_grad_(False), Block(8), nn.Linear(8, 2)
        self.shift = nn.Parameter(torch.randn(8))
        self.multiply = False

    def forward(self, features: Tensor, x: Tensor) -> Tensor:
        with torch.inference_mode():
            inside = torch.tanh(self.frozen(x))
        h = torch.sin(features + self.shift) + torch.exp(self.shift - inside)
        if self.multiply:
            h = h * inside  # saves an inference tensor: an error
        return self.out(self.block(h))


def build() -> Case:
    model = OnFeatures()
    x, y, errors = torch.randn(5, 6), torch.arange(5) % 2, []
    with torch.inference_mode():
        features = torch.relu(model.frozen(x))

    def step(model: OnFeatures, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        model.multiply = i == 1
        try:
            model(features, x)
        except RuntimeError as error:
            errors.append(str(error)[:30])
        model.multiply = False
        loss = F.cross_entropy(model(features, x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((features, x), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: errors,
        expect=["Inference tensors cannot be sav"[:30]],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
