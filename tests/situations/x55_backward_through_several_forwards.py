"""Backpropagation through time over calls of the model: the state that one call returns goes into the next.

Situation: A recurrent cell is the wrapped model; a window of five calls is backpropagated at once, the state is
    detached between windows, and one graph is kept (retain_graph) to be walked again by the next window. A replay
    chain that reaches over a call's border meets what an earlier call has released.
Required: As plain.
"""

import torch
from torch import Tensor, nn

from .harness import Case


class Cell(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.gate, self.new, self.norm = nn.Linear(2 * d, d), nn.Linear(2 * d, d), nn.LayerNorm(d)
        self.out = nn.Linear(d, d)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([x, state], 1)
        gate = torch.sigmoid(self.gate(both))
        state = self.norm(gate * state + (1 - gate) * torch.tanh(self.new(both)))
        return self.out(state), state


def build() -> Case:
    model, sequence = Cell(6), torch.randn(20, 3, 6)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> float:
        state, total = torch.zeros(3, 6), 0.0
        for window in range(4):
            optimizer.zero_grad()
            loss = torch.zeros(())
            for t in range(5 * window, 5 * window + 5):
                prediction, state = model(sequence[t], state)
                loss = loss + (prediction - sequence[(t + 1) % 20]).square().mean()
            if window == 2:
                loss.backward(retain_graph=True)
                loss = loss * 0.5 + state.square().mean()
            loss.backward()
            optimizer.step()
            total += float(loss)
            state = state.detach()
        return total

    return Case(
        model=model,
        batch=((sequence[0], torch.zeros(3, 6)), {}),
        loss=lambda o: o[0].square().mean(),
        step=step,
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    )
