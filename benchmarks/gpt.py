"""The model of the benchmarks: a GPT of pre-norm blocks, byte-level."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.norm2, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(a)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """`checkpoints` names the blocks that torch.utils.checkpoint recomputes, `context_fn` makes it selective."""

    def __init__(self, layers: int, d: int, heads: int, vocabulary: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocabulary)
        self.checkpoints: frozenset[int] = frozenset()
        self.context_fn: Callable[[], Any] | None = None

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        options = {"context_fn": self.context_fn} if self.context_fn else {}
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False, **options) if i in self.checkpoints else block(x)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(b: int, t: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Bytes of torch's own source file, and their successors."""
    with open(torch.__file__, "rb") as file:
        text = file.read(b * t + 1)
    data = torch.tensor(list(text), device=device)
    return data[:-1].view(b, t), data[1:].view(b, t)
