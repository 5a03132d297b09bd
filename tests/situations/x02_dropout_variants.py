"""Every kind of dropout: in place, channel-wise, alpha, feature-alpha, inside attention and inside an RNN.

Situation: The masks are made by different ops (bernoulli_ on an empty tensor, native_dropout, a mask inside a fused
    kernel), some written in place over an activation that a later op saves.
Required: Losses, weights and the position of the torch generator equal the plain run.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class ManyDropouts(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.drop_in_place = nn.Linear(d, d), nn.Dropout(0.2, inplace=True)
        self.channels, self.conv = nn.Dropout2d(0.3), nn.Conv2d(1, 2, 3, padding=1)
        self.alpha, self.feature_alpha = nn.AlphaDropout(0.2), nn.FeatureAlphaDropout(0.2)
        self.attention = nn.MultiheadAttention(d, 2, dropout=0.3, batch_first=True)
        self.rnn = nn.GRU(d, d, 2, dropout=0.4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # x: (batch, time, d)
        h = self.drop_in_place(torch.tanh(self.f(x)) * 1.5)
        h = h + self.channels(self.conv(h[:, None])).mean(1)
        h = self.feature_alpha(F.selu(self.alpha(h)))
        h = x + self.attention(h, h, h, need_weights=False)[0]
        h, _ = self.rnn(h)
        return x + F.dropout1d(h.transpose(1, 2), 0.25, self.training).transpose(1, 2)


def build() -> Case:
    model = nn.Sequential(ManyDropouts(8), ManyDropouts(8), nn.Linear(8, 2))
    x, y = torch.randn(3, 5, 8), torch.arange(15) % 2
    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o.flatten(0, 1), y),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
