"""GradScaler skips a step that overflowed.

Source: https://github.com/deepspeedai/DeepSpeed/issues/8415
    https://github.com/pytorch/pytorch/issues/152279
Situation: GradScaler with an overflow on the second step: unscale_, clip, scaler.step must skip the update.
Required: On overflow params and optimizer state (incl. step count) unchanged, scale halves, next step proceeds; the
    skip is visible to the user.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Block(8), nn.Linear(8, 1))
    x, log = torch.randn(5, 6), []
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, i: int) -> Tensor | float:
        optimizer.zero_grad()
        loss = model(x).square().mean() * (float("inf") if i == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        log.append([scaler.get_scale(), float(model[0].weight.detach().sum())])
        return 0.0 if i == 1 else loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: o.square().mean(),
        step=step,
        extra=lambda m: log,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
