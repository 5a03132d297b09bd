"""The forward draws from Python's and numpy's generators.

Situation: Stochastic depth decides by random.random() whether a block runs, a jitter comes from numpy, a permutation
    from random.shuffle; whoever runs the forward once more (to plan or to recompute) takes another path and moves
    both generators.
Required: The same paths, losses and weights as plain, and the next draw of all three generators is the plain one.
"""

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class StochasticDepth(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.block = Block(d)

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.4:
            return x
        order = list(range(x.shape[1]))
        random.shuffle(order)
        jitter = torch.from_numpy(np.random.uniform(0.9, 1.1, size=(x.shape[0], 1)).astype(np.float32))
        return x + torch.tanh(self.block(x * jitter))[:, order]


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), *[StochasticDepth(8) for _ in range(6)], nn.Linear(8, 2))
    x, y = torch.randn(5, 6), torch.arange(5) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        steps=5,
    )
