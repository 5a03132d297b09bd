"""`memopt calibrate`: what it measures, how it is kept, and that profiles and plans use it; no number changes."""

import dataclasses
import errno
import json
import logging
import math
import os
from pathlib import Path

import pytest
import torch
from small_models import mlp, profile_of, square_loss

import memopt
import memopt.calibrate
from memopt.calibrate import Effort, calibrate
from memopt.errors import StoreError, UnsupportedError
from memopt.policies.offload import OffloadSolver
from memopt.profiler.calibration import Calibration, calibration_path, load_calibration, save_calibration
from memopt.profiler.hardware import CATALOGUE, Hardware

TINY = Effort(
    matrix=16,
    half_matrix=16,
    tensor_bytes=(2**12, 2**14),
    num_rounds=2,
    rounds_s=0.0,
    num_layers=2,
    num_steps=3,
    disk_bytes=2**16 + 4096,
    watch_s=0.0,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def made(**changes: object) -> Calibration:
    """A calibration of this machine, ten times as fast as the catalogue's CPU."""
    hardware = dataclasses.replace(CATALOGUE["cpu"], name="cpu (calibrated)", flops_per_s=1e12, bytes_per_s=1e11)
    fields = {
        "device": "cpu",
        "num_threads": torch.get_num_threads(),
        "torch_version": "2",
        "measured_at": "2026-12-01",
    }
    return Calibration(**{"hardware": hardware, "host": os.uname().nodename, **fields, **changes})


def profiled(**options: object) -> memopt.Profile:
    torch.manual_seed(0)
    return profile_of(mlp((64, 256, 64)), (torch.randn(64, 64),), square_loss, **options)


# Measuring


def test_every_rate_is_measured_and_nothing_is_left_behind(tmp_path):
    found = calibrate(nvme=str(tmp_path / "disk"), effort=TINY)

    for name in ("flops_per_s", "half_flops_per_s", "bytes_per_s", "transcendental_bytes_per_s", "launch_s"):
        assert 0 < getattr(found.hardware, name) < math.inf
        assert getattr(found.hardware, name) != getattr(CATALOGUE["cpu"], name)
    for name in ("read", "write", "mixed"):
        assert getattr(found.hardware, f"disk_{name}_bytes_per_s") != getattr(
            CATALOGUE["cpu"], f"disk_{name}_bytes_per_s"
        )
    assert found.hardware.record_s >= 0
    assert found.hardware.replay_s >= 0
    assert found.hardware.name == "cpu (calibrated)"
    assert found.nvme == str(tmp_path / "disk")
    assert list((tmp_path / "disk").iterdir()) == []


def test_random_numbers_of_the_process_are_not_drawn(tmp_path):
    before = torch.get_rng_state()

    calibrate(nvme=str(tmp_path), effort=TINY)

    assert torch.equal(torch.get_rng_state(), before)


def test_disk_without_room_is_an_error_and_keeps_nothing(tmp_path, monkeypatch):
    def no_room(nvme: str, num_bytes: int) -> None:
        raise StoreError(nvme, errno.ENOSPC, num_bytes)

    monkeypatch.setattr(memopt.calibrate, "check_room", no_room)

    with pytest.raises(StoreError, match="ENOSPC"):
        calibrate(nvme=str(tmp_path), effort=TINY)


def test_without_a_disk_the_earlier_one_s_rates_stay(tmp_path):
    first = calibrate(nvme=str(tmp_path), effort=TINY)
    save_calibration(first)

    second = calibrate(effort=TINY)

    assert second.nvme == first.nvme
    assert second.hardware.disk_read_bytes_per_s == first.hardware.disk_read_bytes_per_s
    assert any("not now" in note for note in second.notes)


def test_without_any_disk_its_rates_are_the_catalogue_s():
    found = calibrate(effort=TINY)

    assert found.nvme is None
    assert found.hardware.disk_mixed_bytes_per_s == CATALOGUE["cpu"].disk_mixed_bytes_per_s


def test_rounds_that_differ_are_told():
    clock = memopt.calibrate._Clock(torch.device("cpu"), TINY)

    assert clock.median_of("steady", [1.0, 1.0, 1.1]) == 1.0
    assert clock.doubts() == []
    assert clock.median_of("shaken", [1.0, 5.0, 9.0]) == 5.0
    assert "shaken" in clock.doubts()[0]
    assert "steady" not in clock.doubts()[0]


@pytest.mark.parametrize(("percent", "is_told"), [(3.0, False), (90.0, True)])
def test_busy_machine_is_told(monkeypatch, percent, is_told):
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: percent)

    found = calibrate(effort=TINY)

    assert any("90%" in note for note in found.notes) == is_told


def test_number_of_threads_is_as_before():
    before = torch.get_num_threads()

    found = calibrate(effort=TINY)

    assert torch.get_num_threads() == found.num_threads == before


@pytest.mark.parametrize(
    ("device", "error"),
    [
        ("abacus", ValueError),
        ("meta", UnsupportedError),
        pytest.param(
            "cuda",
            UnsupportedError,
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure"),
        ),
    ],
)
def test_device_that_cannot_be_measured_is_refused(device, error):
    with pytest.raises(error):
        calibrate(device, effort=TINY)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_is_measured_with_its_copies():
    found = calibrate("cuda", effort=TINY)

    assert found.hardware.h2d_bytes_per_s > 0
    assert found.hardware.d2h_bytes_per_s > 0
    assert found.hardware.memory_bytes > 0


# The cache


