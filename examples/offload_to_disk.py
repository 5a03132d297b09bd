"""Training state larger than the budget: what is not used lives on a disk. `python offload_to_disk.py [DIRECTORY]`."""

import statistics
import sys
import tempfile
import time

import torch
from torch import nn
from torch.nn import functional as F

import memopt


def residual_mlp(width: int = 512, depth: int = 8) -> nn.Module:
    return nn.Sequential(
        *[nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(depth)],
        nn.Linear(width, 10),
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> tuple[list[float], float]:
    """A loop that knows nothing of memopt: losses and the median step's seconds."""
    losses, times_s = [], []
    for number in range(steps):
        torch.manual_seed(number)
        x, y = torch.randn(256, 512), torch.randint(10, (256,))
        begin_s = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        times_s.append(time.perf_counter() - begin_s)
        losses.append(loss.item())
    return losses, statistics.median(times_s)


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = residual_mlp()
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def main(directory: str) -> None:
    plain_losses, plain_s = train(*fresh())

    model, optimizer = fresh()
    memopt.wrap_model(model, budget="20MiB", nvme=directory)  # the plain step takes 38 MiB, its state alone 34
    memopt.wrap_optimizer(optimizer, model)

    losses, step_s = train(model, optimizer)
    session = memopt.session_of(model)
    session.measure(lambda: train(model, optimizer, steps=1))
    print(session.report())
    print(f"budget   {session.plan.budget_bytes:12,} B")
    print(f"forecast {session.plan.forecast.peak_bytes:12,} B (the plain step's: {session.profile.peak_bytes:,} B)")
    print(f"measured {session.measured.peak_bytes:12,} B")
    print(f"slowdown x{step_s / plain_s:.2f}")
    print(f"losses equal bit for bit: {losses == plain_losses}")
    session.remove()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as own:
        main(sys.argv[1] if len(sys.argv) > 1 else own)
