"""Saved tensors of many dtypes in one graph.

Source: https://github.com/huggingface/accelerate/issues/454
    https://github.com/pytorch/pytorch/pull/61928
Situation: Saved tensors of every kind in one graph: complex (FFT), bool masks, int64/int32 indices, bf16, float16,
    float64, 0-dim scalars; numpy-based stores fail on bf16 or change bits.
Required: Bit-exact round trip of each dtype; result as plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class DtypesBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.w = nn.Linear(d, d), nn.Parameter(torch.randn(d // 2 + 1) * 0.5)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.fft.rfft(x) * torch.complex(self.w, self.w * 0.1)  # complex64
        h = torch.fft.irfft(z, n=x.shape[-1])
        h = torch.where(h > 0, h, h * 0.1) * self.scale  # bool, 0-dim
        h = h.masked_fill(h.abs() < 0.05, 0.0)
        idx = h.argsort(-1)  # int64
        h = h.gather(-1, idx)
        b = torch.tanh(self.f(h).bfloat16()) * torch.sigmoid(h.bfloat16())
        e = torch.exp(-h.half().abs())
        d = (h.double() ** 3 / 7).tanh()
        return x + b.float() + e.float() + d.float() + h.cummax(-1)[0]  # int64 indices


def build() -> Case:
    model = nn.Sequential(DtypesBlock(8), DtypesBlock(8), nn.Linear(8, 3))
    x, y = torch.randn(6, 8), torch.arange(6) % 3
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
    )
