"""One wrapped model is trained on by several threads at once.

Situation: Each thread runs forward and backward of the same model on its own batch, with its own gradients
    (autograd.grad); the loop adds them up in a fixed order.
Required: Every thread's gradient is the single-thread one; no RNG in this case.
"""

import threading

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 16), Block(16), nn.LayerNorm(16), Block(16), nn.Linear(16, 2))
    x, y = torch.randn(4, 16, 6), torch.arange(16) % 2

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> float:
        results: dict[int, tuple[Tensor, ...]] = {}
        losses, errors = [0.0] * 4, []

        def work(k: int) -> None:
            try:
                for _ in range(6):
                    loss = F.cross_entropy(model(x[k, : 10 + k]), y[: 10 + k])
                    results[k] = torch.autograd.grad(loss, list(model.parameters()))
                    losses[k] = float(loss)
            except Exception as error:
                errors.append(repr(error))

        threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise RuntimeError(errors[0])
        for p, *grads in zip(model.parameters(), *(results[k] for k in range(4)), strict=True):
            p.grad = grads[0] + grads[1] + grads[2] + grads[3]
        optimizer.step()
        return sum(losses)

    return Case(
        model=model,
        batch=((x[0],), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
