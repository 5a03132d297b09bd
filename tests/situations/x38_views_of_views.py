"""Saved tensors that are unusual views: as_strided overlaps, diagonals, windows, other dtypes over one storage.

Situation: Sliding windows by unfold and as_strided, a diagonal, unbind and split outputs, a transposed slice with a
    storage offset, bits of floats read as integers by view(dtype), then in-place writes through some of them.
Required: As plain, with the exact sizes, strides, offsets and dtypes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Viewing(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.f(x)) * 1.5
        windows = h.unfold(1, 3, 2)
        overlap = torch.as_strided(h, (h.shape[0], h.shape[1] - 1, 2), (h.shape[1], 1, 1))
        diagonal = h[:, : h.shape[0]].diagonal()
        a, b = h.split([3, h.shape[1] - 3], 1)
        corner = h.t()[2:5, 1:].swapaxes(0, 1)
        truncated = (h.detach().view(torch.int32) & -65536).view(torch.float32)  # the upper 16 bits
        terms = windows.sin().mean() + overlap.prod(-1).sum(1, keepdim=True) * diagonal.exp().mean()
        terms = terms + (a.exp() @ b.cos()[:3, :4]).mean() + corner.square().sin().sum() * 0.1
        padded = x.new_zeros(x.shape[0], x.shape[1] + 2)
        padded[:, 1:-1] = h + (truncated - h).detach()
        padded.narrow(1, 0, 2).add_(0.5)
        smooth = padded[:, :-2] * padded[:, 2:] + padded[:, 1:-1].exp()
        return x + torch.sin(self.g(smooth)) * terms


def build() -> Case:
    model = nn.Sequential(nn.Linear(8, 8), Viewing(8), nn.Linear(8, 2))
    x, y = torch.randn(5, 8), torch.arange(5) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
    )
