"""Code that looks at the model finds what it found before.

Situation: Trainers look at the class, its name, the signature of forward, parameter and module names, repr, hooks and
    attributes; they replace a method on the instance, compare modules by identity, copy the module shallowly.
Required: Each look gives what plain gives, before and after training.
"""

import copy
import inspect
import types

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .blocks import Block
from .harness import Case


class Classifier(nn.Module):
    """Classifies."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out, self.tape, self.session = nn.ModuleList([Block(8), Block(8)]), nn.Linear(8, 2), "mine", 7
        self.register_buffer("scale", torch.ones(()))

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        """Logits of (batch, 8) features."""
        for block in self.blocks:
            input_ids = torch.sin(block(input_ids)) * scale
        return self.out(input_ids * self.scale)


def doubled(self: Classifier, input_ids: Tensor, labels: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
    return 2 * Classifier.forward(self, input_ids, labels, scale=scale)


def look(model: Classifier) -> dict[str, object]:
    return {
        "class": [type(model) is Classifier, model.__class__.__name__, isinstance(model, Classifier), model.__doc__],
        "signature": str(inspect.signature(model.forward)),
        "unwrapped": model.forward.__doc__,
        "names": [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()],
        "children": [type(child).__name__ for child in model.children()],
        "mine": [model.tape, model.session, model.training, hasattr(model, "plan"), hasattr(model, "budget")],
        "keys": list(model.state_dict()),
        "repr": repr(model),
        "leaf": all(p.is_leaf and type(p) is nn.Parameter for p in model.parameters()),
        "blocks": [type(block) is Block for block in model.blocks],
    }


def build() -> Case:
    x, y, log = torch.randn(5, 8), torch.arange(5) % 2, []

    def step(model: Classifier, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        log.append(look(model))
        shallow = copy.copy(model)
        log.append([shallow.blocks is model.blocks, shallow.out.weight is model.out.weight])
        optimizer.zero_grad()
        if i == 1:
            model.forward = types.MethodType(doubled, model)
        loss = F.cross_entropy(model(input_ids=x, scale=1.5), y)
        if i == 1:
            del model.forward
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Case(
        model=Classifier(),
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: [*log, look(m)],
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
