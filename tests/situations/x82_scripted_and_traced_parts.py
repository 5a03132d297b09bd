"""Parts of the model are TorchScript: scripted and traced modules inside an eager one.

Situation: Their ops run in an interpreter that has its own autodiff and fuses after some runs; their saved tensors
    belong to a node that is no op of a tape; the trained model is traced at the end.
Required: As plain in each run, the trace included.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Smooth(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.f(x))
        return x + self.g(h * torch.sigmoid(h) * h.exp())


def build() -> Case:
    x, y = torch.randn(5, 8), torch.arange(5) % 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and in use
        scripted, traced = torch.jit.script(Smooth(8)), torch.jit.trace(Smooth(8), x)
    model = nn.Sequential(Smooth(8), scripted, nn.Tanh(), traced, nn.Dropout(0.2), nn.Linear(8, 2))

    def trace_of_the_trained(model: nn.Module) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(torch.jit.trace(model.eval(), x)(x * 2).sum().detach())

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        steps=5,
        extra=trace_of_the_trained,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
