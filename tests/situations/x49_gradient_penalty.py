"""A gradient penalty differentiates twice through the model.

Situation: The critic's gradient norm at interpolated inputs is part of its loss (create_graph), an R1 penalty at real
    inputs is another; activations of which the second derivative is needed are unpacked with a graph.
Required: As plain, second derivatives included.
"""

import torch
from torch import Tensor, nn

from .harness import Case


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 16), nn.Softplus(), nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * torch.sigmoid(x.sum(1, keepdim=True))


def build() -> Case:
    real, fake = torch.randn(6, 4), torch.randn(6, 4) + 1

    def step(critic: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        between = torch.lerp(real, fake, torch.rand(6, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        attended = real.clone().requires_grad_()
        score = critic(attended)
        (r1,) = torch.autograd.grad(score.sum(), attended, create_graph=True)
        penalty = (slope.norm(2, dim=1) - 1).square().mean() + 0.5 * r1.square().sum(1).mean()
        loss = critic(fake).mean() - score.mean() + 10 * penalty
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=Critic(),
        batch=((real,), {}),
        loss=lambda o: o.mean(),
        step=step,
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    )
