"""A pipeline stage frees its output after sending it, and backpropagates through the engine by hand.

Situation: `output.data = torch.empty(1)` as pipeline engines do: the tensor object stays for its graph, its memory is
    gone; backward is called on it through the engine with the gradient that came back. Elsewhere a storage is resized
    to zero after its last use.
Required: As plain: nothing is replayed from memory that the user has given away.
"""

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from .blocks import Block
from .harness import Case


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.block, self.norm = nn.Linear(6, 8), Block(8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.inp(x)
        wave = torch.sin(h * 0.5)  # the product saves nothing of h
        h = h + 1.0
        received = torch.tanh(h)
        h.untyped_storage().resize_(0)  # nobody saved it
        return self.block(self.norm(received) * wave) + wave, received


def build() -> Case:
    x = torch.randn(5, 6)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        output, _ = model(x)
        arrived = output.detach().requires_grad_()
        output.data = torch.empty((1,))
        loss = torch.sin(arrived).square().mean()
        loss.backward()
        Variable._execution_engine.run_backward((output,), (arrived.grad,), False, False, (), True, True)
        optimizer.step()
        return loss.detach()

    return Case(
        model=Stage(),
        batch=((x,), {}),
        loss=lambda o: o[0].square().mean(),
        step=step,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
