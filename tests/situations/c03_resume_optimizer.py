"""Optimizer state is saved after 3 steps and loaded into a fresh optimizer.

Source: https://github.com/pytorch/ao/issues/3314
    https://github.com/pytorch/torchtitan/pull/4615
Situation: state_dict saved after 3 steps, loaded into a fresh optimizer over params given in the same order (reverse
    of model order), training goes on; loaders silently cast states to the param dtype.
Required: Continuation equals the uninterrupted run (exact, also for 8-bit: same quantised bytes and state dtypes
    before and after the round trip).
"""

import io

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import residual_net
from .harness import Case


def build() -> Case:
    model, x, y = residual_net(), torch.randn(9, 6), torch.arange(9) % 3
    resumed: dict[str, torch.optim.Optimizer] = {}

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer = resumed.get("optimizer", optimizer)
        if i == 3 and case["resume"]:
            buffer = io.BytesIO()
            torch.save({"m": model.state_dict(), "o": optimizer.state_dict()}, buffer)
            buffer.seek(0)
            state = torch.load(buffer, weights_only=True)
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            model.load_state_dict(state["m"])
            resumed["optimizer"] = optimizer = case["optimizer"]([p for p in model.parameters() if p.requires_grad])
            optimizer.load_state_dict(state["o"])
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    case = Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        steps=6,
        resume=True,
        optimizer=lambda p: torch.optim.AdamW(list(reversed(p)), lr=1e-2),
    )
    return case
