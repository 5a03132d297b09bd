"""The forward takes from an iterator and a queue, and writes a log: nothing that a snapshot of the model restores.

Situation: A block draws its noise from a generator object, takes its mix from a queue, appends its statistics to a
    list outside the module. One more run of the forward, even on fake tensors, eats an item.
Required: Items are taken in the plain order, the log has one entry per call with plain numbers in it.
"""

import itertools
import queue

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Consumer(nn.Module):
    def __init__(self, d: int, log: list[float]) -> None:
        super().__init__()
        self.f, self.log = nn.Linear(d, d), log
        self.stream = itertools.count(1)
        self.mixes: queue.Queue[float] = queue.Queue()
        for k in range(20):
            self.mixes.put(0.1 * (k + 1))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.f(x) + 0.05 * next(self.stream))
        mix = self.mixes.get_nowait()
        self.log.append(float(h.detach().sum()))
        return (1 - mix) * x + mix * h * h


def build() -> Case:
    log: list[float] = []
    model = nn.Sequential(Consumer(8, log), Consumer(8, log), nn.Linear(8, 2))
    x, y = torch.randn(6, 8), torch.arange(6) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        extra=lambda m: [log, next(m[0].stream), m[1].mixes.qsize()],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
