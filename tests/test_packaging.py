"""The wheel, built from the tree and from the sdist: one top-level package that holds the four linked folders."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import memopt

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("profiler", "policies", "offload", "quant")


@pytest.fixture(scope="module", params=["from the tree", "from the sdist"])
def wheel_files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    out = tmp_path_factory.mktemp("dist")
    only = ["--wheel"] if request.param == "from the tree" else []  # without it, build makes the wheel from the sdist
    command = [sys.executable, "-m", "build", *only, "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize("folder", LINKED)
def test_wheel_holds_every_module_of_the_linked_folder(wheel_files, folder):
    modules = {f"memopt/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / folder).rglob("*.py")}
    assert f"memopt/{folder}/__init__.py" in modules
    assert modules <= wheel_files


def test_wheel_is_typed_and_has_one_top_level_package(wheel_files):
    assert {"memopt/__init__.py", "memopt/py.typed"} <= wheel_files
    assert {name.partition("/")[0] for name in wheel_files} == {"memopt", f"memopt-{memopt.__version__}.dist-info"}
    assert not any(name.endswith(".pyc") for name in wheel_files)


@pytest.mark.parametrize("folder", LINKED)
def test_folder_is_linked_into_the_package(folder):
    link = ROOT / "memopt" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..", folder)


def test_editable_install_exposes_the_package_alone():
    assert [path.name for path in (ROOT / ".editable").iterdir()] == ["memopt"]
    assert (ROOT / ".editable" / "memopt").resolve() == ROOT / "memopt"
