"""The user's own lossy saved-tensor hooks are around the call of the model.

Situation: Activation compression by the user: the forward runs under saved_tensors_hooks that keep bf16. Only the
    innermost pair of hooks counts, so a library's pair inside would hide the user's.
Required: The user's hooks see what they see in plain, as often, and the lossy result is reproduced.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Block(8), Block(8), nn.Linear(8, 2))
    x, y, counts = torch.randn(5, 6), torch.arange(5) % 2, {"packed": 0, "unpacked": 0}

    def pack(t: Tensor) -> Tensor:
        counts["packed"] += 1
        return t.bfloat16() if t.dtype == torch.float32 else t

    def unpack(t: Tensor) -> Tensor:
        counts["unpacked"] += 1
        return t.float() if t.dtype == torch.bfloat16 else t

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        if i == 1:  # one step without the hooks between two with them
            loss = F.cross_entropy(model(x), y)
        else:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: counts,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
