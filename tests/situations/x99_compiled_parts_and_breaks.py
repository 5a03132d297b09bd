"""A compiled part goes through AOT autograd, another breaks its graph, a shape makes it compile again.

Situation: One block is compiled by `aot_eager`, whose graph is one node with saved tensors of its own and views of
    its inputs; one is compiled by `eager` with a graph break; the batch size changes.
Required: As plain with the same compiled parts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Smooth(nn.Module):
    def __init__(self, d: int, breaks: bool) -> None:
        super().__init__()
        self.ln, self.f, self.breaks = nn.LayerNorm(d), nn.Linear(d, d), breaks

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.f(self.ln(x)))
        if self.breaks:
            torch._dynamo.graph_break()
        return x + torch.sin(h) * h.exp()


def build() -> Case:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(6, 8), Smooth(8, False), nn.Dropout(0.2), Smooth(8, True), nn.Linear(8, 2))
    model[1].compile(backend="aot_eager")
    model[3].compile(backend="eager")
    x, y = torch.randn(5, 6), torch.arange(5) % 2

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        n = 4 if i == 1 else 5
        loss = F.cross_entropy(model(x[:n]), y[:n])
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
