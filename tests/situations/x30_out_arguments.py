"""Results are written through out=, into buffers that are used again by the next block.

Situation: Attention weights of a frozen branch are computed with out= into one scratch tensor per model; each block
    overwrites it after having used it in a differentiable op that saves nothing of it.
Required: As plain: each block's values are those of its own scratch content.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Scratched(nn.Module):
    def __init__(self, d: int, scratch: Tensor) -> None:
        super().__init__()
        self.f, self.scratch = nn.Linear(d, d), scratch
        self.weights, self.order = torch.empty(0), torch.empty(0, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch.mm(x, x.t(), out=self.scratch)
            torch.softmax(self.scratch, -1, out=self.scratch)
            torch.sort(x, dim=1, out=(self.weights, self.order))
        h = self.f(x)
        mixed = h + self.scratch @ x.detach()
        mixed = torch.sin(mixed) * torch.exp(h + self.weights)
        return torch.tanh(mixed + torch.add(x.detach(), 1.0, out=torch.empty_like(x)) * h)


def build() -> Case:
    scratch = torch.empty(6, 6)
    model = nn.Sequential(*[Scratched(8, scratch) for _ in range(3)], nn.Linear(8, 2))
    x, y = torch.randn(6, 8), torch.arange(6) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        extra=lambda m: float(scratch.sum()),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
