"""The forward calls itself over a tree: the same module is entered while it is running.

Situation: A tree network composes children by calling `self(child)`, so that the wrapped model's own call is
    recursive; the trees differ from step to step.
Required: As plain.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class TreeNet(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.leaf, self.pair, self.gate = nn.Embedding(9, d), nn.Linear(2 * d, d), nn.Linear(2 * d, d)
        self.drop, self.out = nn.Dropout(0.1), nn.Linear(d, 3)

    def forward(self, tree: Any, is_root: bool = True) -> Tensor:
        if isinstance(tree, int):
            h = torch.sin(self.leaf(torch.tensor([tree])))
        else:
            both = torch.cat([self(child, False) for child in tree], 1)
            h = self.drop(torch.tanh(self.pair(both)) * torch.sigmoid(self.gate(both)))
        return self.out(h) if is_root else h


def build() -> Case:
    trees = [((1, 2), (3, (4, 5))), (6, 7), ((((1, 2), 3), 4), 8), ((1, 2), (3, (4, 5)))]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        loss = sum(F.cross_entropy(model(trees[k]), torch.tensor([k % 3])) for k in (i, (i + 1) % 4))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=TreeNet(8),
        batch=((trees[0],), {}),
        loss=lambda o: F.cross_entropy(o, torch.tensor([0])),
        step=step,
        steps=4,
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    )
