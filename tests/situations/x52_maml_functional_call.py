"""Meta-learning: the model is called with other parameters, which are part of the graph.

Situation: MAML by functional_call: adapted weights are non-leaf tensors made by a differentiable inner step, the meta
    gradient goes through two inner steps. The parameters that the ops see are not the module's.
Required: As plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from .blocks import Block
from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(3, 8), Block(8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    x, target = torch.randn(3, 6, 3), torch.randn(3, 6, 1)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for task in range(3):
            adapted = dict(model.named_parameters())
            for _ in range(2):
                inner = F.mse_loss(functional_call(model, adapted, (x[task, :3],)), target[task, :3])
                grads = torch.autograd.grad(inner, list(adapted.values()), create_graph=True)
                adapted = {name: p - 0.1 * g for (name, p), g in zip(adapted.items(), grads, strict=True)}
            total = total + F.mse_loss(functional_call(model, adapted, (x[task, 3:],)), target[task, 3:])
        total.backward()
        optimizer.step()
        return total.detach()

    return Case(
        model=model,
        batch=((x[0],), {}),
        loss=lambda o: o.square().mean(),
        step=step,
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    )
