"""The whole wrapped model goes through torch.save and pickle while a graph is pending, and the loaded one trains on.

Situation: torch.save(model), not its state, between forward and backward; loaded twice; one is trained on in the
    place of the original, together with the optimizer's state; a copy also goes to share_memory().
Required: As plain, from the file too: it loads where the library is not used.
"""

import io
import pickle

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Block(8), nn.Dropout(0.2), nn.LayerNorm(8), Block(8), nn.Linear(8, 2))
    x, y, log = torch.randn(5, 6), torch.arange(5) % 2, []
    current: dict[str, nn.Module] = {}

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if i == 1:
            buffer = io.BytesIO()
            torch.save(model, buffer)
            buffer.seek(0)
            current["loaded"] = torch.load(buffer, weights_only=False)
            log.append(float(pickle.loads(pickle.dumps(model))(x).sum().detach()))
        loss.backward()
        optimizer.step()
        if i >= 1:
            loaded = current["loaded"].share_memory()
            other = torch.optim.SGD(loaded.parameters(), lr=0.2)
            second = F.cross_entropy(loaded(x), y)
            second.backward()
            other.step()
            other.zero_grad()
            loss = loss + second
            log.append(float(sum(p.double().sum() for p in loaded.parameters())))
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        steps=4,
        extra=lambda m: log,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    )
