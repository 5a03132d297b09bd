"""The user works under allow_mutation_on_saved_tensors, which has hooks and a dispatch mode of its own.

Situation: Inside the context, activations that autograd has saved are changed in place; torch clones them before the
    write. The context's hooks are outside of those of a library.
Required: As plain, where the context makes the in-place changes harmless.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Mutating(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f1, self.f2 = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.f1(x))
        k = torch.sin(h)
        h.mul_(2.0)  # tanh saved it as its result, sin as its input
        return x + self.f2(h * k)


def build() -> Case:
    model = nn.Sequential(Mutating(8), Mutating(8), nn.Linear(8, 2))
    x, y = torch.randn(5, 8), torch.arange(5) % 2

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            out = model(x)
            loss = F.cross_entropy(out, y)
            out.zero_()
            loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
