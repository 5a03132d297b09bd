"""Frozen and trainable parameters live in one block.

Source: https://github.com/pytorch/pytorch/issues/104690
    https://github.com/huggingface/peft/issues/1702
Situation: Frozen and trainable parameters live in one sharding unit (LoRA inside every block; a bias-only fine-tune):
    flat-parameter code refuses or gives frozen weights grads and states.
Required: Trains; frozen weights bit-identical with grad None and no state; memory = 1x params + trainable share only
    (extra gives the numbers).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class AdapterBlock(nn.Module):
    def __init__(self, d: int, r: int = 2) -> None:
        super().__init__()
        self.f, self.ln = nn.Linear(d, d), nn.LayerNorm(d)
        self.f.weight.requires_grad_(False)
        self.ln.requires_grad_(False)
        self.A, self.B = nn.Parameter(torch.randn(r, d) * 0.2), nn.Parameter(torch.zeros(d, r))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.f(self.ln(x)) + x @ self.A.t() @ self.B.t())


def build() -> Case:
    model = nn.Sequential(AdapterBlock(8), AdapterBlock(8), nn.Linear(8, 2).requires_grad_(False))
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    x, y = torch.randn(6, 8), torch.arange(6) % 2

    def extra(model: nn.Module) -> dict[str, Any]:
        same = all(torch.equal(frozen[n], p) and p.grad is None for n, p in model.named_parameters() if n in frozen)
        return {
            "frozen_same": same,
            "trainable": sum(p.numel() for p in model.parameters() if p.requires_grad),
            "total": sum(p.numel() for p in model.parameters()),
            "flags": [p.requires_grad for p in model.parameters()],
        }

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        extra=extra,
    )
