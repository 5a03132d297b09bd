"""Inner blocks are compiled before the model is wrapped.

Source: https://github.com/ecmwf/anemoi-core/issues/1330
    https://github.com/pytorch/pytorch/issues/190717
Situation: Inner blocks are torch.compile'd (here backend 'eager') before the library wraps the model; recompute in
    another thread/grad mode can hit another cache entry and save other tensors.
Required: Works every run, same as plain; no non-deterministic 'different number of tensors' failure.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class NormBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.ln, self.f = nn.LayerNorm(d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.f(self.ln(x)))


def build() -> Case:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(6, 8), NormBlock(8), NormBlock(8), nn.Linear(8, 2))
    for i in (1, 2):
        model[i].compile(backend="eager")
    x, y = torch.randn(5, 6), torch.arange(5) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
