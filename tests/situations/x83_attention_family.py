"""Attention in torch's own modules, with masks, in training and on the fast path of evaluation.

Situation: nn.Transformer with causal and padding masks, MultiheadAttention with weights returned, each kernel of
    scaled_dot_product_attention (grouped heads, a boolean and a float mask); the encoder's eval fast path between
    steps.
Required: As plain.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from .harness import Case


class Net(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.transformer = nn.Transformer(d, 2, 1, 1, 2 * d, dropout=0.1, batch_first=True)
        self.attention = nn.MultiheadAttention(d, 4, dropout=0.1, batch_first=True, add_bias_kv=True)
        self.q, self.kv, self.out = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, 3)

    def grouped(self, x: Tensor, backend: SDPBackend, mask: Tensor | None) -> Tensor:
        q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)
        k = self.kv(x).unflatten(-1, (4, -1))[:, :, :2].transpose(1, 2)
        with sdpa_kernel([backend, SDPBackend.MATH]):
            h = F.scaled_dot_product_attention(q, k, k.sin(), attn_mask=mask, is_causal=mask is None, enable_gqa=True)
        return h.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        time = x.shape[1]
        padding = torch.arange(time)[None] >= lengths[:, None]
        causal = nn.Transformer.generate_square_subsequent_mask(time)
        h = self.transformer(x, x.flip(0), tgt_mask=causal, src_key_padding_mask=padding, tgt_is_causal=True)
        h2, weights = self.attention(h, h, x, key_padding_mask=padding, average_attn_weights=False)
        h = h + h2 * weights.mean() + self.grouped(h, SDPBackend.FLASH_ATTENTION, None)
        allowed = ~padding[:, None, None, :]
        h = torch.tanh(h) + self.grouped(h, SDPBackend.MATH, allowed)
        return self.out(h + self.grouped(h, SDPBackend.FLASH_ATTENTION, allowed * 0.1))


def build() -> Case:
    x, lengths, y, log = torch.randn(3, 5, 8), torch.tensor([5, 3, 4]), torch.arange(15) % 3, []

    def step(model: Net, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x, lengths).flatten(0, 1), y)
        model.eval()
        with torch.no_grad():
            log.append(float(model.transformer.encoder(x, src_key_padding_mask=x[..., 0] > 1).sum()))
        model.train()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=Net(8),
        batch=((x, lengths), {}),
        loss=lambda o: F.cross_entropy(o.flatten(0, 1), y),
        step=step,
        extra=lambda m: log,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
