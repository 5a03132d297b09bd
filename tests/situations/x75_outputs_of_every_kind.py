"""Outputs: a named tuple, an object with slots, the same tensor twice, an input itself, views of each other, None.

Situation: The loop relies on identities: one output is the input, two are the same object, one is a view of another,
    one is a parameter, one is detached; a field is computed lazily by the object.
Required: Types, identities, views and requires_grad as plain; gradients as plain.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class Lazy:
    __slots__ = ("hidden", "weight")

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self.hidden, self.weight = hidden, weight

    @property
    def score(self) -> Tensor:
        return torch.tanh(self.hidden @ self.weight)


class Output(NamedTuple):
    logits: Tensor
    again: Tensor
    given: Tensor
    rows: tuple[Tensor, ...]
    lazy: Lazy
    nothing: None
    weight: Tensor
    stopped: Tensor
    mapping: dict[Any, Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.block, self.out, self.w = (
            nn.Linear(6, 8),
            Block(8),
            nn.Linear(8, 2),
            nn.Parameter(torch.randn(8)),
        )

    def forward(self, *, x: Tensor, **unused: Any) -> Output:
        h = torch.sin(self.block(self.inp(x)))
        logits = self.out(h)
        mapping = {("a", 1): h.exp(), 7: [unused, h[:1]]}
        return Output(logits, logits, x, h.unbind(0), Lazy(h, self.w), None, self.w, h.detach(), mapping)


def build() -> Case:
    x, y, log, marker = torch.randn(5, 6), torch.arange(5) % 2, [], object()

    def step(model: Net, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        o = model(x=x, marker=marker)
        log.append([type(o).__name__, o.logits is o.again, o.given is x, o.weight is model.w, o.stopped.requires_grad])
        log.append(
            [o.mapping[7][0]["marker"] is marker, o.rows[0]._is_view(), o.stopped._version, o.lazy.hidden.is_leaf]
        )
        loss = F.cross_entropy(o.logits, y) + o.rows[1].square().sum() + o.lazy.score.sum()
        loss = loss + 0.1 * (o.mapping["a", 1].mean() + o.again.var() + o.weight.square().sum())
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=Net(),
        batch=((), {"x": x}),
        loss=lambda o: F.cross_entropy(o.logits, y),
        step=step,
        extra=lambda m: log,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
