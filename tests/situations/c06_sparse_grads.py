"""A sparse embedding under SparseAdam beside a dense AdamW.

Source: https://github.com/pytorch/pytorch/issues/18404
    https://github.com/pytorch/pytorch/issues/82486
Situation: Embedding with sparse=True trained by SparseAdam beside a dense AdamW (two optimizers); some batches touch
    only the padding row, so the sparse gradient is empty.
Required: Sparse gradients stay sparse and only touched rows move; dense 8-bit/offload path must not densify or crash
    on them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(40, 8, sparse=True, padding_idx=0)
        self.f = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))

    def forward(self, ids: Tensor) -> Tensor:
        return self.f(self.emb(ids).mean(1))


def build() -> Case:
    model, y = Net(), torch.arange(4) % 2
    weight_at_start = model.emb.weight.detach().clone()
    sparse: dict[str, torch.optim.Optimizer] = {}

    def make(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        sparse["optimizer"] = torch.optim.SparseAdam([model.emb.weight], lr=1e-1)
        return torch.optim.AdamW(model.f.parameters(), lr=1e-2)

    def step(model: Net, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        only_padding = torch.zeros(4, 3, dtype=torch.long)
        ids = only_padding if i == 1 else torch.tensor([[1, 2, 0], [3, 2, 0], [5, 5, 1], [9, 0, 0]])
        optimizer.zero_grad()
        sparse["optimizer"].zero_grad()
        loss = F.cross_entropy(model(ids), y)
        loss.backward()
        assert model.emb.weight.grad.is_sparse
        optimizer.step()
        if model.emb.weight.grad._nnz() and i != 1:
            sparse["optimizer"].step()
        return loss.detach()

    def moved_rows(model: Net) -> list[int]:
        return ((model.emb.weight - weight_at_start).abs().sum(1) > 0).nonzero().flatten().tolist()

    return Case(
        model=model,
        batch=((torch.ones(4, 3, dtype=torch.long),), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=moved_rows,
        expect=[1, 2, 3, 5, 9],
        optimizer=make,
    )
