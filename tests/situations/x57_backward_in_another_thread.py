"""Forward in one thread, backward in another.

Situation: A pipeline runs backward in a worker thread; another thread evaluates the same model under no_grad while
    the training thread is between forward and backward. Modes and hooks are per thread.
Required: As plain.
"""

import threading
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


def in_thread(work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Block(8), nn.Dropout(0.3), Block(8), nn.Linear(8, 2))
    x, y, log = torch.randn(5, 6), torch.arange(5) % 2, []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        losses: list[Tensor] = []

        def forward() -> None:
            losses.append(F.cross_entropy(model(x), y))

        def evaluate() -> None:
            with torch.no_grad():
                log.append(float(model[1](x[:, :1].expand(5, 8)).sum()))

        if i == 2:
            in_thread(forward)
        else:
            forward()
        in_thread(evaluate)
        if i == 0:
            losses[0].backward()
        else:
            in_thread(losses[0].backward)
        optimizer.step()
        return losses[0].detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: log,
        steps=4,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