def test_what_is_saved_is_loaded(cache):
    calibration = made(nvme="/mnt/nvme", notes=("a note",))

    path = save_calibration(calibration)

    assert load_calibration("cpu", torch.get_num_threads()) == calibration
    assert path.is_relative_to(cache / "memopt")
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_another_number_of_threads_or_device_has_its_own():
    save_calibration(made())

    assert load_calibration("cpu", torch.get_num_threads() + 1) is None
    assert load_calibration("NVIDIA H100 80GB HBM3", torch.get_num_threads()) is None


@pytest.mark.parametrize("given", ["", "relative/cache"])
def test_cache_is_in_the_home_where_the_variable_names_no_place(monkeypatch, tmp_path, given):
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path))

    assert calibration_path("cpu", 2).parent == tmp_path / ".cache" / "memopt"


def damaged(change: str) -> str:
    data = made().to_json()
    if change == "old version":
        data["version"] = 0
    elif change == "other format":
        data["format"] = "memopt.plan"
    elif change == "missing field":
        del data["hardware"]["launch_s"]
    elif change == "unknown field":
        data["hardware"]["warp_s"] = 1.0
    elif change == "zero rate":
        data["hardware"]["bytes_per_s"] = 0
    elif change == "not a number":
        data["hardware"]["flops_per_s"] = math.nan
    elif change == "text for a rate":
        data["hardware"]["flops_per_s"] = "fast"
    elif change == "another host":
        data["host"] = "elsewhere"
    return json.dumps(data)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '"text"', "\x00"]
    + [
        pytest.param(damaged(change), id=change)
        for change in (
            *("old version", "other format", "missing field", "unknown field"),
            *("zero rate", "not a number", "text for a rate", "another host"),
        )
    ],
)
def test_corrupt_or_old_file_is_ignored_with_a_line_in_the_log(caplog, text):
    path = save_calibration(made())
    path.write_text(text)

    with caplog.at_level(logging.WARNING, "memopt"):
        profile = profiled()

    assert profile.rates == CATALOGUE["cpu"]
    assert any(str(path) in record.getMessage() for record in caplog.records)


def test_file_that_is_a_folder_is_ignored():
    calibration_path("cpu", torch.get_num_threads()).mkdir(parents=True)

    assert profiled().rates == CATALOGUE["cpu"]


# Profiles and plans


def test_profile_takes_what_was_measured_here():
    before = profiled()
    save_calibration(made())

    after = profiled()

    assert before.hardware == "cpu"
    assert after.hardware == "cpu (calibrated)"
    assert after.rates == made().hardware
    assert after.step_s < before.step_s
    assert after.storages == before.storages


def test_wrapped_model_plans_with_what_was_measured_here():
    save_calibration(made())
    model = memopt.wrap_model(mlp((64, 256, 64)), budget="1GiB")

    model(torch.randn(64, 64)).sum().backward()

    assert memopt.session_of(model).profile.rates == made().hardware


def test_hardware_that_is_asked_for_wins():
    save_calibration(made())
    workload = memopt.Workload(mlp(), args=(torch.randn(23, 29),), loss=lambda y: y.sum())

    assert memopt.profile(workload, hardware="h100").rates == CATALOGUE["h100"]
    assert memopt.profile(workload, hardware="cpu").rates == CATALOGUE["cpu"]


def test_saved_profile_is_planned_alike_on_another_machine(tmp_path, cache):
    save_calibration(made())
    profile = profiled()
    profile.save(tmp_path / "profile.json")
    there = memopt.plan(profile, "min", nvme=str(tmp_path / "disk"))
    calibration_path("cpu", torch.get_num_threads()).unlink()

    loaded = memopt.Profile.load(tmp_path / "profile.json")

    assert loaded == profile
    assert memopt.plan(loaded, "min", nvme=str(tmp_path / "disk")) == there


def test_slower_disk_is_a_longer_step(tmp_path):
    profile = profiled()
    slow = dataclasses.replace(profile.rates, disk_read_bytes_per_s=1e6, disk_write_bytes_per_s=1e6)
    slow_profile = dataclasses.replace(profile, rates=slow)

    fast_plan, slow_plan = (
        memopt.plan(p, OffloadSolver(p, p.rates, False).least_bytes(), "offload", nvme=str(tmp_path))
        for p in (profile, slow_profile)
    )

    assert slow_plan.forecast.step_s > fast_plan.forecast.step_s
    assert slow_plan.forecast.peak_bytes == fast_plan.forecast.peak_bytes


def test_calibration_changes_no_number_of_the_training():
    def trained() -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = memopt.wrap_model(mlp((64, 256, 64)), budget="min")
        optimizer = memopt.wrap_optimizer(torch.optim.AdamW(model.parameters()), model)
        for _ in range(2):
            square_loss(model(torch.randn(64, 64))).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()]

    before = trained()
    save_calibration(made())

    assert all(torch.equal(a, b) for a, b in zip(before, trained(), strict=True))


@pytest.mark.parametrize(
    "changes", [{"flops_per_s": 0}, {"bytes_per_s": -1.0}, {"launch_s": math.inf}, {"record_s": "1"}, {"name": 7}]
)
def test_hardware_refuses_what_is_no_rate(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        dataclasses.replace(CATALOGUE["cpu"], **changes)


def test_half_precision_products_have_their_own_rate():
    hardware = dataclasses.replace(CATALOGUE["cpu"], half_flops_per_s=CATALOGUE["cpu"].flops_per_s / 10)

    full, half = (hardware.op_s("aten.mm.default", 10**12, 1, 1, is_half) for is_half in (False, True))

    assert half > 9 * full
    assert CATALOGUE["cpu"].op_s("aten.mm.default", 10**12, 1, 1, True) == pytest.approx(full)
    assert Hardware(**dataclasses.asdict(hardware)) == hardware
