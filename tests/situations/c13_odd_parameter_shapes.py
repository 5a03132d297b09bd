"""Parameters of odd, empty and non-contiguous shapes, frozen ones handed to the optimizer.

Source: https://github.com/pytorch/pytorch/issues/144045
    https://github.com/pytorch/ao/issues/1209
Situation: Parameters of shape (), (1,), (257,), (3,5,7), (0,4) and a non-contiguous one; optimizer handed
    model.parameters() including frozen ones.
Required: All handled (tiny ones may stay fp32): no block-size assumption, frozen ones skipped without hooks errors,
    empty one ignored; values as plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temp, self.one = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.ones(1))
        self.row = nn.Parameter(torch.randn(257) * 0.1)
        self.cube, self.none = nn.Parameter(torch.randn(3, 5, 7) * 0.1), nn.Parameter(torch.zeros(0, 4))
        self.nc = nn.Parameter(torch.randn(257, 6).t())
        self.frozen = nn.Parameter(torch.randn(6, 6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.frozen @ self.nc + self.row) * self.temp + self.one + self.none.sum()
        return h.mean(1, keepdim=True) * self.cube.sum((1, 2))


def build() -> Case:
    model, x, y = Net(), torch.randn(9, 6), torch.arange(9) % 3
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        extra=lambda m: [list(m.nc.stride()), m.frozen.grad is None],
        expect=[[1, 6], True],
        steps=4,
        optimizer=lambda p: torch.optim.AdamW(model.parameters(), lr=1e-2),
    )
