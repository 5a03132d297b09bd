"""Two backwards through one retained graph.

Source: https://github.com/pytorch/pytorch/issues/82156
    https://github.com/openai/guided-diffusion/pull/144
Situation: Two losses on one graph: first backward(retain_graph=True) then a second backward; hooks that pop their
    storage on first unpack fail or use freed data.
Required: Both backwards give the plain gradients; memory is freed after the second.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Block(8), nn.Dropout(0.1), Block(8), nn.Linear(8, 3))
    x, y = torch.randn(7, 6), torch.arange(7) % 3

    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        out = model(x)
        loss_1, loss_2 = F.cross_entropy(out, y), out.square().mean()
        loss_1.backward(retain_graph=True)
        grad_norm = model[1].f1.weight.grad.norm()
        loss_2.backward()
        optimizer.step()
        return loss_1.detach() + loss_2.detach() + grad_norm

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
