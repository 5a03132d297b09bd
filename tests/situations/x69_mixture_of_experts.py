"""Top-k routing with capacity, dropped tokens and a balance loss kept on the module.

Situation: The number of rows per expert depends on the router's values and changes as it trains, so that the shapes
    of one step are not those of another at the same input size; idle experts; the auxiliary loss is read from an
    attribute.
Required: As plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class MixtureOfExperts(nn.Module):
    def __init__(self, d: int, num_experts: int, k: int, capacity: int) -> None:
        super().__init__()
        self.router, self.k, self.capacity = nn.Linear(d, num_experts, bias=False), k, capacity
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(d, 2 * d), nn.SiLU(), nn.Linear(2 * d, d)) for _ in range(num_experts)
        )
        self.balance: Tensor | None = None
        self.loads: list[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape[0], len(self.experts)) if self.training else 0.0
        probabilities = F.softmax(self.router(x) * 3 + noise, -1)
        weights, chosen = probabilities.topk(self.k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out, load = torch.zeros_like(x), []
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            token, slot = token[: self.capacity], slot[: self.capacity]  # the rest is dropped
            load.append(len(token))
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        self.loads.append(load)
        fraction = F.one_hot(chosen, len(self.experts)).float().mean((0, 1))
        self.balance = len(self.experts) * (fraction * probabilities.mean(0)).sum()
        return x + out


def build() -> Case:
    model = nn.Sequential(MixtureOfExperts(8, 4, 2, 5), nn.LayerNorm(8), MixtureOfExperts(8, 6, 1, 4), nn.Linear(8, 2))
    x, y = torch.randn(9, 8), torch.arange(9) % 2

    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + 0.1 * (model[0].balance + model[2].balance)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        steps=5,
        extra=lambda m: [m[0].loads, m[2].loads],
        optimizer=lambda p: torch.optim.AdamW(p, lr=3e-2),
    )
