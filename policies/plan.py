"""A plan: what is dropped and made again in backward, what is away between uses, and what that costs. Data only."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memopt.profiler.profile import OpKey

FORMAT_VERSION = 3


@dataclass(frozen=True, slots=True)
class Drop:
    """Outputs of one op that are not kept for backward, by flat output position."""

    key: OpKey
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Away:
    """What of one parameter is on the store between uses: its values, its gradient, its optimizer states."""

    name: str
    parameter: bool
    gradient: bool
    states: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What the simulator says of a step under the plan."""

    peak_bytes: int  # everything included, the kernels' scratch too
    step_s: float
    plain_peak_bytes: int
    plain_step_s: float
    recompute_s: float  # of step_s: replayed ops and the tape's bookkeeping
    peak_at: str  # module and phase of the peak
    breakdown: dict[str, int] = field(default_factory=dict)  # bytes at the peak by kind
    store_bytes: int = 0  # on the disk
    read_bytes: int = 0  # from the disk in a step
    written_bytes: int = 0
    lane_s: float = 0.0  # that the disk is busy in a step
    stalls_s: dict[str, float] = field(default_factory=dict)  # of step_s: waiting for the disk, by phase

    @property
    def slowdown(self) -> float:
        """Step time against the plain step's, 1.0 for no cost."""
        return self.step_s / self.plain_step_s if self.plain_step_s > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A choice that the simulator found to be within the budget. `gap` 0.02: proven within 2% of the best step time."""

    budget_bytes: int
    drops: tuple[Drop, ...]
    forecast: Forecast
    gap: float
    levers: tuple[str, ...]
    away: tuple[Away, ...] = ()
    window_bytes: int = 0  # for parameters that are resident at a time
    gradient_window_bytes: int = 0  # for gradients whose writes are under way
    activation_window_bytes: int = 0  # for activations that are being written, and those that are read ahead
    moves: tuple[Drop, ...] = ()  # outputs that are kept on the store from forward to backward
    bucket_bytes: int = 0  # that a bucket of the optimizer's step brings in
    num_buckets: int = 3  # in memory at a time
    nvme: str | None = None  # directory of the store
    quantized: tuple[str, ...] = ()  # parameters whose optimizer states are in 8 bits
    nonfinite: str = "skip"  # or "raise": what a gradient does that has no 8-bit state
    input_shapes: tuple[tuple[int, ...], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Nothing to do: the plain step fits."""
        return not self.drops and not self.moves and not self.away and not self.quantized

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON to `path`."""
        Path(path).write_text(json.dumps(self.to_json()))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what `save` wrote. Raises ValueError if it is not a plan of this format."""
        return cls.from_json(json.loads(Path(path).read_text()))

    def to_json(self) -> dict[str, Any]:
        f = self.forecast
        return {
            "format": "memopt.plan",
            "version": FORMAT_VERSION,
            "budget_bytes": self.budget_bytes,
            "drops": _listed(self.drops),
            "moves": _listed(self.moves),
            "activation_window_bytes": self.activation_window_bytes,
            "forecast": {name: getattr(f, name) for name in Forecast.__dataclass_fields__},
            "gap": self.gap,
            "levers": list(self.levers),
            "away": [[a.name, a.parameter, a.gradient, a.states] for a in self.away],
            "window_bytes": self.window_bytes,
            "gradient_window_bytes": self.gradient_window_bytes,
            "bucket_bytes": self.bucket_bytes,
            "num_buckets": self.num_buckets,
            "nvme": self.nvme,
            "quantized": list(self.quantized),
            "nonfinite": self.nonfinite,
            "input_shapes": [list(s) for s in self.input_shapes],
            "notes": list(self.notes),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        if data.get("format") != "memopt.plan" or data.get("version") != FORMAT_VERSION:
            raise ValueError(
                f"not a memopt plan of version {FORMAT_VERSION}: format {data.get('format')!r}, "
                f"version {data.get('version')!r}. Plan again."
            )
        return cls(
            budget_bytes=data["budget_bytes"],
            drops=_from_list(data["drops"]),
            moves=_from_list(data["moves"]),
            activation_window_bytes=data["activation_window_bytes"],
            forecast=Forecast(**data["forecast"]),
            gap=data["gap"],
            levers=tuple(data["levers"]),
            away=tuple(Away(*a) for a in data["away"]),
            window_bytes=data["window_bytes"],
            gradient_window_bytes=data["gradient_window_bytes"],
            bucket_bytes=data["bucket_bytes"],
            num_buckets=data["num_buckets"],
            nvme=data["nvme"],
            quantized=tuple(data["quantized"]),
            nonfinite=data["nonfinite"],
            input_shapes=tuple(tuple(s) for s in data["input_shapes"]),
            notes=tuple(data["notes"]),
        )


def _listed(drops: tuple[Drop, ...]) -> list[list[Any]]:
    return [[d.key.module, d.key.op, d.key.call, list(d.positions)] for d in drops]


def _from_list(rows: list[list[Any]]) -> tuple[Drop, ...]:
    return tuple(Drop(OpKey(module, op, call), tuple(positions)) for module, op, call, positions in rows)
