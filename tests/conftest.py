"""What holds for all tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine makes any single example slow; a slow test is what `--durations` shows.
settings.register_profile("memopt", deadline=None)
settings.load_profile("memopt")


@pytest.fixture(scope="session", autouse=True)
def _no_calibration_of_this_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forecasts are the catalogue's, also where `memopt calibrate` has run; processes that tests start inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def wide(tmp_path: Path) -> Path:
    """A file with a factory `workload` of a model that is mostly optimizer states."""
    path = tmp_path / "wide.py"
    path.write_text(
        "import memopt, torch\n"
        "from torch import nn\n"
        "def workload():\n"
        "    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])\n"
        "    optimizer = torch.optim.AdamW(model.parameters())\n"
        "    return memopt.Workload(model, (torch.randn(8, 256),), loss=lambda y: y.sum(), optimizer=optimizer)\n"
    )
    return path
