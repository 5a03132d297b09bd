"""The forward samples: from its own torch.Generator, by reparametrisation, Gumbel, multinomial and bernoulli_.

Situation: A sampled tensor is an input of differentiable ops; replaying the sampling op gives another sample and
    moves a generator that the module owns.
Required: Samples, losses, weights, and the state of the module's own generator equal the plain run.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Sampler(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.mean, self.log_std, self.out = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.generator = torch.Generator().manual_seed(7)

    def forward(self, x: Tensor) -> Tensor:
        z = self.mean(x) + torch.randn_like(x) * torch.exp(0.5 * self.log_std(x))
        noise = torch.rand(z.shape, generator=self.generator)
        z = z * torch.where(noise > 0.3, noise, 1.0)
        mask = z.new_empty(z.shape).bernoulli_(0.8, generator=self.generator).div_(0.8)
        choice = F.gumbel_softmax(z * mask, tau=0.7, hard=True)
        rows = torch.multinomial(torch.softmax(z.detach().mean(1), 0), z.shape[0], True, generator=self.generator)
        spread = torch.normal(z.detach().abs().mean(), z.detach().abs() + 0.1, generator=self.generator)
        return x + torch.tanh(self.out(z[rows] * choice)) * spread


def build() -> Case:
    model = nn.Sequential(Sampler(8), Sampler(8), nn.Linear(8, 2))
    x, y = torch.randn(6, 8), torch.arange(6) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        extra=lambda m: [float(torch.rand((), generator=m[i].generator)) for i in (0, 1)],
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    )
