"""Parameters of one and two elements in nested modules.

Source: https://github.com/pytorch/pytorch/issues/144045
Situation: Sharding on a world of one with parameters of one or two elements inside nested units: their gradient came
    out as exactly zero and they never trained.
Required: World size 1 is the plain run: every parameter incl. numel 1 and 2 gets its plain non-zero gradient.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log_mult, self.pair = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.exp(self.log_mult) + self.pair.mean()


class GainBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.gain = nn.Linear(d, d), Gain()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain(torch.tanh(self.f(x)))


def build() -> Case:
    model = nn.Sequential(GainBlock(8), GainBlock(8), Gain(), nn.Linear(8, 2))
    x, y = torch.randn(6, 8), torch.arange(6) % 2

    def idle_parameters(model: nn.Module) -> list[str]:
        return [name for name, p in model.named_parameters() if p.grad is None or float(p.grad.abs().sum()) == 0]

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        extra=idle_parameters,
        expect=[],
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
