"""Complex parameters, STFT and inverse, and a complex optimizer state.

Situation: A learned filter in the spectrum (complex64 parameters), torch.stft/istft with a cached window, angle and
    polar, a complex matrix product and its Hermitian transpose.
Required: As plain; complex gradients follow torch's convention.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class SpectralFilter(nn.Module):
    def __init__(self, bins: int) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(bins, 1, dtype=torch.complex64) * 0.3 + 1)
        self.mix = nn.Parameter(torch.randn(bins, bins, dtype=torch.complex64) * 0.1)
        self.register_buffer("window", torch.hann_window(2 * bins - 2))

    def forward(self, x: Tensor) -> Tensor:
        n = self.window.shape[0]
        z = torch.stft(x, n, n // 2, window=self.window, return_complex=True)
        z = z * self.filter + (self.mix.mH @ z) * 0.5
        z = torch.polar(torch.tanh(z.abs() + 0.1), z.angle() * 1.1) + z.conj() * 0.1
        return x + torch.istft(z, n, n // 2, window=self.window, length=x.shape[-1])


def build() -> Case:
    model = nn.Sequential(SpectralFilter(9), SpectralFilter(5), nn.Linear(64, 2))
    x, y = torch.randn(4, 64), torch.arange(4) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    )
