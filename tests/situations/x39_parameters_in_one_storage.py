"""All parameters are views of one flat storage.

Situation: vector_to_parameters (or a fused optimizer) has made every parameter a slice of one storage; one embedding
    renormalises its rows in place in the forward, so a write to one parameter touches the storage of all.
Required: As plain: no false version error, no copy of a neighbour's content; the parameters stay views.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from .blocks import Block
from .harness import Case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.block = nn.Embedding(10, 8, max_norm=1.0), Block(8)
        self.late, self.out = nn.Embedding(10, 8, max_norm=0.5), nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.block(self.emb(ids))
        h = torch.sin(h + self.late(ids.flip(1)))  # renormalises after the block has used its own weights
        return self.out(self.block(h).mean(1))


def build() -> Case:
    model = Net()
    flat = parameters_to_vector(model.parameters()).detach()
    vector_to_parameters(flat, model.parameters())
    ids, y = torch.randint(0, 10, (6, 4)), torch.arange(6) % 3

    def extra(model: Net) -> list[object]:
        start = flat.untyped_storage().data_ptr()
        shared = all(p.untyped_storage().data_ptr() == start for p in model.parameters())
        return [shared, float(flat.double().sum())]

    return Case(
        model=model,
        batch=((ids,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        extra=extra,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
