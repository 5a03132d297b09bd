"""The forward differentiates: an energy model that returns forces.

Source: https://github.com/pytorch/pytorch/issues/102223
Situation: forward() itself differentiates (energy model returning forces = -dE/dx with create_graph), and the loss
    uses both.
Required: Same as plain, also when the module is called under torch.no_grad() at evaluation (it enables grad inside).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), Block(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, pos: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            pos = pos.detach().requires_grad_()
            energy = self.net(pos).sum()
            (force,) = torch.autograd.grad(-energy, pos, create_graph=True)
        return energy, force


def build() -> Case:
    pos, target = torch.randn(6, 3), torch.randn(6, 3)

    def extra(model: Energy) -> list[float]:
        with torch.no_grad():
            energy, force = model(pos)
        return [round(float(energy), 5), round(float(force.sum()), 5)]

    return Case(
        model=Energy(),
        batch=((pos,), {}),
        loss=lambda o: o[0] * 0.01 + F.mse_loss(o[1], target),
        extra=extra,
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    )
