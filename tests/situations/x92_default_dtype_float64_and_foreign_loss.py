"""The whole run is in float64 by default dtype, with the loss, labels and metrics computed inside the model.

Situation: torch.set_default_dtype(float64) before the model is made; the forward returns loss and logits, keeps
    metrics by .item() and numpy, and has a second loss under its own no_grad; deterministic algorithms are on.
Required: As plain.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.block, self.drop, self.out = nn.Embedding(9, 8), Block(8), nn.Dropout(0.3), nn.Linear(8, 9)
        self.metrics: list[float] = []

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        h = self.drop(torch.sin(self.block(self.emb(ids)))).cumsum(1)
        logits = self.out(h)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1, ignore_index=0)
        self.metrics.append(loss.item())
        self.metrics.append(float(np.median(logits.detach().numpy())))
        with torch.no_grad():
            entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        return {"loss": loss * (1 + 0.1 * entropy), "logits": logits}


def build() -> Case:
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    ids = torch.randint(0, 9, (3, 6))

    def extra(model: WithLoss) -> list[float]:
        torch.use_deterministic_algorithms(False)
        return model.metrics

    return Case(
        model=WithLoss(),
        batch=((ids, ids.roll(-1, 1)), {}),
        loss=lambda o: o["loss"],
        extra=extra,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
