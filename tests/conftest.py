"""What holds for all tests."""

from hypothesis import settings

# A busy machine makes any single example slow; a slow test is what `--durations` shows.
settings.register_profile("memopt", deadline=None)
settings.load_profile("memopt")
