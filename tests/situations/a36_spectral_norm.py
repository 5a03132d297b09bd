"""Spectral norm does a power iteration in each training forward.

Source: https://github.com/chainer/chainer/pull/5742
Situation: Spectral-norm parametrisation does a power iteration per training forward and keeps u/v buffers; recompute
    advances them again and yields another weight.
Required: u/v as after one forward per step; gradient of the weight used in the forward.
"""

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from .harness import Case


def spectral_block(d: int) -> nn.Sequential:
    return nn.Sequential(spectral_norm(nn.Linear(d, d)), nn.LeakyReLU(0.2))


def build() -> Case:
    model = nn.Sequential(spectral_block(8), spectral_block(8), nn.Linear(8, 1))
    x = torch.randn(6, 8)
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: (1 - o).relu().mean() + o.square().mean(),
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    )
