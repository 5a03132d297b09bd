"""The memory of the batch is refilled through numpy between forward and backward: no version counter moves.

Situation: A loader hands out torch.from_numpy views of one array and fills the array again while backward runs, as
    shared-memory loaders do. Plain torch is right, since the first ops save nothing of the input.
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
        return self.out(self.block(torch.sin(x + self.shift)) * (x * 2.0 + self.shift).exp())


def build() -> Case:
    model = AddsFirst(8)
    twin, batches, y = copy.deepcopy(model), torch.randn(4, 5, 8).numpy(), torch.arange(5) % 2
    shared = batches[0].copy()
    outcomes: list[str] = []

    def train(model: nn.Module, i: int) -> tuple[Tensor, str]:
        """One step by hand on memory that is refilled; the loss and `ran` or `RuntimeError`."""
        shared[:] = batches[i]
        loss = F.cross_entropy(model(torch.from_numpy(shared)), y)
        shared[:] = batches[i + 1]
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
        batch=((torch.from_numpy(shared),), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: outcomes,
        accept=lambda result: set(result["extra"]) <= {"equal", "RuntimeError"},
        optimizer=None,
    )
