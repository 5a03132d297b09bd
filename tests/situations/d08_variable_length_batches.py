"""Batches of varying size and length, the first a short one.

Source: https://github.com/THUDM/slime/issues/1951
    https://github.com/foundation-model-stack/fms-hf-tuning/issues/471
Situation: Batch sizes/lengths vary step by step; the plan was made on a short first batch and the run dies hours
    later on a long one (attention grows quadratically).
Required: Plan takes a declared maximum (or re-plans/falls back when a batch exceeds the profiled shape) and never
    exceeds the budget silently; results equal plain for any mix of lengths.
"""

import torch
from torch import Tensor, nn

from .harness import Case


class Attention(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.o((q @ k.transpose(1, 2) / 4).softmax(-1) @ v)


def build() -> Case:
    model = nn.Sequential(Attention(16), Attention(16), nn.Linear(16, 2))
    generator = torch.Generator().manual_seed(5)
    data = [torch.randn(b, t, 16, generator=generator) for b, t in ((2, 4), (3, 7), (1, 64), (2, 1), (4, 33))]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        loss = model(data[i]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def saved_activation_bytes(model: nn.Module) -> list[int]:
        """Of each batch in the plain run."""
        out = []
        params = {p.untyped_storage().data_ptr() for p in model.parameters()}
        for x in data:
            kept: dict[int, Tensor] = {}

            def pack(t: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
                kept[t.untyped_storage().data_ptr()] = t
                return t

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                model(x)
            out.append(sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in params))
        return out

    return Case(
        model=model,
        batch=((data[0],), {}),
        loss=lambda o: o.square().mean(),
        step=step,
        steps=5,
        info=saved_activation_bytes,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
