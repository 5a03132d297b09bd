"""The forward branches on values: item(), boolean indexing, a data-dependent number of rows.

Source: https://github.com/pytorch/pytorch/issues/126738
Situation: forward branches on tensor values (.item(), mask.all(), nonzero, boolean indexing): shape-only (meta/fake)
    estimation raises a data-dependent error.
Required: Estimator/CLI falls back (real profile, or bound from unbacked sizes) or says 'cannot estimate: <line>' with
    exit code != 0; training itself works and equals plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class MaskBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(d, d), nn.Linear(d, 4 * d)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if mask.all().item():
            return x + torch.tanh(self.f(x))
        sel = x[mask]  # data-dependent number of rows
        y = self.g(sel).view(-1, 4, sel.shape[-1]).amax(1) if sel.norm().item() > 1.0 else sel
        return x.masked_scatter(mask[:, None].expand_as(x), torch.tanh(self.f(y)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList(MaskBlock(8) for _ in range(2)), nn.Linear(8, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return self.out(x[: int(mask.sum())])


def build() -> Case:
    x, mask = torch.randn(10, 8), torch.arange(10) % 3 != 0
    y = torch.arange(int(mask.sum())) % 2
    return Case(
        model=Net(),
        batch=((x, mask), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
