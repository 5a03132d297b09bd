"""Schedulers, hooks and groups are attached to the optimizer before it is wrapped.

Situation: A warm-up and a cosine schedule, optimizer step pre- and post-hooks and a state_dict hook exist already;
    the lr is also set by hand; the loop reads param_groups, defaults and the type of the optimizer.
Required: They act on the optimizer that steps; as plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, SequentialLR

from .blocks import residual_net
from .harness import Case


def build() -> Case:
    model, x, y, log = residual_net(), torch.randn(9, 6), torch.arange(9) % 3, []
    schedulers: list[object] = []
    counts = {"before": 0, "after": 0, "saved": 0}

    def count(name: str) -> None:
        counts[name] += 1

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW([{"params": params[:4]}, {"params": params[4:], "weight_decay": 0.3}], lr=3e-2)
        warm, cosine = LinearLR(optimizer, 0.1, total_iters=2), CosineAnnealingLR(optimizer, 6)
        schedulers.append(SequentialLR(optimizer, [warm, cosine], milestones=[2]))
        schedulers.append(ReduceLROnPlateau(optimizer, patience=1))
        optimizer.register_step_pre_hook(lambda *_: count("before"))
        optimizer.register_step_post_hook(lambda *_: count("after"))
        optimizer.register_state_dict_post_hook(lambda *_: count("saved"))
        return optimizer

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad(set_to_none=i % 2 == 0)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedulers[0].step()
        schedulers[1].step(1.0)
        if i == 3:
            optimizer.param_groups[1]["lr"] *= 0.5
        keys = sorted(optimizer.state_dict()["state"][0])
        log.append(
            [[g["lr"] for g in optimizer.param_groups], type(optimizer).__name__, optimizer.defaults["lr"], keys]
        )
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        steps=6,
        extra=lambda m: [log, counts],
        optimizer=make,
    )
