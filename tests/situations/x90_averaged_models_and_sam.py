"""Weight averaging around the wrapped model, and a sharpness-aware step with two forwards per update.

Situation: torch.optim.swa_utils.AveragedModel deep-copies the wrapped model, update_bn runs it in train mode under
    no_grad; SAM moves the weights between two forward-backwards of one step and moves them back; Lookahead copies
    slow weights.
Required: As plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

from .blocks import Block
from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Block(8), nn.BatchNorm1d(8), nn.Tanh(), Block(8), nn.Linear(8, 2))
    x, y, log = torch.randn(8, 6), torch.arange(8) % 2, []
    averages: list[AveragedModel] = []
    slow = [p.detach().clone() for p in model.parameters()]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        if i == 0:
            averages.extend([AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))])
        params = list(model.parameters())
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        scale = 0.05 / torch.cat([p.grad.flatten() for p in params]).norm()
        moves = [p.grad * scale for p in params]
        torch._foreach_add_([p.data for p in params], moves)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        torch._foreach_sub_([p.data for p in params], moves)
        optimizer.step()
        if i == 2:
            with torch.no_grad():
                for p, s in zip(params, slow, strict=True):
                    p.copy_(s.lerp_(p, 0.5))
        for average in averages:
            average.update_parameters(model)
        update_bn([x, x + 1], averages[0])
        log.append([float(average(x).sum().detach()) for average in averages])
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        steps=4,
        extra=lambda m: log,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )
