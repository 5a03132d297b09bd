"""The step runs under the user's function modes and counters.

Situation: A FlopCounterMode around the forward, a torch.device context and a TorchFunctionMode around the step (one
    that replaces gelu by its tanh form), a profiler around the step; the default device is set.
Required: As plain, the FLOPs of the forward included.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from .blocks import Block
from .harness import Case


class TanhGelu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.gelu:
            return func(*args, approximate="tanh")
        return func(*args, **(kwargs or {}))


class MakesTensors(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x + torch.linspace(0, 1, x.shape[1])) * torch.tensor(1.5)


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Block(8), MakesTensors(), nn.Dropout(0.2), Block(8), nn.Linear(8, 2))
    x, y, flops = torch.randn(5, 6), torch.arange(5) % 2, []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        if i == 0:
            with FlopCounterMode(display=False) as counter:
                loss = F.cross_entropy(model(x), y)
            flops.append(counter.get_total_flops())
            loss.backward()
        elif i == 1:
            with torch.device("cpu"), TanhGelu():
                loss = F.cross_entropy(model(x), y)
                loss.backward()
        else:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True):
                loss = F.cross_entropy(model(x), y)
                loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: flops,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
