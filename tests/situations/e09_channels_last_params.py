"""Convolution weights in channels_last, one weight a transposed view.

Source: https://github.com/NVIDIA/apex/pull/1148
    https://github.com/pytorch/pytorch/issues/79043
Situation: Convolution weights are in channels_last memory format (and one weight is a transposed view); flattening
    with view/reshape fails, or silently permutes or de-optimises them.
Required: Values and strides of parameters, their grads and states survive flatten/offload/shard and state_dict round
    trip.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .harness import Case


def build() -> Case:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 3),
    )
    model = model.to(memory_format=torch.channels_last)
    model[6].weight = nn.Parameter(model[6].weight.detach().t().contiguous().t())
    x, y = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last), torch.arange(4) % 3
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        extra=lambda m: [list(p.stride()) for p in m.parameters()],
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
