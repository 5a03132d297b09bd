"""Intermediate activations carry hooks, retain their gradient and are read again after backward.

Situation: Grad-CAM style: the module keeps activations as attributes, registers a tensor hook that changes the
    gradient, calls retain_grad; the loop reads value and gradient of them after backward, for a second loss of the
    next step.
Required: Values, gradients, number of hook calls and identity of the kept tensors as plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Watched(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f1, self.f2, self.calls = nn.Linear(d, d), nn.Linear(d, d), 0
        self.seen: Tensor | None = None

    def on_grad(self, grad: Tensor) -> Tensor:
        self.calls += 1
        return grad.clamp(-0.05, 0.05)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.f1(x))
        h.register_hook(self.on_grad)
        self.seen = h * torch.sigmoid(h)
        self.seen.retain_grad()
        return x + self.f2(self.seen.exp())


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Watched(8), Watched(8), nn.Linear(8, 2))
    x, y, log = torch.randn(5, 6), torch.arange(5) % 2, []

    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y) + 0.1 * (model[1].seen - model[2].seen).square().mean()
        loss.backward()
        log.append([[float(m.seen.sum()), float(m.seen.grad.sum()), m.seen.is_leaf, m.calls] for m in model[1:3]])
        optimizer.step()
        return loss.detach() + (model[1].seen * model[1].seen.grad).sum().detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: log,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
