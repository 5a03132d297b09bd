"""Weights are computed in the forward: orthogonal, weight norm, spectral norm, old hooks and new parametrisations.

Situation: The old weight_norm and spectral_norm set a plain attribute `weight` in a pre-forward hook (the latter
    moves its buffers in place); the new ones compute it on access, some cached; pruning multiplies a mask in a hook.
Required: As plain; the buffers moved once per forward.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm

from .harness import Case


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Cached(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f = nn.Linear(d, d)
        parametrize.register_parametrization(self.f, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return torch.sin(self.f(torch.tanh(self.f(x))))


def build() -> Case:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old forms are deprecated, and in use
        old = nn.Sequential(old_weight_norm(nn.Linear(8, 8)), nn.Tanh(), old_spectral_norm(nn.Linear(8, 8)))
    new = nn.Sequential(
        parametrizations.orthogonal(nn.Linear(8, 8)), nn.Tanh(), parametrizations.weight_norm(nn.Linear(8, 8))
    )
    pruned = prune.l1_unstructured(nn.Linear(8, 8), "weight", amount=0.4)
    model = nn.Sequential(old, nn.GELU(), new, Cached(8), pruned, nn.Tanh(), nn.Linear(8, 2))
    x, y = torch.randn(5, 8), torch.arange(5) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
