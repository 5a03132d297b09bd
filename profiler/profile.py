"""What one training step does: a frozen record of its ops, the lifetimes of its storages and its saved tensors.

A `Profile` holds names, numbers and enums only. It is made by `memopt.profile`, saved as JSON, and read by the
policies, which need neither torch nor a device. All moments are event indices: a clock that ticks at each op,
allocation, release, pack and unpack of the profiled step. Bytes are allocated bytes (rounded as the target's allocator
rounds them).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from memopt.profiler.hardware import Hardware

FORMAT_VERSION = 3
NEVER = -1  # a moment that does not come


class Phase(Enum):
    """Part of the step: the model's own forward, what follows it up to the loss, backward, optimizer step."""

    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    STEP = "step"


class Kind(Enum):
    """What a storage is for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"
    STAGING = "staging buffer"  # only in a profile that a placement has rewritten


@dataclass(frozen=True, slots=True)
class OpKey:
    """The name by which a plan speaks of an op: it survives other batch sizes.

    `call` counts the calls of `op` in the module at `module` (a dotted fqn, "" for the root) since the forward began.
    """

    module: str
    op: str
    call: int


@dataclass(frozen=True, slots=True)
class Op:
    """One executed op. `makes[i]` is the value at flat output position `positions[i]`; views make no value."""

    key: OpKey
    phase: Phase
    at: int  # event index at which it begins; what it makes is born later
    reads: tuple[int, ...]  # values
    makes: tuple[int, ...]  # values, fresh ones and those that it wrote in place
    positions: tuple[int, ...]  # flat output positions of `makes`; -1 for a value written in place
    flops: int
    moved_bytes: int
    seconds: float
    scratch_bytes: int  # that the kernel holds for itself while it runs
    is_random: bool
    is_replayable: bool  # running it again on the same inputs gives the same bits and changes nothing else


@dataclass(frozen=True, slots=True)
class Storage:
    """One allocation. It lives from `birth` until neither Python nor a saved tensor holds it.

    `death` is the moment when the last holder other than autograd's saved tensors lets go; NEVER if it outlives the
    step.
    """

    num_bytes: int
    kind: Kind
    birth: int
    death: int
    module: str  # where it was made, or the dotted name of the parameter or buffer


@dataclass(frozen=True, slots=True)
class Value:
    """The content of one storage between two writes."""

    storage: int
    maker: int  # op index, -1 if its making was not seen
    overwritten_at: int  # event index of the next write to its storage, or NEVER


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that autograd kept for backward, in the order of packing."""

    value: int
    num_bytes: int  # of the tensor itself (views of one storage share the storage's bytes)
    packed_at: int
    unpacked_at: int  # first time that backward asked for it, or NEVER
    given_until: int  # when what backward was given had died, or NEVER
    released_at: int  # when autograd let go of it, or NEVER
    is_hooked: bool  # saved inside the model's forward, where a plan can choose its fate


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One training step of one workload on one device type."""

    model: str
    device: str
    mode: str  # "fake" or "run"
    rates: Hardware  # of the device that the times are for; plans take all speeds from here
    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    values: tuple[Value, ...]
    saved: tuple[SavedTensor, ...]
    forward_ends_at: int
    ends_at: int
    peak_bytes: int  # of the plain step, everything included
    min_bytes: int = 0  # least peak that recompute alone can reach
    scratch_bytes: int = 0  # room for the kernels' own scratch, included in both peaks
    micro_batches: int = 1
    parameters: tuple[tuple[str, int], ...] = ()  # name and number of elements of each
    notes: tuple[str, ...] = field(default=())

    @property
    def hardware(self) -> str:
        """Name of the device that the times are for."""
        return self.rates.name

    @property
    def step_s(self) -> float:
        """Seconds of the plain step, as measured ("run") or by roofline ("fake")."""
        return sum(op.seconds for op in self.ops)

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON to `path`."""
        Path(path).write_text(json.dumps(self.to_json()))

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read what `save` wrote. Raises ValueError if it is not a profile of this format."""
        return cls.from_json(json.loads(Path(path).read_text()))

    def to_json(self) -> dict[str, Any]:
        scalars = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("rates", "ops", "storages", "values", "saved", "notes")
        }
        return {
            "format": "memopt.profile",
            "version": FORMAT_VERSION,
            **scalars,
            "rates": asdict(self.rates),
            "notes": list(self.notes),
            "ops": [
                [
                    o.key.module,
                    o.key.op,
                    o.key.call,
                    o.phase.value,
                    o.at,
                    o.reads,
                    o.makes,
                    o.positions,
                    o.flops,
                    o.moved_bytes,
                    o.seconds,
                    o.scratch_bytes,
                    o.is_random,
                    o.is_replayable,
                ]
                for o in self.ops
            ],
            "storages": [[s.num_bytes, s.kind.value, s.birth, s.death, s.module] for s in self.storages],
            "values": [[v.storage, v.maker, v.overwritten_at] for v in self.values],
            "saved": [list(asdict(s).values()) for s in self.saved],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Profile:
        if data.get("format") != "memopt.profile" or data.get("version") != FORMAT_VERSION:
            raise ValueError(
                f"not a memopt profile of version {FORMAT_VERSION}: format {data.get('format')!r}, "
                f"version {data.get('version')!r}. Profile the workload again."
            )
        data = {k: v for k, v in data.items() if k not in ("format", "version")}
        data["rates"] = Hardware(**data["rates"])
        data["notes"] = tuple(data["notes"])
        data["parameters"] = tuple((name, numel) for name, numel in data["parameters"])
        data["ops"] = tuple(
            Op(OpKey(o[0], o[1], o[2]), Phase(o[3]), o[4], tuple(o[5]), tuple(o[6]), tuple(o[7]), *o[8:])
            for o in data["ops"]
        )
        data["storages"] = tuple(Storage(s[0], Kind(s[1]), *s[2:]) for s in data["storages"])
        data["values"] = tuple(Value(*v) for v in data["values"])
        data["saved"] = tuple(SavedTensor(*s) for s in data["saved"])
        return cls(**data)
