"""Full disks, failing disks, killed runs and crowded paths: nothing is lost, and no number changes."""

from __future__ import annotations

import copy
import errno
import functools
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_models import TinyGPT, adamw, token_loss
from test_offload import IDS, bits, state_of, trained
from torch import nn

import memopt
import memopt.state
from memopt.errors import StoreError
from memopt.offload.nvme import DiskCalls, NVMeStore
from memopt.policies.plan import Away, Plan


class FailingCalls(DiskCalls):
    """System calls of which one kind fails after a number of good ones."""

    def __init__(self, kind: str, after: int, number: int) -> None:
        self.kind, self.left, self.number = kind, after, number
        self.num_failed = 0

    def _count(self, kind: str) -> None:
        if kind == self.kind:
            self.left -= 1
            if self.left < 0:
                self.num_failed += 1
                raise OSError(self.number, os.strerror(self.number))

    def fallocate(self, fd: int, offset: int, num_bytes: int) -> None:
        self._count("fallocate")
        super().fallocate(fd, offset, num_bytes)

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        self._count("read")
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        self._count("write")
        return super().pwritev(fd, buffers, offset)


@functools.cache
def original() -> nn.Module:
    torch.manual_seed(0)
    return TinyGPT(layers=3, width=96)


@functools.cache
def plain_run() -> tuple[list[float], list[bytes]]:
    model = copy.deepcopy(original())
    optimizer = adamw(model)
    return trained(model, optimizer, IDS, token_loss), bits(state_of(model, optimizer))


def least_plan(path: Path) -> Plan:
    model = copy.deepcopy(original())
    profile = memopt.profile(memopt.Workload(model, args=(IDS,), loss=token_loss, optimizer=adamw(model)))
    return memopt.plan(profile, "min", allow={"offload"}, nvme=str(path))


def test_placement_that_failed_is_tried_again_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(original())
    optimizer = adamw(model)
    memopt.wrap_model(model, budget="min", allow={"offload"}, nvme=str(tmp_path))
    memopt.wrap_optimizer(optimizer, model)
    session = memopt.session_of(model)
    assert session is not None
    with monkeypatch.context() as patch:
        patch.setattr(memopt.state, "NVMeStore", _no_store)
        for _ in range(2):
            with pytest.raises(StoreError):
                token_loss(model(IDS))
            assert session.state is None
    losses = trained(model, optimizer, IDS, token_loss)
    assert session.state is not None
    assert (losses, bits(state_of(model, optimizer))) == plain_run()


def _no_store(path: Path) -> NVMeStore:
    raise StoreError(path, errno.EIO, 0)


def test_disk_without_room_is_told_before_anything_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = least_plan(tmp_path)
    monkeypatch.setattr(memopt.state, "free_bytes", lambda path: plan.forecast.store_bytes - 1)
    model = copy.deepcopy(original())
    before = bits(list(model.state_dict().values()))
    with pytest.raises(StoreError) as caught:
        memopt.apply(plan, model, adamw(model))
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.num_bytes == plan.forecast.store_bytes
    assert "forward" not in model.__dict__
    assert bits(list(model.state_dict().values())) == before


