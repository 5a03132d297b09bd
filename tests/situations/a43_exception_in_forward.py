"""A bad batch raises in the middle of a forward; a graph is dropped without backward.

Source: https://github.com/pytorch/pytorch/issues/18853
    https://github.com/pytorch/pytorch/issues/82218
Situation: A bad batch makes an inner block raise in the middle of forward (user catches and skips), and once the loss
    graph is dropped without backward.
Required: Next steps as if the failed forward had not touched the library: no leftover hooks, modes, RNG change beyond
    plain, or pinned tensors; result equals plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class FiniteBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.dr = nn.Linear(d, d), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.dr(torch.relu(self.f(x)))
        if not torch.isfinite(h).all():
            raise ValueError("bad batch")
        return x + h


def no_hook_is_left(model: nn.Module) -> bool:
    autograd = torch._C._autograd
    return autograd._saved_tensors_hooks_is_enabled() and autograd._top_saved_tensors_default_hooks(False) is None


def build() -> Case:
    model = nn.Sequential(FiniteBlock(6), FiniteBlock(6), nn.Linear(6, 2))
    x, y = torch.randn(5, 6), torch.arange(5) % 2

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor | float:
        optimizer.zero_grad()
        try:
            if i == 1:
                bad = x.clone()
                bad[0, 0] = float("nan")
                model(bad)
            if i == 2:
                model(x * 2)  # the graph is dropped
            loss = F.cross_entropy(model(x), y)
        except ValueError:
            return -1.0
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        steps=4,
        extra=no_hook_is_left,
        expect=True,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
