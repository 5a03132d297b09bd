"""The loop changes the model's output in place before the loss.

Situation: Logits are divided by a temperature, masked, and added to in place, as samplers and losses do; the output
    of the last layer is not saved by it, so plain torch allows it. In some steps the change is under no_grad, on a
    slice.
Required: As plain: what is replayed must not be what the loop has written.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.block, self.head = nn.Linear(6, 8), Block(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.block(self.inp(x))
        logits = self.head(h)
        doubled = logits * 2.0  # saves nothing of the logits
        return logits, torch.sin(doubled)


def build() -> Case:
    x, y = torch.randn(5, 6), torch.arange(5) % 4

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        logits, waves = model(x)
        if i == 0:
            logits.div_(0.7).add_(0.1)
        elif i == 1:
            logits.masked_fill_(torch.eye(5, 4, dtype=torch.bool).roll(1, 1), -1e4)
        else:
            with torch.no_grad():
                logits[:, :2].mul_(0.5)
        loss = F.cross_entropy(logits, y) + waves.square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=TwoOutputs(),
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o[0], y),
        step=step,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
