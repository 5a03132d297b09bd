"""Image ops: resampling, folding, pooling of every kind, padding modes, shuffles, 3-D.

Situation: interpolate, grid_sample, affine_grid, fold/unfold, pixel shuffle, adaptive, fractional and average
    pooling, reflect padding, local response norm, dilated and depthwise convolutions, a 3-D and a 1-D convolution.
Required: As plain, also for the random samples of fractional pooling.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Spatial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.depthwise = nn.Conv2d(2, 4, 3, padding=2, dilation=2), nn.Conv2d(4, 8, 3, groups=4)
        self.fractional, self.norm = nn.FractionalMaxPool2d(2, output_ratio=0.7), nn.LocalResponseNorm(2)
        self.volume, self.line = nn.Conv3d(1, 2, 3, padding=1), nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular")
        self.theta, self.slope = nn.Parameter(torch.eye(2, 3)[None] + 0.1), nn.PReLU(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.a(F.pad(x, (1, 1, 1, 1), mode="reflect"))))
        grid = F.affine_grid(self.theta.expand(x.shape[0], -1, -1), list(h.shape), align_corners=False)
        h = F.grid_sample(h, grid, mode="bilinear", padding_mode="border", align_corners=False)
        h = self.slope(self.depthwise(h))
        h = F.pixel_shuffle(h, 2) * F.interpolate(h, scale_factor=2, mode="bicubic")[:, :2]
        h = F.avg_pool2d(self.fractional(h), 2, ceil_mode=True) + F.adaptive_avg_pool2d(x, 6).sum(1, keepdim=True)
        patches = F.unfold(torch.sin(h), 2)
        h = F.fold(patches * torch.softmax(patches, 1), h.shape[-2:], 2)
        h = h + self.volume(h[:, None])[:, 1] * F.adaptive_max_pool2d(h.exp(), 1)
        h = self.line(F.glu(h.flatten(2), -1) if h[0, 0].numel() % 2 == 0 else h.flatten(2))
        return F.lp_pool1d(h.abs() + 0.1, 2, 3).flatten(1)


def build() -> Case:
    model = nn.Sequential(Spatial(), nn.LazyLinear(3))
    x, y = torch.randn(3, 2, 8, 8), torch.arange(3)
    model(x)  # gives the last layer its size
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
    )
