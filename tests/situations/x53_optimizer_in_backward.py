"""Each parameter is stepped by a hook as soon as its gradient is there, and the gradient is freed.

Situation: Optimizer-in-backward: post-accumulate-grad hooks run an optimizer per parameter during backward, so
    weights of late layers have moved while activations of early layers are still to be replayed. A weight that feeds
    a detached gate is moved before the gate is asked for.
Required: As plain: a replay reads the weights of the forward.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class DetachedGate(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(self.gate(x))
        h = gate.square() * torch.sin(self.value(x))  # saves the square, and waits for it longer than ...
        return x + torch.tanh(self.gate(torch.tanh(h)))  # ... the gate waits for its gradient


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Block(8), DetachedGate(8), nn.LayerNorm(8), Block(8), nn.Linear(8, 2))
    x, y = torch.randn(5, 6), torch.arange(5) % 2
    optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}
    steps = {"n": 0}

    def step_now(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()
        steps["n"] += 1

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_now)

    def step(model: nn.Module, _: None, i: int) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: [steps["n"], all(p.grad is None for p in m.parameters())],
        expect=[3 * 18, True],
        optimizer=None,
    )
