"""Gradients are views of one flat buffer, changed by parameter hooks and accumulated in place.

Situation: The loop assigns `p.grad = flat[i:j].view_as(p)` once and zeroes with set_to_none=False; parameter hooks
    scale gradients, a post-accumulate hook counts; two micro-batches accumulate.
Required: The gradients stay views of the same buffer, the buffer's content as plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Block(8), Block(8), nn.Linear(8, 2))
    x, y, counts, sums = torch.randn(6, 6), torch.arange(6) % 2, {"n": 0}, []
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    at = 0
    for p in model.parameters():
        p.grad = flat[at : at + p.numel()].view_as(p)
        at += p.numel()

    def count(p: Tensor) -> None:
        counts["n"] += 1

    model[1].f1.weight.register_hook(lambda grad: grad * 0.5)
    model[2].f2.weight.register_post_accumulate_grad_hook(count)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> float:
        optimizer.zero_grad(set_to_none=False)
        total = 0.0
        for part in (slice(0, 4), slice(4, 6)):
            loss = F.cross_entropy(model(x[part]), y[part])
            loss.backward()
            total += float(loss)
        flat.mul_(0.9)
        sums.append(float(flat.sum()))
        optimizer.step()
        return total

    def extra(model: nn.Module) -> list[object]:
        start = flat.untyped_storage().data_ptr()
        return [sums, counts["n"], all(p.grad.untyped_storage().data_ptr() == start for p in model.parameters())]

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=extra,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )
