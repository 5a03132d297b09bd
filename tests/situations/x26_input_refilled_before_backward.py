"""The batch tensor is refilled in place between forward and backward.

Situation: A loader reuses one tensor: the next batch is copied into it as soon as the forward is done. The first op
    (an addition, an embedding of a buffer, a comparison) saves nothing of the input, so plain torch is right.
Required: The plain result, or one RuntimeError in backward; never a gradient that belongs to the next batch.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class AddsFirst(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.shift, self.block, self.out = nn.Parameter(torch.randn(d) * 0.1), Block(d), nn.Linear(d, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(x + self.shift)
        return self.out(self.block(h) * (x * 2.0 + self.shift).exp())


def build() -> Case:
    model = AddsFirst(8)
    twin, batches, y = copy.deepcopy(model), torch.randn(4, 5, 8), torch.arange(5) % 2
    outcomes: list[str] = []

    def train(model: nn.Module, i: int) -> tuple[Tensor, str]:
        """One step by hand on a tensor that is refilled; the loss and `ran` or `RuntimeError`."""
        batch = batches[i].clone()
        loss = F.cross_entropy(model(batch), y)
        batch.copy_(batches[i + 1])
        try:
            grads = torch.autograd.grad(loss, list(model.parameters()))
        except RuntimeError:
            return loss.detach(), "RuntimeError"
        with torch.no_grad():
            for p, grad in zip(model.parameters(), grads, strict=True):
                p.sub_(grad, alpha=0.1)
        return loss.detach(), "ran"

    def step(model: nn.Module, _: None, i: int) -> Tensor:
        twin_loss, _ran = train(twin, i)
        loss, outcome = train(model, i)
        equal = all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
        outcomes.append("equal" if equal and torch.equal(loss, twin_loss) else outcome)
        model.load_state_dict(twin.state_dict())
        return loss

    return Case(
        model=model,
        batch=((batches[0].clone(),), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: outcomes,
        accept=lambda result: set(result["extra"]) <= {"equal", "RuntimeError"},
        optimizer=None,
    )
