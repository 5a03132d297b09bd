"""Saved tensors that are lazy views: conjugate bit, negative bit, real and imaginary parts.

Situation: Complex layers save z.conj(), its .imag (a negative view) and view_as_complex of a real activation. The
    bits are on the tensor, not in the storage: rebuilding a tensor from storage, size and strides loses them.
Required: As plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class ComplexBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.w = nn.Linear(d, 2 * d), nn.Parameter(torch.randn(d, d, dtype=torch.complex64) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(self.f(x).view(*x.shape, 2))
        conjugate = (z * 0.5).conj()
        turned = conjugate * (z @ self.w) + self.w.conj().t()[: x.shape[0]].abs()
        negative = (z + 1).conj().imag  # a view with the negative bit
        amplitude = turned.abs().clamp(min=0.1)
        phase = torch.view_as_real(turned.conj() / amplitude)
        return x + torch.sin(phase[..., 0] * negative) * torch.exp(-amplitude) + turned.real * phase[..., 1].tanh()


def build() -> Case:
    model = nn.Sequential(ComplexBlock(6), ComplexBlock(6), nn.Linear(6, 2))
    x, y = torch.randn(5, 6), torch.arange(5) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        extra=lambda m: [float(torch.view_as_real(p).double().sum()) for p in m.parameters() if p.is_complex()],
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    )
