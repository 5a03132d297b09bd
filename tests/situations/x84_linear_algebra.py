"""Decompositions and products with several outputs, of which only some are saved.

Situation: eigh, svd, qr, cholesky, solve, inverse, slogdet, matrix exponential, einsum, bilinear, cdist, logsumexp,
    kron: their results have strides of their own (column-major), and sign conventions that a replay must repeat.
Required: As plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Decomposing(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.g, self.pairs = nn.Linear(d, d), nn.Linear(d, d), nn.Bilinear(d, d, d)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.f(x))
        covariance = h.t() @ h / h.shape[0] + torch.diag(torch.linspace(1, 3, h.shape[1]))
        values, vectors = torch.linalg.eigh(covariance)
        u, s, vh = torch.linalg.svd(covariance + 0.1, full_matrices=False)
        q, r = torch.linalg.qr(covariance)
        lower = torch.linalg.cholesky(covariance)
        solved = torch.linalg.solve_triangular(lower, h.t(), upper=False).t()
        h = h @ vectors.abs() * values.log() + solved.sin() @ (q @ r).tanh()
        h = h + torch.linalg.solve(covariance, h.t()).t() + 0.1 * torch.matrix_exp(-covariance).diagonal()
        h = h + torch.einsum("bi,ij,bj->b", h, (u * s) @ vh, h)[:, None].tanh() + torch.slogdet(covariance)[1]
        near = torch.cdist(h, self.g(x)).logsumexp(1, keepdim=True)
        mixed = torch.kron(h[:, :1].contiguous(), torch.ones(1, h.shape[1])) + self.pairs(h, x)
        return x + torch.sin(near * mixed) + torch.linalg.inv(covariance).mean(0)


def build() -> Case:
    model = nn.Sequential(nn.Linear(4, 4), Decomposing(4), nn.Linear(4, 2))
    x, y = torch.randn(6, 4), torch.arange(6) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
    )
