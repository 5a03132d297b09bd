"""A VQ codebook is read by the forward and then moved in place by the same forward.

Situation: The quantised vectors are an embedding look-up in a buffer; after the look-up the buffer is moved towards
    the batch in place, through `.data` and under no_grad, and dead codes are re-seeded from the batch. A replayed
    look-up reads the moved codebook.
Required: The gradient belongs to the codes that were looked up; the codebook moves once per forward; as plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Codebook(nn.Module):
    def __init__(self, num_codes: int, d: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(num_codes, d))
        self.register_buffer("usage", torch.zeros(num_codes))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        nearest = torch.cdist(z, self.codes).argmin(1)
        quantised = F.embedding(nearest, self.codes)
        commitment = (quantised.detach() - z).square().mean()
        onehot = F.one_hot(nearest, self.codes.shape[0]).to(z.dtype)
        self.usage.data.mul_(0.8).add_(onehot.sum(0), alpha=0.2)
        with torch.no_grad():
            moved = (onehot.t() @ z) / onehot.sum(0).clamp(min=1)[:, None]
            self.codes[onehot.sum(0) > 0] *= 0.7
            self.codes.add_(0.3 * moved)
            self.codes[self.usage < 0.05] = z[0]
        return z + (quantised - z).detach(), commitment


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.codebook = nn.Sequential(nn.Linear(6, 4), nn.Tanh()), Codebook(7, 4)
        self.decode = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z, commitment = self.codebook(self.encode(x))
        second, more = self.codebook(torch.sin(z) * z)  # twice in a forward: the second reads moved codes
        return self.decode(second * z), commitment + more


def build() -> Case:
    x = torch.randn(9, 6)
    return Case(
        model=Net(),
        batch=((x,), {}),
        loss=lambda o: F.mse_loss(o[0], x) + 0.25 * o[1],
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
        steps=4,
    )
