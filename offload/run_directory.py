"""One directory per run, under a path that many runs may share.

Its lock file is held (flock) as long as the process lives: what can be locked belongs to a dead run and is swept by the
next one. Process numbers are no evidence: they are used again. The lock goes with the process however it ends. A forked
child shares it, so the directory counts as alive while a child is; but a child removes nothing.

What is stored has no name here (data_file.py), so after a SIGKILL or a SIGTERM no bytes are left, only an empty
directory until the next run.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
import weakref
from pathlib import Path

from memopt.errors import StoreError

LOCK = "lock"
_NAME = re.compile(r"memopt-\d+-\w+")  # a user's own "memopt-results" is none of ours
_PREFIX_UNLOCKED = ".memopt-"


class RunDirectory:
    """A directory of this run's own under `root`, removed by `close`, by the garbage collector or at exit.

    Attributes:
        path: the directory.

    Raises StoreError if `root` can't be made or written, or has no file locks.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()  # the process may change its working directory
        try:
            os.makedirs(self.root, exist_ok=True)
            sweep(self.root)
            self.path, lock_fd = _new_directory(self.root)
        except OSError as e:
            code = errno.ENOTDIR if isinstance(e, FileExistsError) else e.errno or errno.EIO
            raise StoreError(self.root, code, 0) from e
        # A finalizer also runs at exit.
        self._finalizer = weakref.finalize(self, _remove, self.path, lock_fd, os.getpid())

    def close(self) -> None:
        """Remove the directory and all that is in it. May be called again."""
        self._finalizer()


def _new_directory(root: Path) -> tuple[Path, int]:
    """A new directory and the descriptor of its lock, held. It gets the name that others look for when it is locked."""
    unlocked = Path(tempfile.mkdtemp(prefix=_PREFIX_UNLOCKED, dir=root))
    lock_fd = None
    try:
        lock_fd = os.open(unlocked / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path = root / f"memopt-{os.getpid()}-{unlocked.name.removeprefix(_PREFIX_UNLOCKED)}"
        unlocked.rename(path)
    except BaseException:
        if lock_fd is not None:
            os.close(lock_fd)
        shutil.rmtree(unlocked, ignore_errors=True)
        raise
    return path, lock_fd


def sweep(root: Path) -> list[Path]:
    """Remove the directories under `root` whose runs are dead. Returns them; those of other users stay."""
    swept = []
    for entry in os.scandir(root):
        if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            with contextlib.suppress(OSError):  # another sweep or the run itself was faster
                lock_fd = _lock_of_dead_run(Path(entry.path))
                if lock_fd is not None:
                    _remove(Path(entry.path), lock_fd, os.getpid())
                    swept.append(Path(entry.path))
    return swept


def _lock_of_dead_run(path: Path) -> int | None:
    """The lock, now held by us, of a directory whose run is dead; None if it lives. Raises OSError."""
    try:
        fd = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        os.rmdir(path)  # somebody died while removing it: only what is empty goes
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _remove(path: Path, lock_fd: int, pid: int) -> None:
    if os.getpid() != pid:
        return
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            elif entry.name != LOCK:
                os.unlink(entry.path)
    shutil.rmtree(path, ignore_errors=True)  # the lock last: what is half removed can be swept
    os.close(lock_fd)
