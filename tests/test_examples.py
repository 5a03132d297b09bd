"""Every example runs, trains the same numbers as plain torch and stays within its budget."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).resolve().parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_prints_a_forecast_that_held(path):
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "losses equal bit for bit: True" in done.stdout
    said = {name: int(n.replace(",", "")) for name, n in re.findall(r"^(\w+) +([\d,]+) B", done.stdout, re.MULTILINE)}
    assert said["measured"] <= said["budget"]
    assert said["forecast"] <= said["budget"]
    assert "slowdown x" in done.stdout


def test_there_are_examples():
    assert {path.stem for path in EXAMPLES} >= {"plain_loop", "decorator", "offload_to_disk"}
