"""The input embedding is the output projection.

Source: https://github.com/meta-pytorch/torchtune/pull/1847
Situation: Input embedding and output projection are the same Parameter. Wrapping, offloading or re-registering
    parameters can untie it or count it twice.
Required: Tie (same object) survives; optimizer holds it once; state after 3 steps equals plain.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class LM(nn.Module):
    def __init__(self, vocabulary: int = 30, d: int = 8) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(2))
        self.head = nn.Linear(d, vocabulary, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def build() -> Case:
    ids = torch.randint(0, 30, (3, 7))

    def extra(model: LM) -> dict[str, Any]:
        return {"tied": model.head.weight is model.emb.weight, "n": sum(p.numel() for p in model.parameters())}

    return Case(
        model=LM(),
        batch=((ids,), {}),
        loss=lambda o: F.cross_entropy(o[:, :-1].reshape(-1, 30), ids[:, 1:].reshape(-1)),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        extra=extra,
        expect={"tied": True, "n": 800},
    )
