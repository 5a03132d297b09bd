"""AWD-LSTM: recurrent weights are dropped out anew in each forward and set as attributes.

Situation: The raw recurrent weight goes through dropout and is set on the LSTM before its call; inputs go through
    locked dropout (one mask for all times, made by new_empty().bernoulli_()), embeddings lose whole rows; a
    bidirectional GRU of two layers follows.
Required: As plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class WeightDropLSTM(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(d, d)
        self.raw = nn.Parameter(self.cell.weight_hh.detach().clone())
        del self.cell.weight_hh

    def forward(self, x: Tensor) -> Tensor:  # x: (time, batch, d)
        self.cell.weight_hh = F.dropout(self.raw, 0.3, self.training)
        h = c = x.new_zeros(x.shape[1:])
        out = []
        for t in x.unbind(0):
            h, c = self.cell(t, (h, c))
            out.append(h)
        return torch.stack(out)


class LockedDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        mask = x.data.new_empty(1, *x.shape[1:]).bernoulli_(0.7).div_(0.7)
        return mask.expand_as(x) * x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.locked, self.lstm = nn.Embedding(12, 6), LockedDropout(), WeightDropLSTM(6)
        self.gru, self.out = nn.GRU(6, 5, 2, bidirectional=True, dropout=0.2), nn.Linear(10, 3)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.emb.weight.new_empty(12, 1).bernoulli_(0.9) / 0.9
        h = F.embedding(ids, self.emb.weight * rows)
        h = self.locked(self.lstm(self.locked(h)))
        h, last = self.gru(h)
        return self.out(torch.tanh(h.mean(0)) + torch.cat([last[-1], last[-2]], -1))


def build() -> Case:
    ids, y = torch.randint(0, 12, (3, 4)), torch.arange(4) % 3
    return Case(
        model=Net(),
        batch=((ids,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    )
