"""Processes of their own, without the seconds that importing all of memopt takes."""

import subprocess
import sys
from pathlib import Path

import pytest

import memopt

# An empty package in the place of memopt: its modules are imported one by one, and most of them do without torch.
_PRELUDE = f"""
import sys, types
sys.modules["memopt"] = types.ModuleType("memopt")
sys.modules["memopt"].__path__ = [{str(Path(memopt.__file__).parent)!r}]
"""


@pytest.fixture
def start():
    """A function that starts Python code with arguments; what still runs at the end of the test is killed."""
    started = []

    def start_code(code, *args):
        command = [sys.executable, "-c", _PRELUDE + code, *map(str, args)]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start_code
    for process in started:
        process.kill()
        process.communicate()
