"""Adversarial training needs the input's gradient; requires_grad of every output is looked at.

Source: https://github.com/pytorch/pytorch/issues/7617
    https://github.com/facebookresearch/fairscale/pull/787
Situation: User needs the gradient of the input (adversarial training), passes a first block without any trainable
    parameter, and checks requires_grad of outputs.
Required: input.grad as plain; requires_grad of every output as plain (frozen stem on a constant input: False; integer
    outputs untouched).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.out = Block(6).requires_grad_(False), Block(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.stem(x)
        z = self.out(self.body(h))
        return {"stem": h, "logits": z, "pred": z.argmax(-1)}


def build() -> Case:
    x, y = torch.randn(5, 6), torch.arange(5) % 2
    log: list[list[Any]] = []  # per step: requires_grad of stem, logits, pred (False, True, False), size of x.grad

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        attacked = x.clone().requires_grad_()
        F.cross_entropy(model(attacked)["logits"], y).backward()
        adversarial = (attacked + 0.1 * attacked.grad.sign()).detach()
        optimizer.zero_grad()
        o = model(adversarial)
        flags = [o["stem"].requires_grad, o["logits"].requires_grad, o["pred"].requires_grad]
        log.append([*flags, round(float(attacked.grad.abs().sum()), 6)])
        loss = F.cross_entropy(o["logits"], y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=Net(),
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o["logits"], y),
        step=step,
        extra=lambda m: log,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
