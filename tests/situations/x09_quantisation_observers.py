"""Quantisation-aware training: observers write running ranges in forward, rounding passes gradients straight through.

Situation: One observer replaces its buffer by a new tensor, one writes it in place after using it, one is the fused
    aten op that writes several buffers and reads them in the same call.
Required: Ranges moved once per forward, in the forward; the gradient belongs to the range that was used; as plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class ObservedLinear(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(d, d), nn.Linear(d, d)
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.ones(()))
        for name, start in (("min", float("inf")), ("max", float("-inf")), ("scale", 1.0)):
            self.register_buffer(f"fused_{name}", torch.tensor([start]))
        self.register_buffer("fused_zero", torch.zeros(1, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        h = self.f(x)
        scale = (self.high - self.low) / 15  # the range of before this batch, written below
        rounded = torch.clamp(torch.round((h - self.low) / scale), 0, 15) * scale + self.low
        self.low = torch.minimum(self.low * 0.9, h.detach().min())
        with torch.no_grad():
            self.high.mul_(0.9).add_(0.1 * h.max())
        h = torch.sin(h + (rounded - h).detach())
        on = torch.ones(1, dtype=torch.long)
        ranges = self.fused_min, self.fused_max, self.fused_scale, self.fused_zero
        h = torch.fused_moving_avg_obs_fake_quant(h, on, on, *ranges, 0.1, 0, 255, -1)
        return x + self.g(h * torch.sigmoid(h * scale))


def build() -> Case:
    model = nn.Sequential(ObservedLinear(8), ObservedLinear(8), nn.Linear(8, 2))
    x, y = torch.randn(6, 8), torch.arange(6) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    )
