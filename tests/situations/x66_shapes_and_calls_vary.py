"""The model is called a varying number of times per step, with varying shapes, ranks and dtypes.

Situation: One to three calls per step; batches of other sizes, one of zero rows, one without a batch dimension, one
    in float64 through a cast in the model; optional arguments come and go.
Required: As plain; a plan made for one size changes no number at another.
"""

import torch
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class Flexible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.block, self.norm, self.out = nn.Linear(6, 8), Block(8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor, bias: Tensor | None = None, *more: Tensor, scale: float = 1.0) -> Tensor:
        h = torch.tanh(self.inp(x.float()))
        if bias is not None:
            h = torch.sin(h + bias) * scale
        for other in more:
            h = h + other.sum() * torch.sigmoid(h)
        return self.out(torch.exp(-self.block(self.norm(h)).square()))


def build() -> Case:
    g = torch.Generator().manual_seed(3)
    sizes = [[(2, 6)], [(5, 6), (1, 6)], [(2, 3, 6), (0, 6)], [(6,)], [(64, 6)]]
    data = [[torch.randn(size, generator=g) for size in step_sizes] for step_sizes in sizes]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        outputs = [model(data[i][0])]
        for k, x in enumerate(data[i][1:]):
            outputs.append(model(x.double(), torch.ones(8) * k, *data[i][: k + 1], scale=0.5))
        loss = torch.stack([o.square().sum() for o in outputs]).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=Flexible(),
        batch=((data[0][0],), {}),
        loss=lambda o: o.square().mean(),
        step=step,
        steps=5,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.02),
    )
