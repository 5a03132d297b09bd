"""A broadcast tensor of stride 0 is saved for backward.

Source: https://github.com/deepspeedai/DeepSpeed/pull/8388
Situation: A broadcast (expand, stride 0) tensor is saved for backward: logical size 64x its storage. Naive offload
    materialises all of it.
Required: Accounting uses storage bytes; offloaded bytes for such a tensor must not exceed its storage (or it stays);
    strides restored or equivalent; values as plain.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class BroadcastBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.row = nn.Linear(d, d), nn.Parameter(torch.randn(1, d))

    def forward(self, x: Tensor) -> Tensor:
        big = torch.tanh(self.row + 0).expand(x.shape[0], -1)
        return torch.sigmoid(self.f(x)) * big


def build() -> Case:
    model = nn.Sequential(BroadcastBlock(16), BroadcastBlock(16), nn.Linear(16, 2))
    x, y = torch.randn(64, 16), torch.arange(64) % 2

    def expanded_saved_tensors(model: nn.Module) -> list[list[Any]]:
        strides: list[list[Any]] = []  # the storage is 64 bytes each, the logical size 4096

        def pack(t: Tensor) -> Tensor:
            if 0 in t.stride() and t.numel() > 64:
                strides.append([list(t.shape), list(t.stride()), t.untyped_storage().nbytes()])
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(x)
        return strides

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        info=expanded_saved_tensors,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
