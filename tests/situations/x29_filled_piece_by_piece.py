"""Tensors that are made empty or zero and then filled: slices, views, index_put_, masked_scatter_, scatter_, copy_.

Situation: The op that made the storage says nothing of what is in it; each write makes it another value, and between
    two writes it is read.
Required: As plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Filled(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.g, self.d = nn.Linear(d, d), nn.Linear(d, d), d

    def forward(self, x: Tensor) -> Tensor:
        h, n = torch.tanh(self.f(x)), x.shape[0]
        out = torch.zeros(n, 2 * self.d)
        out[:, : self.d] = h
        first = torch.sin(out + 0.0)  # what is there before the second half is written
        out[:, self.d :].copy_(h * h)
        rows = torch.empty(n, self.d)
        for i, row in enumerate(h.unbind(0)):
            rows[(i + 1) % n] = row.exp()
        picked = torch.zeros(n, self.d).index_put((torch.arange(n), torch.arange(n) % self.d), h[:, 0])
        picked[torch.arange(n) % 2 == 0] += 1.5 * h[::2].cos()
        spread = x.clone().masked_scatter_(x > 0, h).scatter_(1, torch.zeros(n, 1, dtype=torch.long), 0.5)
        window = torch.ones(n, self.d).fill_diagonal_(0.3).triu_().mul_(h)
        mixed = first * torch.cos(out)
        return x + self.g(mixed[:, : self.d] + mixed[:, self.d :] + rows.sigmoid() * picked.exp() + spread * window)


def build() -> Case:
    model = nn.Sequential(Filled(8), Filled(8), nn.Linear(8, 2))
    x, y = torch.randn(6, 8), torch.arange(6) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
    )
