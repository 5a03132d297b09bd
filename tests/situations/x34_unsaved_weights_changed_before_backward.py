"""Weights that autograd has not saved are changed in place between forward and backward.

Situation: A bias, an embedding's table and an additive position are moved under no_grad (through the version counter)
    or through `.data` (past it) before backward. Plain torch needs none of them and is right.
Required: The plain result, or one RuntimeError in backward; never a gradient that belongs to the changed weights.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.position = nn.Embedding(10, 8), nn.Parameter(torch.randn(4, 8))
        self.block, self.out = Block(8), nn.Linear(8, 2)

    def forward(self, ids: Tensor) -> Tensor:
        h = torch.sin(self.emb(ids) + self.position)
        return self.out(torch.tanh(self.block(h)).mean(1))


def build() -> Case:
    model = Embedded()
    twin, ids, y = copy.deepcopy(model), torch.randint(0, 10, (5, 4)), torch.arange(5) % 2
    outcomes: list[str] = []

    def disturb(model: Embedded, i: int) -> None:
        for p in (model.emb.weight, model.position, model.block.f1.bias):
            if i % 2:
                p.data.mul_(1.5)
            else:
                with torch.no_grad():
                    p.add_(0.25)

    def train(model: Embedded, i: int) -> tuple[Tensor, str]:
        """One step by hand with a change before backward; the loss and `ran` or `RuntimeError`."""
        loss = F.cross_entropy(model(ids), y)
        disturb(model, i)
        try:
            grads = torch.autograd.grad(loss, list(model.parameters()))
        except RuntimeError:
            return loss.detach(), "RuntimeError"
        with torch.no_grad():
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.sub_(grad, alpha=0.1)
        return loss.detach(), "ran"

    def step(model: Embedded, _: None, i: int) -> Tensor:
        twin_loss, _ran = train(twin, i)
        loss, outcome = train(model, i)
        equal = all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
        outcomes.append("equal" if equal and torch.equal(loss, twin_loss) else outcome)
        model.load_state_dict(twin.state_dict())
        return loss

    return Case(
        model=model,
        batch=((ids,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        steps=4,
        extra=lambda m: outcomes,
        accept=lambda result: set(result["extra"]) <= {"equal", "RuntimeError"},
        optimizer=None,
    )
