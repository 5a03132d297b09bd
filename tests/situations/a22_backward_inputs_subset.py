"""backward(inputs=...) and autograd.grad for chosen parameters only.

Source: https://github.com/pytorch/pytorch/issues/51743
    https://github.com/pytorch/pytorch/issues/24005
Situation: User calls loss.backward(inputs=[some params]) and torch.autograd.grad for others (e.g. gradient-similarity
    methods), not a bare backward().
Required: Same gradients as plain for the requested tensors, and None for the rest.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Block(8), Block(8), nn.Linear(8, 3))
    x, y = torch.randn(7, 6), torch.arange(7) % 3

    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        grads = torch.autograd.grad(loss, list(model[1].parameters()), retain_graph=True)
        loss.backward(inputs=list(model[3].parameters()))
        assert model[2].f1.weight.grad is None
        for p, grad in zip(model[1].parameters(), grads, strict=True):
            p.grad = grad
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
