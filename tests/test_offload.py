"""Plans with a store, from the budget to the trained weights: exact, within the budget, and as forecast."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import (
    VOCABULARY,
    Reused,
    TinyGPT,
    adamw,
    all_allocations,
    in_measured_step,
    mlp,
    square_loss,
    token_loss,
)
from torch import Tensor, nn

import memopt
from memopt.errors import InfeasibleBudgetError
from memopt.policies.plan import Plan

IDS = torch.arange(8 * 48).reshape(8, 48) % VOCABULARY

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]

MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor, Callable[[Tensor], Tensor]]] = {
    "gpt": (lambda: TinyGPT(layers=5, width=96, dropout=0.0), IDS, token_loss),
    "tied gpt with dropout": (lambda: TinyGPT(layers=4, width=96, tied=True), IDS, token_loss),
    "mlp": (lambda: mlp((128, 512, 384, 256, 64)), torch.randn(64, 128), square_loss),
    "reused block": (lambda: Reused(128), torch.randn(96, 17), square_loss),
}
OPTIMIZERS: dict[str, Optimizer] = {
    "fused AdamW": lambda m: adamw(m, fused=True),
    "loop AdamW": lambda m: adamw(m, foreach=False),
    "foreach AdamW": lambda m: adamw(m, foreach=True),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
}


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Tensor,
    loss: Callable[[Tensor], Tensor],
    steps: int = 4,
    around: Callable[[Callable[[], Any]], Any] = lambda step: step(),
) -> list[float]:
    """Losses of a few steps; `around` runs the last one."""
    losses: list[float] = []

    def step() -> None:
        optimizer.zero_grad()
        value = loss(model(batch))
        value.backward()
        optimizer.step()
        losses.append(value.item())

    torch.manual_seed(3)
    for i in range(steps):
        around(step) if i == steps - 1 else step()
    return losses


def measured_run(
    plan: Plan, original: nn.Module, make: Optimizer, batch: Tensor, loss: Callable[[Tensor], Tensor]
) -> tuple[list[float], list[bytes], int]:
    """Losses, weights and states, and the peak of the last step, of a run under `plan`."""
    gc.collect()
    with all_allocations() as measured:
        model = copy.deepcopy(original)
        optimizer = make(model)
        with memopt.apply(plan, model, optimizer):
            losses = trained(model, optimizer, batch, loss, around=in_measured_step)
    return losses, bits(state_of(model, optimizer)), measured[0] + batch.nbytes


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights and optimizer states, copied."""
    states = [t for state in optimizer.state_dict()["state"].values() for t in state.values()]
    return [t.clone() for t in [*model.state_dict().values(), *states] if isinstance(t, Tensor)]


def profile_of(name: str, make: Optimizer) -> memopt.Profile:
    build, batch, loss = MODELS[name]
    torch.manual_seed(0)
    model = build()
    return memopt.profile(memopt.Workload(model, args=(batch,), loss=loss, optimizer=make(model)))


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [t.contiguous().flatten().view(torch.uint8).numpy().tobytes() for t in tensors]


@pytest.mark.parametrize("allow", [{"offload"}, {"recompute", "offload"}], ids=["offload", "both"])
@pytest.mark.parametrize(
    ("name", "optimizer"),
    [*((name, "fused AdamW") for name in MODELS), ("mlp", "foreach AdamW"), ("mlp", "SGD"), ("gpt", "loop AdamW")],
)
def test_training_is_exact_within_the_budget_and_as_forecast(
    name: str, optimizer: str, allow: set[str], tmp_path: Path
) -> None:
    build, batch, loss = MODELS[name]
    make = OPTIMIZERS[optimizer]
    torch.manual_seed(0)
    original = build()
    plain_model = copy.deepcopy(original)
    plain_optimizer = make(plain_model)
    plain = trained(plain_model, plain_optimizer, batch, loss)
    expected = bits(state_of(plain_model, plain_optimizer))
    found = profile_of(name, make)
    least = memopt.plan(found, "min", allow=allow, nvme=str(tmp_path)).budget_bytes

    for share in (0.0, 0.4):
        budget = int(least + share * (found.peak_bytes - least))
        plan = memopt.plan(found, budget, allow=allow, nvme=str(tmp_path))
        losses, state, peak = measured_run(plan, original, make, batch, loss)
        assert losses == plain
        assert state == expected
        assert peak <= budget
        # On models as small as these one staging buffer that is not filled is a tenth of all.
        assert peak >= 0.85 * plan.forecast.peak_bytes


def test_offload_reaches_what_recomputation_cannot(tmp_path: Path) -> None:
    found = profile_of("gpt", OPTIMIZERS["fused AdamW"])
    plan = memopt.plan(found, "min", allow={"recompute", "offload"}, nvme=str(tmp_path))
    assert plan.budget_bytes < 0.5 * found.min_bytes
    with pytest.raises(InfeasibleBudgetError) as caught:
        memopt.plan(found, plan.budget_bytes, allow={"recompute"})
    assert caught.value.smallest_bytes == pytest.approx(found.min_bytes, rel=0.01)


def test_budget_below_the_least_is_refused_with_the_smallest_that_works(tmp_path: Path) -> None:
    found = profile_of("gpt", OPTIMIZERS["fused AdamW"])
    with pytest.raises(InfeasibleBudgetError) as caught:
        memopt.plan(found, "64KiB", nvme=str(tmp_path))
    plan = memopt.plan(found, caught.value.smallest_bytes, nvme=str(tmp_path))
    assert plan.forecast.peak_bytes <= caught.value.smallest_bytes


def test_ample_budget_offloads_nothing(tmp_path: Path) -> None:
    found = profile_of("mlp", OPTIMIZERS["SGD"])
    plan = memopt.plan(found, found.peak_bytes, nvme=str(tmp_path))
    assert plan.is_plain
    assert list(tmp_path.iterdir()) == []


def test_plan_with_a_store_survives_json(tmp_path: Path) -> None:
    found = profile_of("gpt", OPTIMIZERS["SGD"])
    plan = memopt.plan(found, "min", nvme=str(tmp_path))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_wrapped_model_plans_for_its_store_at_the_first_forward(tmp_path: Path) -> None:
    build, batch, loss = MODELS["gpt"]
    torch.manual_seed(0)
    original = build()
    plain_model = copy.deepcopy(original)
    plain = trained(plain_model, adamw(plain_model), batch, loss)
    model = memopt.wrap_model(copy.deepcopy(original), budget="min", nvme=str(tmp_path))
    optimizer = memopt.wrap_optimizer(adamw(model), model)
    assert trained(model, optimizer, batch, loss) == plain
    session = memopt.session_of(model)
    assert session is not None
    assert session.plan is not None
    assert session.plan.away
    assert str(tmp_path) in session.report()
    session.remove()
    assert list(tmp_path.iterdir()) == []
    assert "step" not in optimizer.__dict__
