"""Two wrapped models feed one another, with one backward through both, in changing order.

Situation: An encoder and a decoder are wrapped each on its own (the second made by the step), one shares a weight
    with the other, and one is called inside a hook of the other.
Required: As plain: a value of one is an unseen source for the other.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class Half(nn.Module):
    def __init__(self, d: int, shared: nn.Linear) -> None:
        super().__init__()
        self.block, self.shared, self.drop = Block(d), shared, nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.drop(self.shared(x + 1.0)) * torch.exp(-self.block(x).square()))


def build() -> Case:
    shared = nn.Linear(6, 6)
    model, second = Half(6, shared), Half(6, shared)
    x, y = torch.randn(5, 6), torch.randn(5, 6)
    others: dict[str, nn.Module] = {}

    def step(model: Half, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        if i == 0:
            others["second"] = case["wrap"](second)
        other = others["second"]
        optimizer.zero_grad()
        h = model(x)
        k = other(h * 2.0)
        k.mul_(0.5)
        handle = other.block.register_forward_hook(lambda module, args, output: output + model(args[0]))
        loss = F.mse_loss(other(model(k) + h), y)
        handle.remove()
        loss.backward()
        optimizer.step()
        return loss.detach()

    case = Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.mse_loss(o, y),
        step=step,
        extra=lambda m: float(sum(p.double().sum() for p in second.parameters())),
        optimizer=lambda p: torch.optim.SGD([*p, *second.block.parameters()], lr=0.1),
    )
    return case
