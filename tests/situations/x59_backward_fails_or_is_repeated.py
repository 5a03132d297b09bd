"""A backward raises in the middle, a second backward is refused, an output is backpropagated piece by piece.

Situation: A tensor hook raises during backward and the loop goes on; a backward without retain_graph is followed by
    another, which torch refuses; only one of two outputs is backpropagated, the other later; a gradient argument is
    given.
Required: The same errors, the same gradients; the next steps are undisturbed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), Block(8), nn.Dropout(0.2), Block(8))
        self.a, self.b = nn.Linear(8, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.a(torch.tanh(h)), self.b(torch.sin(h))


def refuse(grad: Tensor) -> Tensor:
    raise ArithmeticError("a hook refuses")


def build() -> Case:
    x, y, log = torch.randn(5, 6), torch.arange(5) % 2, []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        a, b = model(x)
        if i == 0:
            handle = model.trunk[1].f1.weight.register_hook(refuse)
            try:
                F.cross_entropy(a, y).backward()
            except ArithmeticError as error:
                log.append(str(error))
            handle.remove()
            optimizer.zero_grad()
            a, b = model(x)
        loss = F.cross_entropy(a, y)
        loss.backward(retain_graph=i != 1)
        if i == 1:
            try:
                loss.backward()
            except RuntimeError as error:
                log.append(str(error)[:47])
        else:
            b.backward(torch.linspace(-1, 1, 15).view(5, 3))
        optimizer.step()
        return loss.detach()

    return Case(
        model=TwoHeads(),
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o[0], y),
        step=step,
        extra=lambda m: log,
        expect=["a hook refuses", "Trying to backward through the graph a second t"],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
