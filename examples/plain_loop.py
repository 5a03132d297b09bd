"""An ordinary training loop under a budget: profile, plan, apply. `python examples/plain_loop.py`, seconds on a CPU."""

import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

import memopt


def residual_mlp(width: int = 256, depth: int = 8) -> nn.Module:
    layers = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))]
    layers += [nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> tuple[list[float], float]:
    """A loop that knows nothing of memopt: losses and the median step's seconds."""
    losses, times_s = [], []
    for number in range(steps):
        torch.manual_seed(number)
        x, y = torch.randn(2048, 256), torch.randint(10, (2048,))
        begin_s = time.perf_counter()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times_s.append(time.perf_counter() - begin_s)
        losses.append(loss.item())
    return losses, statistics.median(times_s)


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = residual_mlp()
    return model, torch.optim.AdamW(model.parameters())


def main() -> None:
    plain_losses, plain_s = train(*fresh())

    model, optimizer = fresh()
    workload = memopt.Workload(
        model,
        args=(torch.zeros(2048, 256),),
        loss=lambda logits: F.cross_entropy(logits, torch.zeros(2048, dtype=torch.long)),
        optimizer=optimizer,
    )
    profile = memopt.profile(workload)
    session = memopt.apply(memopt.plan(profile, budget=int(0.6 * profile.peak_bytes)), model, optimizer)

    losses, step_s = train(model, optimizer)
    session.measure(lambda: train(model, optimizer, steps=1))
    print(session.report())
    print(f"budget   {session.plan.budget_bytes:12,} B")
    print(f"forecast {session.plan.forecast.peak_bytes:12,} B (the plain step's: {profile.peak_bytes:,} B)")
    print(f"measured {session.measured.peak_bytes:12,} B")
    print(f"slowdown x{step_s / plain_s:.2f}")
    print(f"losses equal bit for bit: {losses == plain_losses}")


if __name__ == "__main__":
    main()
