"""Optimizer flags have their plain effect.

Source: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1261
Situation: AdamW(amsgrad=True, maximize=True), SGD(nesterov), Adam coupled decay, foreach/fused flags: replacements
    accept them and ignore them.
Required: Each flag either has its plain effect or raises at construction; checked by equality with the plain run for
    each variant (losses concatenated).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from .blocks import residual_net
from .harness import Case

FACTORIES: list[Callable[..., Optimizer]] = [
    lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, maximize=True),
    lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.3),
    lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
]


def build() -> Case:
    model, x, y = residual_net(), torch.randn(9, 6), torch.arange(9) % 3
    current: dict[str, Optimizer] = {}

    def step(model: nn.Module, first: Optimizer, i: int) -> Tensor:
        if i == 0:
            current["optimizer"] = first
        elif i % 3 == 0:
            current["optimizer"] = case["rewrap"](FACTORIES[i // 3])(list(model.parameters()))
        optimizer = current["optimizer"]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    case = Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        steps=18,
        optimizer=FACTORIES[0],
        rewrap=lambda factory: factory,
    )
    return case
