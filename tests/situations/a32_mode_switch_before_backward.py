"""eval() for a metric between forward and backward.

Source: https://github.com/NVIDIA/TransformerEngine/pull/3394
Situation: User switches model.eval() for a quick metric between forward and backward, or trains with some submodules
    in eval; the recompute runs dropout/BN in the wrong mode.
Required: Recompute uses the mode each module had in its forward; modes afterwards are what the user set.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class NormDropBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.n, self.dr = nn.Linear(d, d), nn.BatchNorm1d(d), nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dr(torch.relu(self.n(self.f(x))))


def build() -> Case:
    model = nn.Sequential(NormDropBlock(8), NormDropBlock(8), nn.Linear(8, 2))
    x, y, modes = torch.randn(9, 8), torch.arange(9) % 2, []

    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        model.train()
        model[0].n.eval()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        model.eval()
        with torch.no_grad():
            accuracy = (model(x).argmax(1) == y).float().mean()
        loss.backward()
        optimizer.step()
        modes.append([module.training for module in model.modules()].count(True))
        return loss.detach() + accuracy

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: modes,
        expect=[0, 0, 0],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
