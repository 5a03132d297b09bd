"""A preallocated cache is written by index_copy_ and slices, and read, several times in one forward.

Situation: Decoding in chunks with gradients: each chunk writes its keys into a static buffer in place and attends
    over a clone of it; the clone that the first chunk read is no longer what the buffer holds.
Required: Each chunk's gradient belongs to what the cache held when it was read; buffer as plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class StaticCacheAttention(nn.Module):
    def __init__(self, d: int, length: int) -> None:
        super().__init__()
        self.qkv, self.length = nn.Linear(d, 3 * d), length
        self.register_buffer("key_cache", torch.zeros(length, d))
        self.register_buffer("value_cache", torch.zeros(length, d))

    def forward(self, chunk: Tensor, at: int) -> Tensor:
        q, k, v = self.qkv(chunk).chunk(3, -1)
        where = torch.arange(at, at + chunk.shape[0])
        self.key_cache.index_copy_(0, where, k.detach())
        self.value_cache[at : at + chunk.shape[0]] = v.detach()
        keys, values = self.key_cache.clone(), self.value_cache * 1.0
        weights = torch.softmax(q @ keys.t() / 3 + k @ torch.cos(keys).t(), -1)
        return chunk + weights @ torch.tanh(values)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = StaticCacheAttention(8, 9), StaticCacheAttention(8, 9), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        chunks = [self.b(self.a(x[at : at + 3], at), at) for at in range(0, 9, 3)]
        return self.out(torch.cat(chunks))


def build() -> Case:
    x, y = torch.randn(9, 8), torch.arange(9) % 2
    return Case(
        model=Decoder(),
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.2),
    )
