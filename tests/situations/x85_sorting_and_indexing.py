"""Sorting, selection and indexing ops, with integer outputs that are saved.

Situation: sort, topk, unique with inverse, median, kthvalue, cummax, searchsorted, scatter_reduce, index_select,
    take_along_dim, repeat_interleave, EmbeddingBag with per-sample weights, CTC loss in the forward, segment sums by
    index_add.
Required: As plain: order among equals as in the forward.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Indexing(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.bag, self.f, self.g = nn.EmbeddingBag(11, d, mode="sum"), nn.Linear(d, d), nn.Linear(d, d)
        self.times = nn.Linear(d, 4)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        weights = torch.sigmoid(rows.float() * 0.1)[inverse]
        h = torch.tanh(self.f(self.bag(ids, per_sample_weights=weights * counts[inverse].rsqrt())))
        ordered, order = h.round(decimals=1).sort(dim=1, stable=True)
        h = h.gather(1, order) * ordered.cummax(1).values
        values, indices = h.topk(3, 0)
        h = h + values.mean(0) * torch.take_along_dim(h, indices, 0).sin().sum(0)
        h = h + h.median(1, keepdim=True).values * h.kthvalue(2, dim=1, keepdim=True).values
        bucket = torch.searchsorted(torch.linspace(-1, 1, 5), h.detach())
        h = h + torch.zeros(h.shape[0], 6).scatter_reduce(1, bucket, h.exp(), "amax").repeat_interleave(2, 1)[:, :8]
        sums = torch.zeros(3, h.shape[1]).index_add(0, torch.arange(h.shape[0]) % 3, h)
        h = torch.sin(self.g(h)) * sums.index_select(0, torch.arange(h.shape[0]) % 3)
        log_p = F.log_softmax(self.times(h).unflatten(0, (-1, 2)), -1)
        targets, lengths = torch.tensor([[1, 2], [3, 3]]), torch.tensor([log_p.shape[0]] * 2)
        return h, F.ctc_loss(log_p, targets, lengths, torch.tensor([2, 1]), zero_infinity=True)


def build() -> Case:
    ids, y = torch.randint(0, 11, (8, 5)), torch.arange(8)
    return Case(
        model=Indexing(8),
        batch=((ids,), {}),
        loss=lambda o: F.cross_entropy(o[0], y) + 0.1 * o[1],
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    )
