"""`Workload`, `profile` and `plan`: what they take, what they refuse, what they promise."""

from functools import cache

import pytest
import torch
from small_models import TinyGPT, mlp, profile_of, token_loss
from torch import nn

import memopt
from memopt.errors import BudgetError, InfeasibleBudgetError, MemoptError, StoreError, UnsupportedError
from memopt.units import parse_bytes


@cache
def profiled():
    torch.manual_seed(0)
    return profile_of(TinyGPT(layers=2), (torch.randint(0, 157, (3, 33)),), token_loss)


@pytest.mark.parametrize(
    "budget", ["24", "8G", "120%", "0%", "", "much", "-3GiB", "nan", -1, 0, True, 1.5, None, [], "24Gb"]
)
def test_bad_budget_is_refused(budget):
    with pytest.raises(BudgetError) as caught:
        memopt.plan(profiled(), budget)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, MemoptError)


@pytest.mark.parametrize(
    "budget", [10**12, "1TiB", "1e3GB", "100%", lambda profile: profile.peak_bytes, lambda profile: "24GiB"]
)
def test_ample_budget_of_any_form_is_plain(budget):
    assert memopt.plan(profiled(), budget).is_plain


def test_percentage_is_of_the_given_device():
    profile = profiled()

    plan = memopt.plan(profile, "50%", device_bytes=2 * profile.min_bytes)

    assert plan.budget_bytes == profile.min_bytes


def test_min_is_the_least_peak():
    profile = profiled()

    plan = memopt.plan(profile, "min")

    assert plan.forecast.peak_bytes <= plan.budget_bytes
    assert plan.budget_bytes == profile.min_bytes < profile.peak_bytes


def test_budget_function_may_look_at_the_profile():
    profile = profiled()

    plan = memopt.plan(profile, lambda p: (p.min_bytes + p.peak_bytes) // 2)

    assert plan.budget_bytes == (profile.min_bytes + profile.peak_bytes) // 2


@pytest.mark.parametrize("allow", [{"recomputation"}, "everything", ["recompute", "magic"], {""}])
def test_unknown_lever_is_refused(allow):
    with pytest.raises(ValueError, match="unknown levers") as caught:
        memopt.plan(profiled(), "1TiB", allow=allow)
    assert not isinstance(caught.value, UnsupportedError)


@pytest.mark.parametrize("allow", [{"shard"}, {"recompute", "shard"}, {"quantize", "shard"}])
def test_lever_of_a_later_version_is_refused_by_name(allow):
    with pytest.raises(UnsupportedError, match="can't be applied"):
        memopt.plan(profiled(), "1TiB", allow=allow)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"allow": {"offload"}}, "give nvme="),
        ({"allow": {"recompute"}, "nvme": "/tmp"}, 'add "offload"'),
        ({"host_budget": "32GiB"}, "give nvme="),
        ({"host_budget": "much", "nvme": "/tmp"}, "much"),
    ],
)
def test_wishes_that_contradict_each_other_are_an_error(options, says):
    with pytest.raises(ValueError, match=says):
        memopt.plan(profiled(), "1TiB", **options)


@pytest.mark.parametrize("allow", [None, "recompute", {"recompute"}, ["recompute"]])
def test_recompute_is_allowed_in_any_form(allow):
    assert memopt.plan(profiled(), "min", allow=allow).levers == ("recompute",)


def test_no_lever_allows_the_plain_step_only():
    profile = profiled()

    assert memopt.plan(profile, profile.peak_bytes, allow=()).is_plain
    with pytest.raises(InfeasibleBudgetError) as caught:
        memopt.plan(profile, profile.peak_bytes - 1, allow=())
    assert caught.value.smallest_bytes == profile.peak_bytes


def test_no_lever_and_min_is_the_plain_step():
    profile = profiled()

    assert memopt.plan(profile, "min", allow=()).budget_bytes == profile.peak_bytes


def test_infeasible_budget_says_the_smallest():
    profile = profiled()

    with pytest.raises(InfeasibleBudgetError) as caught:
        memopt.plan(profile, "1KiB")

    error = caught.value
    assert error.smallest_bytes == profile.min_bytes
    assert sum(error.breakdown.values()) == error.smallest_bytes
    assert memopt.plan(profile, error.smallest_bytes).forecast.peak_bytes <= error.smallest_bytes


def test_text_of_the_error_is_a_budget_that_works():
    import re

    profile = profiled()
    with pytest.raises(InfeasibleBudgetError) as caught:
        memopt.plan(profile, "1KiB")

    named = re.search(r"Raise the budget to ([0-9.]+ \w+)", str(caught.value))

    assert named is not None
    assert memopt.plan(profile, named[1]).forecast.peak_bytes <= parse_bytes(named[1])
    assert memopt.plan(profile, caught.value.smallest_bytes).forecast.peak_bytes <= caught.value.smallest_bytes


@pytest.mark.parametrize("given", [None, nn.Linear(2, 2), "model"])
def test_profile_takes_a_workload(given):
    with pytest.raises(ValueError, match="Workload"):
        memopt.profile(given)


@pytest.mark.parametrize("options", [{"mode": "real"}, {"mode": None}, {"hardware": "abacus"}])
def test_bad_options_of_profile_are_refused(options):
    with pytest.raises(ValueError, match=r"mode|hardware"):
        memopt.profile(memopt.Workload(mlp(), args=(torch.randn(2, 29),), loss=lambda y: y.sum()), **options)


def test_hardware_changes_times_and_not_bytes():
    torch.manual_seed(0)
    workload = memopt.Workload(mlp(), args=(torch.randn(23, 29),), loss=lambda y: y.sum())

    here, there = memopt.profile(workload), memopt.profile(workload, hardware="h100")

    assert there.hardware == "h100"
    assert there.step_s < here.step_s
    assert there.storages == here.storages


@pytest.mark.parametrize(
    "options",
    [
        {"model": object()},
        {"model": nn.Linear(2, 2), "args": torch.zeros(2)},
        {"model": nn.Linear(2, 2), "kwargs": [1]},
        {"model": nn.Linear(2, 2), "optimizer": "adamw"},
        {"model": nn.Linear(2, 2), "micro_batches": 0},
    ],
)
def test_workload_refuses_what_it_cannot_run(options):
    with pytest.raises(ValueError, match=r"Workload\("):
        memopt.Workload(**options)


def test_infeasible_budget_names_the_disk_as_a_way_out():
    profile = profiled()
    with pytest.raises(InfeasibleBudgetError, match=r'nvme="/path"'):
        memopt.plan(profile, 1)


@pytest.mark.parametrize("budget", ["1TiB", "min"])
def test_directory_that_cannot_be_made_is_told_whatever_the_budget(budget, tmp_path):
    file = tmp_path / "file"
    file.touch()
    profile = profiled()
    with pytest.raises(StoreError, match="Not a directory"):
        memopt.plan(profile, budget, nvme=str(file / "below"))
    with pytest.raises(StoreError, match="Not a directory"):
        memopt.wrap_model(torch.nn.Linear(2, 2), budget=budget, nvme=str(file))
    assert list(tmp_path.iterdir()) == [file]
