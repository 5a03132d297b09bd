"""A forward hook that changes an activation is there in the forward and gone in the backward.

Situation: A steering vector is added by a hook inside a `with` block around the forward only; a weight is replaced by
    a pruning pre-hook that is removed before backward; a submodule is swapped after the forward.
Required: The gradient belongs to the forward that ran; as plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Block(8), Block(8), nn.Linear(8, 2))
    x, y, steering = torch.randn(5, 6), torch.arange(5) % 2, torch.randn(8)

    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        steer = model[1].register_forward_hook(lambda module, args, output: torch.sin(output + steering * (i + 1)))
        prune = model[2].f1.register_forward_pre_hook(lambda module, args: (args[0] * (args[0].abs() > 0.3),))
        loss = F.cross_entropy(model(x), y)
        steer.remove()
        prune.remove()
        kept, model[2] = model[2], nn.Identity()
        loss.backward()
        model[2] = kept
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
