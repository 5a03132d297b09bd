"""A teacher pass under no_grad and a training pass in one autocast block.

Source: https://github.com/pytorch/pytorch/issues/112583
    https://github.com/NVIDIA/apex/pull/132
Situation: Inside one autocast block the model first runs under no_grad (teacher/probe), then with grad; a stale
    cached cast can cut the graph or hold old weights.
Required: Same as plain; a probe/profile forward must not leave casts in the autocast cache.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))
    x = torch.randn(6, 8)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                teacher = model(x + 0.1).float()
            loss = F.mse_loss(model(x).float(), teacher.roll(1, 0))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: o.square().mean(),
        step=step,
        extra=lambda m: [name for name, p in m.named_parameters() if p.grad is None],
        expect=[],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
