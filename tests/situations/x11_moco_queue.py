"""Momentum contrast: the forward swaps the key encoder's storages and overwrites part of a queue that it has used.

Situation: The momentum update assigns `p.data = ...`, which no dispatcher sees; the negatives are a clone of the
    queue, whose oldest columns are overwritten at the end of the same forward.
Required: Gradients against the negatives and the key encoder of this forward; queue and pointer as plain.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class MoCo(nn.Module):
    def __init__(self, d: int, queue_size: int) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(d, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 4))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(4, queue_size), dim=0))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def move_key_encoder(self) -> None:
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            k.data = k.data * 0.9 + q.data * 0.1

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        at = int(self.position)
        self.queue[:, at : at + keys.shape[0]] = keys.t()
        self.position[0] = (at + keys.shape[0]) % self.queue.shape[1]

    def forward(self, x_query: Tensor, x_key: Tensor) -> tuple[Tensor, Tensor]:
        q = F.normalize(self.query(x_query), dim=1)
        with torch.no_grad():
            self.move_key_encoder()
            k = F.normalize(self.key(x_key), dim=1)
        positive = torch.einsum("nc,nc->n", q, k)[:, None]
        negative = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([positive, negative], 1) / 0.2
        self.enqueue(k)
        return logits, torch.zeros(logits.shape[0], dtype=torch.long)


def build() -> Case:
    x = torch.randn(4, 6)
    return Case(
        model=MoCo(6, 12),
        batch=((x, x + 0.1 * torch.randn(4, 6)), {}),
        loss=lambda o: F.cross_entropy(*o),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        steps=5,
        extra=lambda m: int(m.position),
        expect=8,
    )
