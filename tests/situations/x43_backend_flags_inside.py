"""Backend flags are set around part of the forward and are others in backward.

Situation: A convolution, a linear layer and an attention run with oneDNN switched off, with one attention kernel
    chosen, with another number of threads. A replay under the flags of backward may take another kernel and give
    other bits.
Required: As plain: an op is replayed under the flags it ran under, or kept.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .harness import Case


class Flagged(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.f = nn.Conv2d(channels, channels, 3, padding=1), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.backends.mkldnn.flags(enabled=False):
            h = torch.tanh(self.conv(x))
            h = torch.sin(self.conv(h * 1.1))
        tokens = h.flatten(2)
        with sdpa_kernel(SDPBackend.MATH):
            tokens = torch.sin(F.scaled_dot_product_attention(tokens, tokens, tokens))
        torch.set_num_threads(2)
        tokens = torch.exp(-self.f(tokens).square())
        torch.set_num_threads(1)
        tokens = tokens + F.scaled_dot_product_attention(tokens[:, None], tokens[:, None], tokens[:, None])[:, 0]
        return x + torch.sin(tokens.view_as(x) * torch.sigmoid(self.conv(h)))


def build() -> Case:
    model = nn.Sequential(Flagged(16), Flagged(16), nn.Flatten(), nn.Linear(16 * 64, 3))
    x, y = torch.randn(3, 16, 8, 8), torch.arange(3)
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
