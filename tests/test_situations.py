"""Every situation trains to the plain run's numbers, bit for bit, whatever the plan drops.

Run one: `pytest tests/test_situations.py -k a17`. Situations are listed in `tests/situations/`.
"""

import functools
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import situations
from situations import harness
from torch import nn

import memopt
import memopt.wrap
from memopt.apply import attach, detach
from memopt.offload import sizes
from memopt.policies.offload import OffloadSolver
from memopt.policies.plan import Plan
from memopt.profiler.hardware import CATALOGUE
from memopt.profiler.profile import Profile
from memopt.session import Session

NAMES = sorted(m.name for m in pkgutil.iter_modules(situations.__path__) if re.match(r"[a-z]\d\d_", m.name))

MODES: dict[str, dict[str, Any]] = {
    "recompute": {"budget": "min", "allow": {"recompute"}},
    "half": {"budget": lambda profile: (profile.peak_bytes + profile.min_bytes) // 2},
    "everything": {},  # no plan: whatever can be replayed is dropped, and nothing is profiled
    "away": {"budget": "min"},  # all of the model's state and all activations on disk, however small
    "away and recomputed": {"budget": "min"},  # the same, and what can be recomputed is, from what was moved
}

AWAY = ("away", "away and recomputed")

# They compile, or plan a transformer or many steps: seconds each.
SLOW = {
    "a08_hf_peft_lora",
    "a45_eval_generate_between_steps",
    "x72_rnn_with_dropped_weights",
    "x83_attention_family",
    "x88_optimizer_zoo",
    "x91_nested_autocast",
    "x93_hf_gpt2_with_every_output",
    "x94_hf_bert_and_t5",
    "x95_hf_clip_and_vit",
    "x96_hf_mixtral_router",
    "x98_peft_adapters_switched",
    "x99_compiled_parts_and_breaks",
}

# What the situations are about includes forms that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore")


def build_of(name: str) -> Callable[[], harness.Case]:
    return importlib.import_module(f"situations.{name}").build


@pytest.fixture(autouse=True)
def _all_goes_to_disk(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the modes "away": tensors of any size go, under the plan that moves most instead of the best one."""
    if mode not in AWAY:
        return
    monkeypatch.setitem(MODES[mode], "nvme", str(tmp_path))
    monkeypatch.setattr(sizes, "LEAST_STORED_BYTES", 1)

    def plan_all_away(profile: Profile, budget: Any, allow: Any, nvme: str | None = None, **_: Any) -> Plan:
        if nvme is None:
            return memopt.plan(profile, budget, allow)
        solver = OffloadSolver(profile, CATALOGUE["cpu"], may_recompute=True)
        rung = solver._rung(solver.placements(0)[-1])
        dropped = rung.solver.least().dropped if mode == "away and recomputed" else frozenset()
        moved = solver._kept_beside(rung.solver, dropped)
        return solver._plan(rung, solver._moving(rung, dropped, moved), 2**40, nvme)

    monkeypatch.setattr(memopt.wrap, "plan", plan_all_away)


@functools.cache
def plain_run(name: str) -> harness.Result:
    return harness.run(build_of(name))


def put_under_memopt(model: nn.Module, mode: str) -> nn.Module:
    if mode == "everything":
        attach(model, lambda *_: None, Session(model, None, detach))
        return model
    return memopt.wrap_model(model, **MODES[mode])


def wrap(case: harness.Case, mode: str) -> None:
    """Puts the case's model, its optimizer and what it makes later under memopt, in place."""
    model = put_under_memopt(case["model"], mode)

    def rewrap(make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params: memopt.wrap_optimizer(make(params), model)

    case["model"] = model
    case["wrap"] = lambda other: put_under_memopt(other, mode)
    case["rewrap"] = rewrap
    if case["optimizer"] is not None:
        case["optimizer"] = rewrap(case["optimizer"])


def _cases() -> Iterator[Any]:
    """Every situation in every mode; of the two modes "away" an ordinary run takes one, in turn."""
    for i, name in enumerate(NAMES):
        for mode in MODES:
            is_slow = name in SLOW or (mode in AWAY and mode != AWAY[i % 2])
            yield pytest.param(name, mode, marks=pytest.mark.slow) if is_slow else (name, mode)


@pytest.mark.parametrize(("name", "mode"), _cases())
def test_training_equals_the_plain_run(name: str, mode: str) -> None:
    plain = plain_run(name)
    ours = harness.run(build_of(name), apply=lambda case: wrap(case, mode))
    assert harness.differences(plain, ours) == []


@pytest.mark.parametrize("mode", MODES)
def test_resumed_run_equals_the_uninterrupted_one(mode: str) -> None:
    def wrap_uninterrupted(case: harness.Case) -> None:
        wrap(case, mode)
        case["resume"] = False

    resumed = plain_run("c03_resume_optimizer")
    ours = harness.run(build_of("c03_resume_optimizer"), apply=wrap_uninterrupted)
    assert harness.differences(resumed, ours) == []
