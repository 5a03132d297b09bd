"""What `memopt calibrate` measured, in the user's cache: a file for each host, device and number of threads.

It changes forecasts and so the choice between plans; no plan changes a number of the training.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from memopt.profiler.hardware import Hardware

logger = logging.getLogger("memopt")

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """One device of one machine, measured with torch at one number of threads."""

    hardware: Hardware
    host: str
    device: str  # "cpu", or the GPU's own name
    num_threads: int
    torch_version: str
    measured_at: str  # ISO 8601, UTC
    nvme: str | None = None  # directory on the disk that was measured; None: the disk's rates are assumed
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "memopt.hardware",
            "version": FORMAT_VERSION,
            **asdict(self),
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: Any) -> Calibration:
        """Raises ValueError if `data` is not a calibration of this format."""
        if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (
            "memopt.hardware",
            FORMAT_VERSION,
        ):
            raise ValueError(f"not a calibration of version {FORMAT_VERSION}")
        data = {k: v for k, v in data.items() if k not in ("format", "version")}
        try:
            return cls(**{**data, "hardware": Hardware(**data["hardware"]), "notes": tuple(data["notes"])})
        except (KeyError, TypeError) as e:
            raise ValueError(f"fields are missing or unknown: {e}") from e


def calibration_path(device: str, num_threads: int) -> Path:
    """Where the calibration of a device of this host is kept: under $XDG_CACHE_HOME, else ~/.cache.

    Raises OSError if there is no such place.
    """
    asked = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        cache = asked if asked.is_absolute() else Path.home() / ".cache"  # the XDG rules: what is relative is ignored
    except RuntimeError as e:
        raise FileNotFoundError(f"no folder for a cache: {e}") from e
    name = "-".join(re.sub(r"[^a-z0-9.]+", "_", part.lower()) for part in (socket.gethostname(), device))
    return cache / "memopt" / f"hardware-{name}-{num_threads}_threads.json"


def load_calibration(device: str, num_threads: int) -> Calibration | None:
    """What was measured here of `device`; None if nothing was, or if it can't be read: the log says so then."""
    try:
        path = calibration_path(device, num_threads)
        found = Calibration.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        logger.warning("memopt: %s is ignored: %s. `memopt calibrate` writes it anew.", path, e)
        return None
    here = (socket.gethostname(), device, num_threads)
    if (found.host, found.device, found.num_threads) != here:
        logger.warning("memopt: %s is ignored: it is of %s", path, (found.host, found.device, found.num_threads))
        return None
    return found


def save_calibration(calibration: Calibration) -> Path:
    """Keep `calibration` for the profiles to come, whole or not at all. Returns the file. Raises OSError."""
    path = calibration_path(calibration.device, calibration.num_threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, unfinished = tempfile.mkstemp(dir=path.parent, prefix=".hardware-")
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(calibration.to_json(), file, indent=1)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
    return path
