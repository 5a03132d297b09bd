"""The linters over the whole tree, as `make lint` runs them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

LINTERS = {
    "ruff check": ["-m", "ruff", "check", "."],
    "ruff format": ["-m", "ruff", "format", "--check", "--diff", "."],
    "mypy": ["-m", "mypy"],
    # import-linter has no `-m` form.
    "import-linter": ["-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
}


@pytest.mark.parametrize("linter", LINTERS)
def test_tree_passes(linter):
    done = subprocess.run([sys.executable, *LINTERS[linter]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{linter}\n{done.stdout}{done.stderr}"
