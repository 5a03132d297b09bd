"""A budget as a decorator: planned at the first training forward. `python examples/decorator.py`, seconds on a CPU."""

import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt

BUDGET = "36MiB"


class ConvNet(nn.Module):
    def __init__(self, channels: int = 32, depth: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1))
            for _ in range(depth)
        )
        self.last = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x.mean((2, 3)))


@memopt.wrap_model(budget=BUDGET)
class BudgetedConvNet(ConvNet):
    pass


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 5) -> tuple[list[float], float]:
    """A loop that knows nothing of memopt: losses and the median step's seconds."""
    losses, times_s = [], []
    for number in range(steps):
        torch.manual_seed(number)
        images, labels = torch.randn(16, 3, 32, 32), torch.randint(10, (16,))
        begin_s = time.perf_counter()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times_s.append(time.perf_counter() - begin_s)
        losses.append(loss.item())
    return losses, statistics.median(times_s)


def main() -> None:
    torch.manual_seed(0)
    plain = ConvNet()
    plain_losses, plain_s = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))

    torch.manual_seed(0)
    model = BudgetedConvNet()
    optimizer = memopt.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    losses, step_s = train(model, optimizer)

    session = memopt.session_of(model)
    session.measure(lambda: train(model, optimizer, steps=1))
    print(session.report())
    print(f"budget   {session.plan.budget_bytes:12,} B")
    print(f"forecast {session.plan.forecast.peak_bytes:12,} B (the plain step's: {session.profile.peak_bytes:,} B)")
    print(f"measured {session.measured.peak_bytes:12,} B")
    print(f"slowdown x{step_s / plain_s:.2f}")
    print(f"losses equal bit for bit: {losses == plain_losses}")


if __name__ == "__main__":
    main()
