"""What is trainable changes from step to step, at the same input size.

Situation: Gradual unfreezing, a BatchNorm kept in eval, a step that trains the input only, one with everything frozen
    but a bias: what autograd saves differs, while shapes and ops stay.
Required: As plain: a plan of one step changes no number in another.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Block(8), nn.BatchNorm1d(8), Block(8), nn.Dropout(0.2), nn.Linear(8, 2))
    x, y, log = torch.randn(5, 6), torch.arange(5) % 2, []
    phases = [(5,), (3, 5), (1, 2, 3, 5), (0, 1, 2, 3, 5), (), (2,), (5,)]

    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        for k, module in enumerate(model):
            module.requires_grad_(k in phases[i])
        model[2].train(2 in phases[i])
        model[1].f1.bias.requires_grad_(i == 4)
        batch = x.clone().requires_grad_(i % 3 == 1)
        loss = F.cross_entropy(model(batch), y)
        loss.backward()
        log.append([p.grad is not None for p in model.parameters()])
        if batch.grad is not None:
            log.append(float(batch.grad.sum()))
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        steps=7,
        extra=lambda m: log,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
    )
