"""Low-rank adapters over a frozen embedding and frozen weights.

Source: https://github.com/huggingface/transformers/issues/23170
    https://github.com/locuslab/open-unlearning/issues/178
Situation: Frozen embedding and frozen base weights, only low-rank adapters train. Inputs of a recomputed block do not
    require grad, and adapters silently get no gradient.
Required: All adapters receive the plain gradient; frozen weights stay bit-identical, have grad None, and the
    embedding is not made trainable.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class LoRA(nn.Module):
    def __init__(self, d: int, r: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(d, d)
        self.base.requires_grad_(False)
        self.A, self.B = nn.Parameter(torch.randn(r, d) * 0.1), nn.Parameter(torch.zeros(d, r))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.base(x) + x @ self.A.t() @ self.B.t())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(20, 8).requires_grad_(False)
        self.blocks = nn.ModuleList(LoRA(8) for _ in range(3))
        self.head = nn.Linear(8, 20).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def build() -> Case:
    ids = torch.randint(0, 20, (2, 6))

    def extra(model: Net) -> dict[str, Any]:
        return {
            "zero_B": sum(float(block.B.abs().sum()) == 0 for block in model.blocks),
            "emb_grad": model.emb.weight.grad is None,
            "emb_req": model.emb.weight.requires_grad,
        }

    return Case(
        model=Net(),
        batch=((ids,), {}),
        loss=lambda o: F.cross_entropy(o[:, :-1].reshape(-1, 20), ids[:, 1:].reshape(-1)),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        extra=extra,
        expect={"zero_B": 0, "emb_grad": True, "emb_req": False},
    )
