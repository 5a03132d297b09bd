"""Layers are unfrozen into a new parameter group, others frozen, while training goes on.

Source: https://github.com/technicolor-research/dsve-loc/issues/16
    https://github.com/allenai/rslearn/pull/632
Situation: Layers frozen at first are unfrozen at step 2 and added with optimizer.add_param_group; later one group is
    frozen again (requires_grad False, grad None).
Required: New params train from that step with fresh state and their own lr; refrozen ones stop moving; state_dict
    covers all groups.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import residual_net
from .harness import Case


def build() -> Case:
    model, x, y = residual_net(), torch.randn(9, 6), torch.arange(9) % 3
    model[1].requires_grad_(False)
    model[3].requires_grad_(False)

    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        if i == 2:
            model[3].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 5e-2})
        if i == 4:
            model[0].requires_grad_(False)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        steps=6,
        extra=lambda m: [p.grad is None for p in (m[0].weight, m[1].f1.weight, m[3].f1.weight)],
        expect=[True, True, False],
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
