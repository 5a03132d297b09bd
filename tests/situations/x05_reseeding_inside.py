"""The forward forks, seeds, saves and restores the torch generator.

Situation: Two views of a batch must see the same dropout mask, so the module saves the generator's state, restores
    it, and makes a fixed random projection under fork_rng and manual_seed.
Required: Masks, losses, weights and the generator's position equal the plain run.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class SameMaskTwice(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f = nn.Linear(d, d)

    def branch(self, x: Tensor) -> Tensor:
        return F.dropout(torch.tanh(self.f(x)), 0.4, self.training)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.get_rng_state()
        a = self.branch(x)
        torch.set_rng_state(state)
        b = self.branch(x * 0.5)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(11)
            projection = torch.randn(x.shape[1], x.shape[1])
        return torch.sin(a * b @ projection) + F.dropout(x, 0.1, self.training)


def build() -> Case:
    model = nn.Sequential(SameMaskTwice(8), SameMaskTwice(8), nn.Linear(8, 2))
    x, y = torch.randn(6, 8), torch.arange(6) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.2),
    )
