"""Pure bf16 parameters with a small learning rate.

Source: https://github.com/Nerogar/OneTrainer/issues/996
    https://github.com/pytorch/ao/pull/1124
Situation: Pure bf16 parameters with a small lr: plain AdamW's updates and weight decay are rounded away. A library
    that adds fp32 master weights or stochastic rounding changes the result; one that keeps less precision worsens it.
Required: Default: reproduce the plain bf16 result (state dtype policy stated in the report). Opt-in master weights:
    must approach the fp32 reference printed in extra.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import residual_net
from .harness import Case


def snapshot(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def num_moved(model: nn.Module, before: list[Tensor]) -> int:
    return sum(int((p != q).sum()) for p, q in zip(model.parameters(), before, strict=True))


def build() -> Case:
    model, x, y = residual_net().bfloat16(), torch.randn(9, 6).bfloat16(), torch.arange(9) % 3
    start = snapshot(model)

    def extra(model: nn.Module) -> dict[str, Any]:
        moved, of = num_moved(model, start), sum(p.numel() for p in model.parameters())
        torch.manual_seed(0)
        reference = residual_net().bfloat16().float()
        reference_start, x_float = snapshot(reference), x.float()
        optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-4, weight_decay=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            F.cross_entropy(reference(x_float), y).backward()
            optimizer.step()
        squares = sum((p - q).norm() ** 2 for p, q in zip(reference.parameters(), reference_start, strict=True))
        return {
            "moved": moved,
            "of": of,
            "fp32_moved": num_moved(reference, reference_start),
            "fp32_dist": round(float(squares**0.5), 6),
        }

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o.float(), y),
        steps=5,
        extra=extra,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-4, weight_decay=0.1),
    )
