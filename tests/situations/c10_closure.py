"""optimizer.step(closure), once by AdamW and many times by LBFGS.

Source: https://github.com/pfnet/pytorch-pfn-extras/issues/636
    https://github.com/huggingface/peft/pull/3382
Situation: optimizer.step(closure): LBFGS evaluates it many times, AdamW once; the closure does
    zero_grad/forward/backward and returns the loss.
Required: step returns the closure's loss, closure runs under enable_grad the same number of times as plain;
    unsupported optimizers pass through untouched.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import residual_net
from .harness import Case


def build() -> Case:
    model, x, y = residual_net(), torch.randn(9, 6), torch.arange(9) % 3
    lbfgs: dict[str, torch.optim.Optimizer] = {}  # made in the first step
    calls = {"n": 0}

    def step(model: nn.Sequential, adamw: torch.optim.Optimizer, i: int) -> float:
        if not lbfgs:
            lbfgs["head"] = torch.optim.LBFGS(model[4].parameters(), lr=0.5, max_iter=4)

        def closure(optimizer: torch.optim.Optimizer) -> Tensor:
            calls["n"] += 1
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        loss_a = adamw.step(lambda: closure(adamw))
        loss_b = lbfgs["head"].step(lambda: closure(lbfgs["head"]))
        return float(loss_a) + float(loss_b)

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: calls["n"],
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
