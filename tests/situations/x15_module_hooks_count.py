"""Module hooks of every kind fire as often as plain, also those that change what passes.

Situation: Forward pre-hooks, forward hooks (one that scales the output), hooks with kwargs, a global forward hook,
    full backward pre-hooks and full backward hooks, all with closures that count; on the wrapped model and inside it.
Required: Every count, the order of the calls and every number as plain.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from .blocks import Block
from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Block(8), nn.Dropout(0.2), Block(8), nn.Linear(8, 2))
    x, y = torch.randn(5, 6), torch.arange(5) % 2
    log: list[str] = []
    grads: list[float] = []

    def before(module: nn.Module, args: Any) -> Any:
        log.append(f"before {type(module).__name__}")
        return (args[0] * 1.5,)

    def after(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        log.append(f"after {type(module).__name__} {len(kwargs)}")
        return torch.tanh(output)

    def before_backward(module: nn.Module, grad_output: Any) -> None:
        log.append(f"before backward {type(module).__name__}")

    def after_backward(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        log.append(f"after backward {type(module).__name__}")
        grads.append(float(grad_output[0].sum()))
        return tuple(None if g is None else g * 2 for g in grad_input)

    for module in (model, model[1], model[3].f1):
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, with_kwargs=True)
        module.register_full_backward_pre_hook(before_backward)
        module.register_full_backward_hook(after_backward)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        everywhere = register_module_forward_hook(lambda module, args, output: log.append(type(module).__name__))
        loss = F.cross_entropy(model(x), y)
        everywhere.remove()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: [log, grads],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
