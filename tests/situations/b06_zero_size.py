"""An expert gets no rows: saved tensors of zero elements.

Source: https://github.com/pytorch/tensordict/pull/1750
    https://github.com/numpy/numpy/pull/27723
Situation: An expert or a ragged segment gets no rows in some steps: zero-element activations are saved and parameters
    get zero gradients (not None); file-backed stores choke on empty files.
Required: Round trip keeps shapes such as (0, 8); gradient of the idle expert is zeros (so weight decay/momentum act
    as in plain), not None.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Experts(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.ex = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Linear(d, d)) for _ in range(3))

    def forward(self, x: Tensor, idx: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.ex):
            rows = (idx == e).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(x[rows]))
        return x + out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2, self.out = Experts(8), Experts(8), nn.Linear(8, 2)

    def forward(self, x: Tensor, idx: Tensor) -> Tensor:
        return self.out(self.l2(self.l1(x, idx), idx))


def build() -> Case:
    x, y = torch.randn(6, 8), torch.arange(6) % 2

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        idx = torch.full((6,), i % 2)  # expert 2 never, 0 and 1 in turn
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, idx), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def idle_expert_grads(model: Net) -> list[float | None]:
        return [None if p.grad is None else float(p.grad.abs().sum()) for p in model.l1.ex[2].parameters()]

    return Case(
        model=Net(),
        batch=((x, torch.zeros(6, dtype=torch.long)), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=idle_expert_grads,
        expect=[0.0, 0.0, 0.0, 0.0],
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    )
