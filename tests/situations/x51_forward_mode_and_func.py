"""Forward-mode derivatives and torch.func transforms of the wrapped model.

Situation: Dual numbers through the model in training mode, jvp, jacfwd over jacrev, vmap of the model itself,
    func.grad over functional_call, forward over reverse.
Required: As plain, or a clear error naming the feature; training steps between are undisturbed.
"""

import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vmap

from .harness import Case


def build() -> Case:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 3))
    x, y, log = torch.randn(5, 4), torch.arange(5) % 3, []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, i: int) -> Tensor:
        optimizer.zero_grad()
        with forward_ad.dual_level():
            out = model(forward_ad.make_dual(x, torch.ones_like(x)))
            tangent = forward_ad.unpack_dual(out).tangent
            loss = F.cross_entropy(out, y) + 0.1 * tangent.square().mean()  # reverse over forward
            slope = forward_ad.unpack_dual(loss).tangent
            loss.backward()
        params = {name: p.detach() for name, p in model.named_parameters()}
        _, pushed = jvp(model, (x,), (torch.cos(x),))
        rows = vmap(model)(x[:, None])
        hessian = jacfwd(jacrev(lambda t: model(t).square().sum()))(x[:2])
        grads = grad(lambda p: F.cross_entropy(functional_call(model, p, (x,)), y))(params)
        numbers = [tangent, slope, pushed, rows, hessian, *grads.values()]
        log.append([float(t.detach().sum()) for t in numbers])
        optimizer.step()
        return loss.detach()

    return Case(
        model=model,
        batch=((x,), {}),
        loss=lambda o: F.cross_entropy(o, y),
        step=step,
        extra=lambda m: log,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
