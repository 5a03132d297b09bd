"""Two halves of a model train at once in two threads.

Source: https://github.com/pytorch/pytorch/issues/96764
    https://github.com/rwth-i6/returnn/issues/1581
Situation: Two models train at once in two Python threads of one process; hook stacks, RNG stashes and 'current
    region' globals get mixed up.
Required: Each result equals its single-thread reference (no RNG in this case).
"""

import threading

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (
            nn.Sequential(nn.Linear(6, 16), Block(16), Block(16), Block(16), nn.Linear(16, 2)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def build() -> Case:
    x, y = torch.randn(32, 6), torch.arange(32) % 2

    def step(model: Pair, _: None, i: int) -> float:
        errors, totals = [], [0.0, 0.0]

        def work(k: int, net: nn.Module) -> None:
            try:
                optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
                for _ in range(15):
                    optimizer.zero_grad()
                    loss = F.cross_entropy(net(x), y)
                    loss.backward()
                    optimizer.step()
                    totals[k] = float(loss)
            except Exception as error:
                errors.append(repr(error))

        threads = [threading.Thread(target=work, args=(k, net)) for k, net in enumerate((model.a, model.b))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise RuntimeError(errors[0])
        return sum(totals)

    return Case(
        model=Pair(), batch=((x,), {}), loss=lambda o: F.cross_entropy(o, y), step=step, optimizer=None, steps=2
    )
