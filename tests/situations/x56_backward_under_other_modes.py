"""backward() is called under autocast, under no_grad, under anomaly detection and in inference of the next batch.

Situation: The common mistake of calling backward inside the autocast block; part of the forward ran with autocast
    disabled or in float16's place bfloat16, so that a replay under backward's autocast would cast where the forward
    did not.
Required: As plain under the same calls.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class PartlyFloat(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            h = torch.tanh(self.f(x.float()))
            h = torch.sin(h @ h.t() @ h)
        return x + self.g(h) * torch.sigmoid(self.g(x))


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), PartlyFloat(8), Block(8), nn.Dropout(0.2), nn.Linear(8, 2))
    x, y = torch.randn(5, 6), torch.arange(5) % 2

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        if i == 0:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
        elif i == 1:  # forward without, backward with autocast
            loss = F.cross_entropy(model(x), y)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss.backward()
        elif i == 2:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            with torch.no_grad():
                loss.backward()
        else:
            with torch.autograd.set_detect_anomaly(True):
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
