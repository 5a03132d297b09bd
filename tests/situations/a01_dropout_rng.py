"""Dropout in every block.

Source: https://github.com/openai/guided-diffusion/issues/167
    https://github.com/allenai/OLMo-core/pull/828
Situation: Recomputed blocks with dropout draw a new mask in backward, so gradients belong to another sample than the
    loss.
Required: Losses, final params and the position of the global torch RNG stream equal the plain run, bit for bit.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class DropBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.ln, self.f1, self.f2, self.dr = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dr(self.f2(self.dr(F.gelu(self.f1(self.ln(x))))))


def build() -> Case:
    model = nn.Sequential(*[DropBlock(16) for _ in range(4)])
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.mse_loss(o, y),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
