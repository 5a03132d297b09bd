"""An embedding renormalises its weight in place in each forward, and the weight is used again.

Source: https://github.com/pytorch/pytorch/issues/26596
Situation: nn.Embedding(max_norm) renormalises rows of its weight in place during forward; recomputing it bumps the
    version of a weight saved elsewhere in the same graph.
Required: Same as plain: no version error, weights as after one renormalisation per forward.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.f = nn.Embedding(12, 6, max_norm=1.0), nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.f(self.emb(ids))).mean(1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.mix = Bag(), nn.Linear(6, 6)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.mix(self.bag(ids))
        return h @ self.bag.emb.weight.t()  # the weight is used again after the renormalisation


def build() -> Case:
    ids, y = torch.randint(0, 12, (5, 4)), torch.arange(5)
    return Case(
        model=Net(),
        batch=((ids,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
    )
