"""A user's TorchDispatchMode changes what ops return, around the forward only.

Situation: An emulation of a narrow accelerator rounds the result of every matrix product to bf16, counts the ops, and
    is left before backward. A replay outside of it would give unrounded results; a replay inside of it counts twice.
Required: Losses and weights as plain, the count as plain.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .blocks import Block
from .harness import Case


class NarrowAccelerator(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            self.num_products += 1
            return out.bfloat16().float()
        return out


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Block(8), nn.Tanh(), Block(8), nn.Linear(8, 2))
    x, y, accelerator = torch.randn(5, 6), torch.arange(5) % 2, NarrowAccelerator()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        with accelerator:
            loss = F.cross_entropy(model(x), y)
            if i == 1:
                loss.backward()
        if i != 1:
            loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: accelerator.num_products,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
