"""Runs beside each other under one path, and what is left of those that end."""

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys

import pytest

from memopt.errors import StoreError
from memopt.offload.run_directory import LOCK, RunDirectory, sweep

LIVES = """
from memopt.offload.run_directory import RunDirectory
run = RunDirectory(sys.argv[1])
open(run.path / "left.data", "w").close()
print(run.path.name, flush=True)
sys.stdin.readline()
"""


def name_of(process):
    """The directory of a process that runs LIVES; it is made when this returns."""
    name = process.stdout.readline().strip()
    assert name, process.stderr.read()
    return name


def test_dead_runs_are_swept_and_live_ones_are_not(start, tmp_path):
    killed, terminated, alive = [start(LIVES, tmp_path) for _ in range(3)]
    names = [name_of(p) for p in (killed, terminated, alive)]
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    killed.kill()
    terminated.send_signal(signal.SIGTERM)
    killed.wait()
    terminated.wait()
    run = RunDirectory(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([names[2], run.path.name])
    assert sorted(os.listdir(tmp_path / names[2])) == ["left.data", LOCK]
    alive.communicate("\n")  # it ends by itself
    run.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise ValueError('in the step')", "os.chdir('/')", "del run"])
def test_run_removes_its_directory_however_python_ends(start, tmp_path, end):
    code = LIVES.replace("sys.argv[1]", "'root'") + f"\nimport os\n{end}\n"
    process = start(f"import os, sys\nos.chdir({str(tmp_path)!r})\n{code}")
    process.communicate("\n")
    assert os.listdir(tmp_path / "root") == []


def test_two_runs_of_one_process_keep_apart(tmp_path):
    a, b = RunDirectory(tmp_path), RunDirectory(tmp_path)
    assert a.path != b.path
    assert sweep(tmp_path) == []
    a.close()
    a.close()
    assert os.listdir(tmp_path) == [b.path.name]
    del b
    gc.collect()
    assert os.listdir(tmp_path) == []


def test_number_of_a_living_process_does_not_save_a_dead_directory(tmp_path):
    stale = tmp_path / f"memopt-{os.getpid()}-abc_1"
    (stale / "deep").mkdir(parents=True)
    (stale / "deep" / "0.data").write_text("left")
    (stale / LOCK).touch()
    assert sweep(tmp_path) == [stale]
    assert os.listdir(tmp_path) == []


def test_what_is_not_ours_stays(tmp_path):
    results = tmp_path / "memopt-results"
    results.mkdir()
    (results / LOCK).touch()
    unlocked = tmp_path / "memopt-1-abc"  # no lock, but not empty: not made by us
    unlocked.mkdir()
    (unlocked / "thesis").touch()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK).touch()
    (tmp_path / "memopt-2-abc").symlink_to(elsewhere)
    (tmp_path / "memopt-3-abc").touch()
    before = sorted(os.listdir(tmp_path))
    RunDirectory(tmp_path).close()
    assert sorted(os.listdir(tmp_path)) == before
    assert (elsewhere / LOCK).exists()


def test_removal_that_was_cut_off_is_finished(tmp_path):
    (tmp_path / "memopt-1-abc").mkdir()
    RunDirectory(tmp_path).close()
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_removes_nothing(tmp_path):
    run = RunDirectory(tmp_path)
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            run.close()
            del run
            gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    assert (run.path / LOCK).exists()
    assert sweep(tmp_path) == []
    run.close()


FORKS = """
import os
from memopt.offload.run_directory import RunDirectory
run = RunDirectory(sys.argv[1])
if os.fork() == 0:
    sys.exit()  # an exit with all its handlers, unlike that of multiprocessing
os.wait()
print(os.path.exists(run.path), flush=True)
"""


def test_forked_child_that_exits_removes_nothing(start, tmp_path):
    out, err = start(FORKS, tmp_path).communicate()
    assert out.split() == ["True"], err
    assert os.listdir(tmp_path) == []


def test_root_is_made_with_its_parents(tmp_path):
    run = RunDirectory(tmp_path / "a" / "b")
    assert run.path.parent == tmp_path / "a" / "b"
    run.close()


def test_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError) as failed:
            RunDirectory(root)
        assert failed.value.errno == errno.ENOTDIR
        assert failed.value.path == str(root)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_root_that_can_not_be_written_is_refused():
    with pytest.raises(StoreError) as failed:
        RunDirectory("/proc/self")
    assert failed.value.errno in (errno.EACCES, errno.EPERM, errno.ENOENT, errno.EROFS)


def test_root_without_locks_is_refused_and_left_clean(tmp_path, monkeypatch):
    def refuse(fd, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(StoreError, match="ENOLCK"):
        RunDirectory(tmp_path)
    assert os.listdir(tmp_path) == []


def test_lock_is_not_inherited_by_programs_that_are_started(tmp_path):
    run = RunDirectory(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    path, fd = run.path, run._finalizer.peek()[2][1]
    os.close(fd)  # as if this process were dead
    run._finalizer.detach()
    assert sweep(tmp_path) == [path]
    child.communicate(b"\n")
