"""The user walks the graph and reads saved tensors from its nodes before backward.

Situation: A graph drawer reads grad_fn, next_functions, names and every `_saved_*` attribute: each read unpacks a
    saved tensor outside of backward, more than once. Then a backward with retain_graph, and another.
Required: Node names and saved values as plain; both backwards as plain.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Smooth(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.norm = nn.Linear(d, d), nn.LayerNorm(d)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.f(x)))
        return x + h.exp() * torch.sigmoid(h)


def saved_values(root: Any) -> list[tuple[str, str, float]]:
    """Name of the node, name of the saved attribute and sum of the saved tensor, for all nodes under `root`."""
    found, queue, seen = [], [root], set()
    while queue:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        for attribute in sorted(a for a in dir(node) if a.startswith("_saved_")):
            value = getattr(node, attribute)
            if isinstance(value, Tensor):
                found.append((node.name(), attribute, float(value.double().sum())))
        queue.extend(parent for parent, _ in node.next_functions)
    return found


def build() -> Case:
    model = nn.Sequential(Smooth(8), Smooth(8), nn.Linear(8, 2))
    x, y, log = torch.randn(5, 8), torch.arange(5) % 2, []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        log.append(saved_values(loss.grad_fn))
        log.append(saved_values(loss.grad_fn))
        loss.backward(retain_graph=True)
        log.append(saved_values(loss.grad_fn))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: log,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
