"""In-place changes that plain torch refuses in backward are refused here too.

Situation: A saved tensor is changed in place before backward: a tanh's result, a multiplication's factor, a weight,
    the input of a matrix product, a view's base, an output of chunk. Saved-tensor hooks switch torch's own check off.
Required: The same backwards raise RuntimeError as in plain, none gives a silently wrong gradient, and a good step
    after each of them is as plain.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .harness import Case


class Saver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(6, 6), nn.Linear(6, 2)
        self.kept: list[Tensor] = []
        self.inside: Callable[[list[Tensor]], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.f(x))
        k = h * torch.sigmoid(h)
        flat = k.view(-1)
        e = flat.exp().view_as(k)
        self.kept = [h, k, flat, e]
        if self.inside is not None:
            self.inside(self.kept)
        return self.g(e + k.sin())


def build() -> Case:
    x, y, log = torch.randn(5, 6), torch.arange(5) % 2, []

    def change(model: Saver, i: int, batch: Tensor) -> None:
        with torch.no_grad():
            if i == 0:
                model.kept[0].mul_(2)  # a result that tanh and sigmoid's product saved
            elif i == 1:
                model.kept[3].add_(1)  # the result of exp, through a view
            elif i == 2:
                model.g.weight.mul_(0.5)  # a weight that its layer saved
            elif i == 3:
                batch.zero_()  # the input of the first matrix product
            elif i == 4:
                model.kept[2][0] = 3.0  # the base of a view that sin saved

    def step(model: Saver, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        batch = x.clone()
        # between two ops of the forward: of k nothing is saved yet, of e the result is
        model.inside = {5: lambda kept: kept[1].detach().add_(1), 6: lambda kept: kept[3].detach().add_(1)}.get(i)
        loss = F.cross_entropy(model(batch), y)
        if i < 5:
            change(model, i, batch)
        try:
            loss.backward()
            log.append("ran")
        except RuntimeError as error:
            log.append(f"RuntimeError: {error}")
        if i == 2:
            with torch.no_grad():
                model.g.weight.mul_(2)
        optimizer.zero_grad()
        model.inside = None
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=Saver(),
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        steps=7,
        extra=lambda m: [entry.split(":")[0] for entry in log],
        info=lambda m: log,
        expect=["RuntimeError"] * 5 + ["ran", "RuntimeError"],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
