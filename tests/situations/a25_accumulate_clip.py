"""Uneven gradient accumulation with global norm clipping.

Source: https://github.com/deepspeedai/DeepSpeed/pull/7981
    https://github.com/pytorch/pytorch/issues/124523
Situation: Several backward() calls per optimizer step (uneven last micro-batch) with global norm clipping;
    offload/optimizer-in-backward paths drop or apply partial gradients.
Required: Total norm and params as plain; no update before step(); p.grad visible to clip_grad_norm_.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .blocks import Block
from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Block(8), Block(8), nn.Linear(8, 3))
    x, y, norms = torch.randn(11, 6), torch.arange(11) % 3, []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> float:
        optimizer.zero_grad()
        total = 0.0
        for a in range(0, 11, 4):
            loss = F.cross_entropy(model(x[a : a + 4]), y[a : a + 4], reduction="sum") / 11
            loss.backward()
            total += float(loss)
        norms.append(round(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)), 6))
        optimizer.step()
        return total

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: norms,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
