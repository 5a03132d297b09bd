"""RReLU draws a slope per element, fills its noise after saving it, and saves no mask.

Situation: nn.RReLU (also in place) and F.rrelu in training mode inside a block; a recompute draws new slopes, and a
    copy of the noise taken when it is saved is taken before it is filled.
Required: Losses, weights and the position of the torch generator equal the plain run.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class NoisySlopes(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f1, self.f2, self.f3 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d), nn.Linear(d, d)
        self.act, self.act_in_place = nn.RReLU(0.1, 0.6), nn.RReLU(0.2, 0.4, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act_in_place(self.f2(self.act(self.f1(x))))
        return x + F.rrelu(self.f3(h), training=self.training) * torch.sigmoid(h)


def build() -> Case:
    model = nn.Sequential(NoisySlopes(8), NoisySlopes(8), nn.Linear(8, 3))
    x, y = torch.randn(7, 8), torch.arange(7) % 3
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    )
