"""What holds for all tests."""

from collections.abc import Iterator

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
