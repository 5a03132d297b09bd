"""Norms whose running statistics are written without saying so: instance norm, functional batch norm on views.

Situation: InstanceNorm keeps running statistics, F.batch_norm is handed two rows of one buffer, one BatchNorm has
    track_running_stats=False, one is frozen in eval, one runs twice in a forward.
Required: Statistics as after the plain forwards, committed in the forward; gradients as plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Norms(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(d, d, 3, padding=1)
        self.instance = nn.InstanceNorm1d(d, affine=True, track_running_stats=True, momentum=0.3)
        self.untracked, self.twice = nn.BatchNorm1d(d, track_running_stats=False), nn.BatchNorm1d(d, momentum=0.2)
        self.frozen = nn.BatchNorm1d(d)
        self.register_buffer("stats", torch.stack([torch.zeros(d), torch.ones(d)]))

    def train(self, mode: bool = True) -> "Norms":
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.instance(self.conv(x)))
        h = F.batch_norm(h, self.stats[0], self.stats[1], training=self.training, momentum=0.4)
        h = self.twice(torch.sin(self.twice(h)))
        return x + self.frozen(self.untracked(h)) * self.stats[1][:, None]


def build() -> Case:
    model = nn.Sequential(Norms(4).train(), Norms(4).train(), nn.Flatten(), nn.Linear(4 * 6, 2))
    x, y = torch.randn(5, 4, 6), torch.arange(5) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        extra=lambda m: [int(m[0].twice.num_batches_tracked), int(m[0].frozen.num_batches_tracked)],
        expect=[6, 0],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
    )
