"""A residual conv net in channels_last with in-place activations, indices from pooling and transposed convolutions.

Situation: BatchNorm followed by ReLU(inplace=True), `out += identity`, max pooling with ceil_mode and return_indices,
    the matching unpooling, GroupNorm, a transposed and a grouped convolution, all on channels_last activations.
Required: As plain, including memory formats: a replayed activation has the strides of the first.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class ResidualConv(nn.Module):
    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.conv2, self.relu = nn.Conv2d(channels, channels, 1), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class AutoEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(4, 8)
        self.block1, self.block2 = ResidualConv(8, 1), ResidualConv(8, 4)
        self.pool, self.unpool = nn.MaxPool2d(2, ceil_mode=True, return_indices=True), nn.MaxUnpool2d(2)
        self.up = nn.ConvTranspose2d(8, 3, 3, stride=2, padding=1, output_padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.block1(F.leaky_relu_(self.norm(self.stem(x)), 0.1))
        size = h.size()
        h, indices = self.pool(h)
        h = F.elu(self.block2(h) * 1.5, inplace=True)
        h = self.unpool(h, indices, output_size=size)
        return torch.sigmoid(self.up(h.clamp_(max=3.0)))


def build() -> Case:
    model = AutoEncoder().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 10, 10).to(memory_format=torch.channels_last)
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.mse_loss(o, x),
        extra=lambda m: [list(p.grad.stride()) for p in m.parameters()],
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
