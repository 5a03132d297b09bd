"""The model installs its own lossy saved-tensor hooks.

Source: https://github.com/pytorch/pytorch/pull/190581
    https://github.com/pytorch/pytorch/issues/148222
Situation: Model code installs its own saved_tensors_hooks (activation compression to half) around part of a block.
Required: The user's hooks still see the same tensors the same number of times in the gradient path; result equals the
    plain run with those hooks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


def pack(t: Tensor) -> tuple[Tensor, torch.dtype | None]:
    if t.dtype == torch.float32 and t.dim() == 2 and not isinstance(t, nn.Parameter):
        return t.half(), t.dtype
    return t, None


def unpack(packed: tuple[Tensor, torch.dtype | None]) -> Tensor:
    t, dtype = packed
    return t.to(dtype) if dtype else t


class HalfSavingBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f1, self.f2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            h = torch.tanh(self.f1(x))
        return x + self.f2(h * torch.sigmoid(h))


def build() -> Case:
    model = nn.Sequential(HalfSavingBlock(12), HalfSavingBlock(12), nn.Linear(12, 3))
    x, y = torch.randn(9, 12), torch.arange(9) % 3
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
