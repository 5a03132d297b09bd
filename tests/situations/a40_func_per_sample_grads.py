"""Per-sample gradients of the trained model with torch.func.

Source: https://github.com/pytorch/pytorch/issues/122729
    https://github.com/pytorch/pytorch/issues/165880
Situation: Per-sample gradients with torch.func (vmap over grad of functional_call) on the wrapped model; saved-tensor
    hooks are refused inside these transforms.
Required: Either the transform runs (memory plan inactive inside it) with plain values, or one clear error naming the
    feature; never a wrong value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from .blocks import Block
from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(6, 8), Block(8), nn.Linear(8, 2))
    x, y = torch.randn(4, 6), torch.arange(4) % 2

    def per_sample_grad_norms(model: nn.Module) -> float:
        params = {name: p.detach() for name, p in model.named_parameters()}

        def loss(params: dict[str, Tensor], features: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(model, params, (features[None],)), label[None])

        grads = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
        return round(float(sum(g.flatten(1).norm(dim=1).sum() for g in grads.values())), 4)

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        extra=per_sample_grad_norms,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
