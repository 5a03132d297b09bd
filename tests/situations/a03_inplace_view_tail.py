"""A block that ends in place on a view.

Source: https://github.com/pytorch/pytorch/issues/26546
    https://github.com/pytorch/pytorch/issues/36383
Situation: The block's last op is in place on a view (norm then ReLU(inplace), or x[:].relu_()); some checkpoint forms
    then lose the whole gradient without an error.
Required: Every parameter before the block gets the same (non-None) gradient as in the plain run.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Tail(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(d))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.w)[:].relu_()


def build() -> Case:
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1),
        nn.Sequential(nn.InstanceNorm1d(4, affine=True), nn.ReLU(inplace=True)),
        Tail(7),
        nn.Flatten(),
        nn.Linear(28, 3),
    )
    x, y = torch.randn(6, 2, 7), torch.arange(6) % 3
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        extra=lambda m: [name for name, p in m.named_parameters() if p.grad is None],
        expect=[],
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    )
