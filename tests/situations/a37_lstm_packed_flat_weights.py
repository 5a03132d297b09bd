"""An LSTM over packed sequences keeps its own list of weights.

Source: https://github.com/pytorch/pytorch/pull/24828
Situation: nn.LSTM keeps its own list of parameter references and takes/returns PackedSequence and tuples; swapping
    Parameter objects (shard/offload) leaves it using stale ones.
Required: Same as plain; weights the LSTM computes with are the ones the optimizer updates.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .harness import Case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(15, 6)
        self.rnn = nn.LSTM(6, 7, 2, dropout=0.2, batch_first=True)
        self.out = nn.Linear(7, 3)

    def forward(self, ids: Tensor, lens: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.emb(ids), lens, batch_first=True, enforce_sorted=False)
        o, (h, _c) = self.rnn(packed)
        o, _ = pad_packed_sequence(o, batch_first=True)
        return self.out(h[-1]) + self.out(o.mean(1))


def build() -> Case:
    ids, lens, y = torch.randint(0, 15, (4, 6)), torch.tensor([6, 3, 5, 2]), torch.arange(4) % 3
    return Case(
        model=Net(),
        batch=((ids, lens), {}),
        loss=lambda o: F.cross_entropy(o, y),
        extra=lambda m: all(a is b for a, b in zip(m.rnn._flat_weights, m.rnn.parameters(), strict=True)),
        expect=True,
        optimizer=lambda p: torch.optim.Adam(p, lr=1e-2),
    )
