"""The forward changes an intermediate in place after an op that saved nothing of it has used it.

Situation: k = 2h + c, then h is changed in place (directly, through a view, through detach(), by an in-place
    activation), then k is saved by a later op. Replaying k from h reads the changed h.
Required: As plain: a source that is written is copied first, or what was made from it is kept.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Rewriting(nn.Module):
    def __init__(self, d: int, how: int) -> None:
        super().__init__()
        self.f, self.g, self.how = nn.Linear(d, d), nn.Linear(d, d), how

    def rewrite(self, h: Tensor) -> Tensor:
        if self.how == 0:
            return h.add_(1.0)
        if self.how == 1:
            h[:, ::2].mul_(0.5)
            return h
        if self.how == 2:
            h.detach().mul_(-1.0)
            return h
        if self.how == 3:
            return F.relu(h, inplace=True)
        if self.how == 4:
            h.t()[1:3] = 0.25
            return h
        with torch.no_grad():
            h.copy_(h.flip(0) * 0.9)
        return h

    def forward(self, x: Tensor) -> Tensor:
        h = self.f(x) + x
        k = h * 2.0 + 0.5  # saves nothing of h
        early = torch.sin(k) * torch.cos(k - 1.0)
        h = self.rewrite(h)
        late = torch.exp(-(k + h).square())
        return x + self.g(early + late * h)


def build() -> Case:
    model = nn.Sequential(*[Rewriting(8, how) for how in range(6)], nn.Linear(8, 2))
    x, y = torch.randn(5, 8), torch.arange(5) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
