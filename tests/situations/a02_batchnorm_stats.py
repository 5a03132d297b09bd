"""BatchNorm counts its forwards, also one that is never backpropagated.

Source: https://github.com/pytorch/pytorch/issues/96136
    https://github.com/facebookresearch/fairscale/issues/1035
Situation: A recomputed block contains BatchNorm: running mean/var move twice per step (losses look right, eval is
    wrong); momentum=None makes it depend on num_batches_tracked.
Required: Running stats and num_batches_tracked are those of one forward per step, committed at the first forward (not
    only in backward).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


def conv_block(channels_in: int, channels_out: int, momentum: float | None) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 3, padding=1),
        nn.BatchNorm2d(channels_out, momentum=momentum),
        nn.ReLU(inplace=True),
    )


def build() -> Case:
    model = nn.Sequential(conv_block(3, 6, 0.1), conv_block(6, 6, None), nn.Flatten(), nn.Linear(6 * 64, 4))
    x, y = torch.randn(5, 3, 8, 8), torch.tensor([0, 1, 2, 3, 0])

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x + i), y)
        if i == 2:  # a forward whose graph is never backpropagated still counts once
            model(x - 1)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: [int(b) for name, b in m.named_buffers() if "tracked" in name],
        expect=[4, 4],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
    )
