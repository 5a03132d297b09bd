"""Blocks that take and return dataclasses, dicts, None and keywords.

Source: https://github.com/pytorch/pytorch/issues/124725
    https://github.com/facebookresearch/fairscale/pull/701
Situation: Blocks take keyword, None, bool, str and dict arguments and return dict / tuple / dataclass with None and
    non-tensors; some wrappers drop gradients of tensors nested in containers.
Required: Output structure and types unchanged; gradients flow through every nested tensor as in plain.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .harness import Case


@dataclass
class State:
    h: Tensor
    aux: list[Tensor | None]
    tag: str


class StateBlock(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(d, d), nn.Linear(d, 1)

    def forward(
        self,
        state: State,
        mask: Tensor | None = None,
        *,
        opts: dict[str, float],
        train_aux: bool = True,
        name: str = "x",
    ) -> tuple[State, dict[str, Tensor | None]]:
        h = torch.tanh(self.f(state.h)) * opts["scale"]
        h = h if mask is None else h * mask
        return State(h, [*state.aux, self.g(h) if train_aux else None], name), {"norm": h.norm(), "none": None}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.blocks = nn.Linear(4, 8), nn.ModuleList(StateBlock(8) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[State, tuple[Tensor, ...], dict[str, list[Any]]]:
        state, norms = State(self.inp(x), [], "start"), []
        for i, block in enumerate(self.blocks):
            state, info = block(state, mask if i else None, opts={"scale": 1.5}, train_aux=i != 1, name=f"b{i}")
            norms.append(info["norm"])
        return state, tuple(norms), {"k": [state.aux[0], None]}


def build() -> Case:
    x, mask = torch.randn(5, 4), (torch.rand(5, 8) > 0.3).float()

    def loss(output: Any) -> Tensor:
        state, norms, more = output
        aux = sum(a.mean() for a in state.aux if a is not None)
        return state.h.square().mean() + aux + 0.1 * sum(norms) + more["k"][0].var()

    return Case(model=Net(), batch=((x,), {"mask": mask}), loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
