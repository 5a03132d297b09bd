"""Names, types, attributes and pickles stay what they were.

Source: https://github.com/facebookresearch/d2go/pull/578
    https://github.com/pytorch/pytorch/pull/77224
Situation: Wrapping inserts prefixes into parameter names or replaces classes: state_dict no longer loads into the
    plain model, isinstance / attribute access / pickling break.
Required: state_dict keys, named_parameters, named_modules types, custom attributes/methods stay; torch.save of the
    state loads strictly into a plain model; pickle round trip works.
"""

import io
import pickle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out, self.cfg = nn.ModuleList(Block(6) for _ in range(3)), nn.Linear(6, 2), {"depth": 3}

    def embed(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x))


def build() -> Case:
    model = Net()
    x, y = torch.randn(5, 6), torch.arange(5) % 2

    def extra(model: Net) -> dict[str, Any]:
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        plain = Net()
        plain.load_state_dict(torch.load(buffer), strict=True)
        again = pickle.loads(pickle.dumps(model))
        return {
            "names": [name for name, _ in model.named_parameters()][:3],
            "types": [type(block).__name__ for block in model.blocks],
            "depth": model.cfg["depth"],
            "same": bool(torch.equal(plain(x), model(x))),
            "pick": bool(torch.equal(again(x), model(x))),
            "emb": round(float(model.embed(x).sum()), 5),
        }

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        extra=extra,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
