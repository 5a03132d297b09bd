"""The default dtype is another one inside the forward, and results depend on it and on promotion rules.

Situation: The model sets the default dtype to float64 for part of its forward, where integer tensors times Python
    numbers, full, arange and true division take it; 0-dim tensors and Python scalars promote differently. In backward
    the default is float32 again.
Required: As plain, in value and dtype.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class DoubleInside(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        h = self.f(x)
        order = h.detach().argsort(1)
        torch.set_default_dtype(torch.float64)
        try:
            ranks = torch.sin(order * 0.37) + order / 3  # integers to the default dtype
            table = torch.full((x.shape[1],), 0.1) * torch.arange(0, x.shape[1], 1.0)
            h = torch.exp(-(h.double() * ranks + torch.cos(table)).square())
        finally:
            torch.set_default_dtype(torch.float32)
        half = torch.tanh(h.bfloat16() * torch.tensor(1.7))  # a 0-dim tensor does not promote
        wide = torch.sigmoid(half * torch.tensor([1.7]))  # one of one dimension does
        steps = (order > 2) * 0.5 + (order % 3).sqrt()
        return x + self.g((wide * steps).float() * torch.where(order > 1, 2.0, h).float())


def build() -> Case:
    model = nn.Sequential(nn.Linear(8, 8), DoubleInside(8), nn.Linear(8, 2))
    x, y = torch.randn(5, 8), torch.arange(5) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
