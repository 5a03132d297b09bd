"""One encoder called three times in a forward, with hooks on a shared weight.

Source: https://github.com/pytorch/pytorch/issues/81296
    https://github.com/pytorch/pytorch/issues/105723
Situation: One encoder is called three times per step (triplet loss); each parameter is used in several recomputed
    regions, and gradient hooks fire too often or gradients are lost.
Required: Same gradient as plain; a tensor hook and a post-accumulate hook on a shared parameter fire once per
    backward.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class Triplet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(6, 8), Block(8), Block(8))

    def forward(self, a: Tensor, p: Tensor, n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.enc(a), self.enc(p), self.enc(n)


def build() -> Case:
    model, x, count = Triplet(), [torch.randn(5, 6) for _ in range(3)], {"t": 0, "acc": 0}

    def on_grad(grad: Tensor) -> None:
        count["t"] += 1

    def on_accumulated(param: Tensor) -> None:
        count["acc"] += 1

    w = model.enc[1].f1.weight
    w.register_hook(on_grad)
    w.register_post_accumulate_grad_hook(on_accumulated)
    return Case(
        model=model,
        batch=(tuple(x), {}),
        loss=lambda o: F.triplet_margin_loss(*o),
        extra=lambda m: count,
        expect={"t": 3, "acc": 3},
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    )
