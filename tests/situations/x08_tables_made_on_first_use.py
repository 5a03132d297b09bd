"""Masks and position tables are made at first use and cached: on the module, in a dict, by functools.lru_cache.

Situation: A forward under fake tensors (made for planning) fills the caches with tensors that hold no numbers, and
    the real run finds them; a table made inside a tape outlives the tape. The length changes, so that the tables
    grow.
Required: As plain in every step, the cached tables are real tensors, each made once.
"""

import functools

import torch
from torch import Tensor, nn

from .harness import Case


@functools.lru_cache(maxsize=8)
def causal_mask(length: int) -> Tensor:
    return torch.tril(torch.ones(length, length))


class CachedAttention(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.angles: Tensor | None = None
        self.decay: dict[int, Tensor] = {}
        self.num_built = 0

    def tables(self, length: int, d: int) -> tuple[Tensor, Tensor]:
        if self.angles is None or self.angles.shape[0] < length:
            self.num_built += 1
            self.angles = torch.outer(torch.arange(length).float(), 0.5 ** torch.arange(d // 2).float())
        if length not in self.decay:
            distance = torch.arange(length)[:, None] - torch.arange(length)
            self.decay[length] = (-0.1 * distance.abs().float()).exp()
        return self.angles[:length], self.decay[length]

    def forward(self, x: Tensor) -> Tensor:
        length, d = x.shape[1:]
        angles, decay = self.tables(length, d)
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = (torch.cat([t[..., : d // 2] * angles.cos(), t[..., d // 2 :] * angles.sin()], -1) for t in (q, k))
        scores = (q @ k.transpose(1, 2)) * decay
        scores = scores.masked_fill(causal_mask(length) == 0, float("-inf"))
        return x + self.o(scores.softmax(-1) @ v)


def build() -> Case:
    causal_mask.cache_clear()
    model = nn.Sequential(CachedAttention(8), CachedAttention(8), nn.Linear(8, 1))
    batches = [torch.randn(2, length, 8) for length in (4, 4, 7, 5, 7)]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        loss = model(batches[i]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def tables(model: nn.Sequential) -> list[object]:
        made = [model[0].angles, causal_mask(7), *model[0].decay.values()]
        return [model[0].num_built, *[(type(t).__name__, float(t.sum())) for t in made]]

    return Case(
        model=model,
        batch=((batches[0],), {}),
        loss=lambda o: o.square().mean(),
        step=step,
        steps=5,
        extra=tables,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
