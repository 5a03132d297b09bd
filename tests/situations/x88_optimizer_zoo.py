"""Every kind of torch optimizer, and three written by the user, in turn over one model.

Situation: SGD variants, Adagrad, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop, Adafactor; a Lion with its own state
    names, one that draws noise from the generator in step, one that keeps state outside of `state` and looks at
    p.grad after step.
Required: As plain for each; their state_dict has the same keys and values.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from .blocks import residual_net
from .harness import Case


class Lion(Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.add_(torch.sign(momentum * 0.9 + p.grad * 0.1), alpha=-group["lr"])
                momentum.mul_(0.99).add_(p.grad, alpha=0.01)


class Langevin(Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad + 0.01 * torch.randn_like(p))


class Hidden(Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.past: dict[Tensor, Tensor] = {}
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(self.past.get(p, torch.zeros(())), alpha=0.5)
                    p.sub_(p.grad, alpha=group["lr"] / self.num_steps)
                    self.past[p] = p.grad.clone()


FACTORIES: list[Callable[..., Optimizer]] = [
    lambda p: Lion(p, lr=1e-3),
    lambda p: Langevin(p, lr=1e-2),
    lambda p: Hidden(p, lr=1e-2),
    lambda p: torch.optim.Adagrad(p, lr=1e-2),
    lambda p: torch.optim.Adadelta(p),
    lambda p: torch.optim.Adamax(p),
    lambda p: torch.optim.NAdam(p, lr=1e-3, decoupled_weight_decay=True),
    lambda p: torch.optim.RAdam(p, lr=1e-3),
    lambda p: torch.optim.ASGD(p, lr=1e-3),
    lambda p: torch.optim.Rprop(p, lr=1e-4),
    lambda p: torch.optim.Adafactor(p),
    lambda p: torch.optim.SGD([{"params": p[:2], "lr": 1e-3}, {"params": p[2:]}], lr=1e-2, momentum=0.9, dampening=0.1),
    lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3), amsgrad=True, foreach=False),
    lambda p: torch.optim.Adam(p, lr=1e-3, differentiable=False, capturable=False, fused=True),
]


def state_sha(optimizer: Optimizer) -> str:
    digest, state = hashlib.sha256(), optimizer.state_dict()
    for index in sorted(state["state"]):
        for name, value in sorted(state["state"][index].items()):
            digest.update(f"{index} {name}".encode())
            digest.update(value.double().numpy().tobytes() if isinstance(value, Tensor) else repr(value).encode())
    return digest.hexdigest()[:16]


def build() -> Case:
    model, x, y, log = residual_net(), torch.randn(9, 6), torch.arange(9) % 3, []
    current: dict[str, Optimizer] = {}

    def step(model: nn.Module, first: Optimizer, i: int) -> Tensor:
        if i % 2 == 0:
            factory = case["rewrap"](FACTORIES[i // 2])
            current["optimizer"] = first if i == 0 else factory(list(model.parameters()))
        optimizer = current["optimizer"]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if i % 2:
            log.append([state_sha(optimizer), float(sum(p.grad.sum() for p in model.parameters()))])
        return loss.detach()

    case = Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        steps=2 * len(FACTORIES),
        extra=lambda m: log,
        optimizer=FACTORIES[0],
        rewrap=lambda factory: factory,
    )
    return case
