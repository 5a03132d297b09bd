"""Jacobians and Hessian-vector products of the model between training steps.

Situation: torch.autograd.functional.jacobian, hvp and vjp, is_grads_batched, and a third derivative, all with the
    model in training mode.
Required: As plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.functional import hvp, jacobian

from .blocks import Block
from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(4, 8), Block(8), nn.Tanh(), nn.Linear(8, 3))
    x, y, log = torch.randn(5, 4), torch.arange(5) % 3, []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        full = jacobian(lambda t: model(t).sum(0), x, create_graph=True)
        loss = F.cross_entropy(model(x), y) + 0.01 * full.square().sum()
        _, curvature = hvp(lambda t: F.cross_entropy(model(t), y), x, torch.ones_like(x))
        point = x[:1].clone().requires_grad_()
        out = model(point)
        (rows,) = torch.autograd.grad(out, point, torch.eye(3)[:, None], is_grads_batched=True)
        (third,) = torch.autograd.grad(model(point).square().sum(), point, create_graph=True)
        for _ in range(2):
            (third,) = torch.autograd.grad(third.square().sum(), point, create_graph=True)
        log.append([float(curvature.sum()), float(rows.sum()), float(third.detach().sum())])
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
