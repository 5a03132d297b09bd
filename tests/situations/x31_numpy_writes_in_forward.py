"""The forward fills tensors through numpy, where no dispatcher looks.

Situation: A mask is torch.zeros filled through `.numpy()`; a position table comes from one numpy array that every
    block fills anew; an intermediate is clipped through its numpy view. To a tape, the zeros are still zeros.
Required: As plain: what was written unseen is never taken from the op that made the storage.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class NumpyBlock(nn.Module):
    def __init__(self, d: int, shared: np.ndarray, index: int) -> None:
        super().__init__()
        self.f, self.g, self.shared, self.index = nn.Linear(d, d), nn.Linear(d, d), shared, index

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape)
        mask.numpy()[self.index :: 2] = 1.0 + self.index
        h = torch.sin(self.f(x) * mask)  # the product saves the mask
        self.shared[:] = np.arange(x.shape[1]) * 0.1 * (self.index + 1)
        table = torch.from_numpy(self.shared)
        h = torch.tanh(h + table)  # the sum saves nothing of the table, which the next block overwrites
        clipped = h * 1.5
        np.clip(clipped.detach().numpy(), -1.0, 1.0, out=clipped.detach().numpy())
        weights = torch.full((x.shape[1],), 0.5)
        memoryview(weights.numpy())[self.index] = 2.0
        return x + self.g(clipped.exp() * weights)


def build() -> Case:
    shared = np.zeros(8, dtype=np.float32)
    model = nn.Sequential(NumpyBlock(8, shared, 0), NumpyBlock(8, shared, 1), NumpyBlock(8, shared, 2), nn.Linear(8, 2))
    x, y = torch.randn(6, 8), torch.arange(6) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
