"""Parameters get their shapes in the first forward.

Situation: LazyLinear, LazyConv1d and LazyBatchNorm1d are wrapped, and handed to the optimizer, before the first
    forward; a plan made by running the model on fake tensors would initialise them, or draw their values from the
    generator twice.
Required: Initialised once, in the first real forward, from the plain position of the generator; as plain.
"""

import torch
import torch.nn.functional as F
from torch import nn

from .harness import Case


def build() -> Case:
    model = nn.Sequential(
        nn.LazyConv1d(4, 3, padding=1),
        nn.LazyBatchNorm1d(),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(8),
        nn.Dropout(0.2),
        nn.Tanh(),
        nn.LazyLinear(3),
    )
    x, y = torch.randn(6, 2, 7), torch.arange(6) % 3
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        extra=lambda m: [type(module).__name__ for module in m],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    )
