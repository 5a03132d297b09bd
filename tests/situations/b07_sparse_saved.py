"""A graph network saves sparse COO and CSR adjacencies.

Source: https://github.com/pytorch/pytorch/pull/61928
Situation: Graph network: a sparse COO and a sparse CSR adjacency are saved for backward; hooks that assume strided
    layout, data_ptr or strides crash.
Required: Sparse saved tensors pass through (kept or offloaded with layout kept); result as plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class GCN(nn.Module):
    def __init__(self, features_in: int, features_out: int, csr: bool) -> None:
        super().__init__()
        self.f, self.csr = nn.Linear(features_in, features_out), csr

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        a = adjacency.to_sparse_csr() if self.csr else adjacency
        return torch.relu(torch.sparse.mm(a, self.f(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1, self.l2, self.out = GCN(5, 8, False), GCN(8, 8, True), nn.Linear(8, 3)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return self.out(self.l2(self.l1(x, adjacency), adjacency))


def build() -> Case:
    dense = (torch.rand(12, 12) > 0.7).float() * torch.rand(12, 12)
    x, y = torch.randn(12, 5), torch.arange(12) % 3
    return Case(
        model=Net(),
        batch=((x, dense.to_sparse_coo()), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    )
