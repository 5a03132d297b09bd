"""Selective checkpointing, checkpoint_sequential and checkpoint under no_grad inside the model.

Situation: One block uses a selective-checkpoint policy (a dispatch mode of torch's own in forward and in recompute),
    one checkpoint_sequential, one checkpoint(determinism_check) with early stop off, one checkpoints under no_grad;
    nested.
Required: As plain.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from .blocks import Block
from .harness import Case


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


class ManyForms(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.a, self.b, self.c, self.teacher = Block(d), Block(d), Block(d), Block(d)
        self.sequence = nn.Sequential(Block(d), nn.Dropout(0.2), Block(d), nn.Tanh())

    def nested(self, x: Tensor) -> Tensor:
        return torch.sin(checkpoint(self.b, x, use_reentrant=False)) * torch.exp(-x.square())

    def forward(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, keep_products)
        h = checkpoint(self.a, x, use_reentrant=False, context_fn=contexts)
        h = torch.tanh(h) + checkpoint_sequential(self.sequence, 2, h, use_reentrant=False)
        with set_checkpoint_early_stop(False):
            h = checkpoint(self.nested, h, use_reentrant=False, determinism_check="default")
        with torch.no_grad():
            soft = checkpoint(self.teacher, h, use_reentrant=False)
        return torch.sin(self.c(h)) + 0.1 * soft


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), ManyForms(8), nn.Linear(8, 2))
    x, y = torch.randn(5, 6), torch.arange(5) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
