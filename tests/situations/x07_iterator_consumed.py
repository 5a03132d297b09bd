"""The forward takes from an iterator and a queue, and writes a log: nothing that a copy of the model restores.

Situation: A block draws its noise from a generator object that all blocks share, takes its mix from a queue, appends
    its statistics to a list outside of the module. One more run of the forward, even of a copy on fake tensors, eats
    an item.
Required: Items are taken in the plain order, the log has one entry per call with plain numbers in it.
"""

import itertools
import queue
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case

LOG: list[float] = []
STREAM: dict[str, Iterator[int]] = {}


class Consumer(nn.Module):
    def __init__(self, d: int, mixes: "queue.Queue[float]") -> None:
        super().__init__()
        self.f, self.mixes = nn.Linear(d, d), mixes  # a queue has a lock: it can't be copied

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.f(x) + 0.05 * next(STREAM["noise"]))
        mix = self.mixes.get_nowait()
        LOG.append(float(h.detach().sum()))
        return (1 - mix) * x + mix * h * h


class Taker(nn.Module):
    """As Consumer, but nothing of it refuses to be copied."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.f = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        LOG.append(-1.0)
        return torch.sin(self.f(x) + 0.05 * next(STREAM["noise"])) * torch.sigmoid(x)


def build() -> Case:
    LOG.clear()
    STREAM["noise"] = itertools.count(1)
    mixes: queue.Queue[float] = queue.Queue()
    for k in range(20):
        mixes.put(0.1 * (k % 9 + 1))
    takers, consumers = nn.Sequential(Taker(8), Taker(8)), nn.Sequential(Consumer(8, mixes), Consumer(8, mixes))
    head, x, y = torch.randn(8, 2), torch.randn(6, 8), torch.arange(6) % 2
    further: dict[str, nn.Module] = {}

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        if i == 0:
            further["consumers"] = case["wrap"](consumers)
        optimizer.zero_grad()
        loss = F.cross_entropy(further["consumers"](model(x)) @ head, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    case = Case(
        model=takers,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o @ head, y),
        step=step,
        extra=lambda m: [LOG, next(STREAM["noise"]), mixes.qsize()],
        optimizer=lambda p: torch.optim.SGD([*p, *consumers.parameters()], lr=0.1),
    )
    return case
