"""A memory inside the module grows in each forward, and old entries take part in the loss.

Situation: Keys and values of earlier batches are kept in lists and in a concatenated attribute that every forward
    replaces by a longer one. A second forward (for a plan or a recompute) doubles them.
Required: Lengths and contents as plain; the shapes differ in every step and still nothing is recomputed wrongly.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class MemoryAttention(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.keys: list[Tensor] = []
        self.values: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        keys = torch.cat([*self.keys, k])
        values = v if self.values is None else torch.cat([self.values, v])
        out = x + F.scaled_dot_product_attention(q[None], keys[None], values[None])[0]
        self.keys.append(k.detach())
        self.values = values.detach()
        return out


def build() -> Case:
    model = nn.Sequential(MemoryAttention(8), nn.Tanh(), MemoryAttention(8), nn.Linear(8, 2))
    x, y = torch.randn(4, 8), torch.arange(4) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        extra=lambda m: [len(m[0].keys), *m[0].values.shape, float(m[2].values.sum()), type(m[2].values).__name__],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        steps=5,
    )