@pytest.mark.parametrize("part", ["parameter", "gradient"])
def test_disk_that_fills_while_memopt_is_put_on_leaves_the_model_as_it_was(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = least_plan(tmp_path)
    away = tuple(Away(a.name, part == "parameter", part == "gradient", False) for a in plan.away)
    plan = replace(plan, away=away)
    calls = FailingCalls("fallocate", 0, errno.ENOSPC)
    monkeypatch.setattr(memopt.state, "NVMeStore", functools.partial(NVMeStore, calls=calls))
    model = copy.deepcopy(original())
    optimizer = adamw(model)
    with pytest.raises(StoreError):
        memopt.apply(plan, model, optimizer)
    assert calls.num_failed > 0
    assert trained(model, optimizer, IDS, token_loss) == plain_run()[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("after", [0, 5, 20, 40, 60, 80, 100])
def test_write_that_fails_in_any_phase_keeps_the_data_in_memory(
    after: int, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = least_plan(tmp_path)
    calls = FailingCalls("write", after, number)
    monkeypatch.setattr(memopt.state, "NVMeStore", functools.partial(NVMeStore, calls=calls))
    model = copy.deepcopy(original())
    optimizer = adamw(model)
    with memopt.apply(plan, model, optimizer) as session:
        losses = trained(model, optimizer, IDS, token_loss)
        assert losses == plain_run()[0]
        assert bits(state_of(model, optimizer)) == plain_run()[1]
        assert calls.num_failed > 0
        assert any("in memory" in note for note in session.notes)
    assert bits(state_of(model, optimizer)) == plain_run()[1]


@pytest.mark.parametrize("after", [4, 20, 50])
def test_read_that_fails_is_an_error_that_says_where(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = least_plan(tmp_path)
    calls = FailingCalls("read", after, errno.EIO)
    monkeypatch.setattr(memopt.state, "NVMeStore", functools.partial(NVMeStore, calls=calls))
    model = copy.deepcopy(original())
    optimizer = adamw(model)
    groups = [list(group["params"]) for group in optimizer.param_groups]
    session = memopt.apply(plan, model, optimizer)
    with pytest.raises(StoreError) as caught:
        trained(model, optimizer, IDS, token_loss)
    assert caught.value.errno == errno.EIO
    assert str(tmp_path) in str(caught.value)
    assert [list(group["params"]) for group in optimizer.param_groups] == groups
    session.remove()
    assert list(tmp_path.iterdir()) == []


RUN = """
import os, signal, sys
import torch
from small_models import TinyGPT, adamw, token_loss
from test_offload import IDS
import memopt

disk, checkpoint, first, last, killed_at = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
torch.manual_seed(0)
model = TinyGPT(layers=3, width=96, dropout=0.0)
optimizer = adamw(model)
if first:
    saved = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
if disk != "none":
    model = memopt.wrap_model(model, budget="min", allow={"recompute", "offload"}, nvme=disk)
    optimizer = memopt.wrap_optimizer(optimizer, model)
for i in range(first, last):
    optimizer.zero_grad()
    loss = token_loss(model(IDS.roll(i)))
    if i == killed_at:
        model.blocks[1].down.weight.register_hook(lambda g: os.kill(os.getpid(), signal.SIGKILL))
    loss.backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint + ".new")
    os.replace(checkpoint + ".new", checkpoint)
    print(i, loss.item().hex(), flush=True)
"""


def run_script(*args: object, before: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    code = textwrap.dedent(before) + RUN
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)], env=environment, capture_output=True, text=True, timeout=120
    )


def test_run_that_is_killed_in_a_step_resumes_exactly_from_its_checkpoint(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    plain = run_script("none", tmp_path / "plain.pt", 0, 4, -1)
    killed = run_script(disk, tmp_path / "ours.pt", 0, 4, 2)
    assert killed.returncode == -9, killed.stderr
    resumed = run_script(disk, tmp_path / "ours.pt", 2, 4, -1)
    assert killed.stdout + resumed.stdout == plain.stdout, resumed.stderr
    assert list(disk.iterdir()) == []  # also what the dead run left
    # and the checkpoint is one for plain torch
    a, b = (torch.load(tmp_path / name, weights_only=True) for name in ("plain.pt", "ours.pt"))
    assert bits(list(a["model"].values())) == bits(list(b["model"].values()))
    for index, state in a["optimizer"]["state"].items():
        assert bits(list(state.values())) == bits(list(b["optimizer"]["state"][index].values()))


def test_two_runs_on_one_path_do_not_meet(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    plain = run_script("none", tmp_path / "plain.pt", 0, 3, -1)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, str(disk), str(tmp_path / f"{i}.pt"), "0", "3", "-1"],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    outputs = [run.communicate(timeout=120)[0] for run in both]
    assert outputs == [plain.stdout, plain.stdout]
    assert list(disk.iterdir()) == []


def test_sixty_four_descriptors_are_enough(tmp_path: Path) -> None:
    limit = """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    """
    plain = run_script("none", tmp_path / "plain.pt", 0, 2, -1)
    ours = run_script(tmp_path / "disk", tmp_path / "ours.pt", 0, 2, -1, before=limit)
    assert ours.stdout == plain.stdout, ours.stderr
