"""The first calls of the wrapped model are not ordinary training forwards.

Situation: A sanity evaluation in eval under no_grad, a training-mode forward under no_grad, a batch that makes the
    model raise, a training-mode forward whose output is dropped; only then the loop begins. A plan may be made at
    none of them.
Required: As plain; the error of the bad batch is the user's own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class Checked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.block, self.norm, self.out = nn.Linear(6, 8), Block(8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.norm(torch.sin(self.inp(x))))
        if x.shape[0] == 3:
            raise ValueError("three is a bad batch size")
        return self.out(self.block(h) * torch.sigmoid(h))


def build() -> Case:
    x, y, log = torch.randn(5, 6), torch.arange(5) % 2, []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        if i == 0:
            model.eval()
            with torch.no_grad():
                log.append(float(model(x).sum()))
            model.train()
            with torch.no_grad():
                log.append(float(model(x).sum()))
            try:
                model(x[:3])
            except ValueError as error:
                log.append(str(error))
            try:
                model(torch.randn(5, 7))
            except RuntimeError as error:
                log.append(str(error)[:20])
            log.append(float(model(x * 2).detach().sum()))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=Checked(),
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: log,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
