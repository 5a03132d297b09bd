"""A binary network swaps `.data` of weights and of activations inside its forward.

Situation: As published binary networks do it: the layer keeps the real weight aside, assigns `weight.data =
    sign(...)`, and assigns `input.data = sign(input.data)` on an intermediate. No dispatcher sees the swap, the
    tensor object stays.
Required: Each op's saved tensor has the content that its storage had; real weights and gradients as plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class BinaryLinear(nn.Linear):
    real: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x.data = x.data.sign()
        if not hasattr(self, "real"):
            self.real = self.weight.data.clone()
        self.weight.data = self.real.sign() * self.real.abs().mean()
        return F.linear(x, self.weight, self.bias)


class BinaryBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.f = nn.BatchNorm1d(d), BinaryLinear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        h = F.hardtanh(self.norm(x)) * 1.0
        wave = torch.sin(h)
        return x + self.f(h) * torch.exp(-wave)


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), BinaryBlock(8), BinaryBlock(8), nn.Linear(8, 2))
    x, y = torch.randn(5, 6), torch.arange(5) % 2

    def step(model: nn.Sequential, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for block in model[1:3]:  # the optimizer moves the real weights
            block.f.weight.data.copy_(block.f.real)
        optimizer.step()
        for block in model[1:3]:
            block.f.real.copy_(block.f.weight.data.clamp_(-1, 1))
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: [float(block.f.real.sum()) for block in m[1:3]],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
