"""One directory per run, under a path that many runs may share.

Its lock file is held (flock) as long as the process lives: what can be locked belongs to a dead run and is swept by the
next one. The lock goes with the process however it ends; a forked child shares it but removes nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from memopt.errors import StoreError

PREFIX = "memopt-"
LOCK = "lock"


class RunDirectory:
    """A directory of this run's own under `root`, removed by `close`, by the garbage collector or at exit.

    Raises StoreError if `root` can't be made or written.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            sweep(self.root)
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=self.root))
            lock_fd = _locked(self.path / LOCK)
        except OSError as e:
            raise StoreError(self.root, e.errno or errno.EIO, 0) from e
        assert lock_fd is not None, "nobody else knows a new directory"
        # A finalizer also runs at exit.
        self._finalizer = weakref.finalize(self, _remove, self.path, lock_fd, os.getpid())

    def close(self) -> None:
        """Remove the directory. May be called again."""
        self._finalizer()


def sweep(root: Path) -> list[Path]:
    """Remove the directories under `root` whose runs are dead; returns them."""
    swept = []
    for path in root.glob(f"{PREFIX}*-*"):
        with contextlib.suppress(OSError):
            # Without a lock file it is being made just now, or was being removed.
            if not (path / LOCK).exists():
                continue
            lock_fd = _locked(path / LOCK)
            if lock_fd is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock_fd)
                swept.append(path)
    return swept


def _locked(path: Path) -> int | None:
    """A descriptor of the file at `path` with its lock held, None if another process holds it."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _remove(path: Path, lock_fd: int, pid: int) -> None:
    if os.getpid() != pid:
        return
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.close(lock_fd)
