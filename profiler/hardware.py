"""How fast a device is: numbers for a roofline, where ops have not been measured.

A roofline does not forecast a step to the percent; it ranks ops by cost, which is what a plan needs. `memopt.profile`
with mode="run" measures each op instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

# Elementwise ops that compute more than they move: on a CPU they run several times slower than a copy.
_TRANSCENDENTAL = frozenset(
    [
        "gelu",
        "gelu_backward",
        "tanh",
        "tanh_backward",
        "silu",
        "silu_backward",
        "sigmoid",
        "exp",
        "erf",
        "log",
        "log1p",
        "expm1",
        "sin",
        "cos",
        "pow",
        "softplus",
        "mish",
        "_softmax",
        "_log_softmax",
        "_softmax_backward_data",
        "_log_softmax_backward_data",
        "native_layer_norm",
        "native_layer_norm_backward",
        "native_group_norm",
        "native_group_norm_backward",
        "native_batch_norm",
        "native_batch_norm_backward",
        "elu",
        "hardswish",
    ]
)

# What costs nothing, or is not known.
_MAY_BE_ZERO = frozenset(
    ["launch_s", "record_s", "replay_s", "memory_bytes", "half_flops_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Peak rates of one device. `launch_s` is the fixed cost of one op, `replay_s` that of replaying one op from
    Python, `record_s` that of an op which passes the tape's dispatch mode in the forward.

    Raises ValueError for rates that are not positive or times that are negative.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    transcendental_bytes_per_s: float
    launch_s: float
    record_s: float
    replay_s: float
    memory_bytes: int = 0
    # The disk that a server of this kind has; `memopt calibrate` measures the one that is there.
    disk_read_bytes_per_s: float = 1.8e9
    disk_write_bytes_per_s: float = 2.2e9
    disk_mixed_bytes_per_s: float = 2.2e9  # reads and writes at once, in total
    # 0 where they are not known.
    half_flops_per_s: float = 0.0  # of matrix products in 16 bits; `flops_per_s` stands in for it
    h2d_bytes_per_s: float = 0.0  # from pinned memory
    d2h_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "name":
                is_good = isinstance(value, str)
            else:
                is_good = isinstance(value, int | float) and math.isfinite(value) and value >= 0
                is_good = is_good and (value > 0 or f.name in _MAY_BE_ZERO)
            if not is_good:
                raise ValueError(f"Hardware({f.name}={value!r}) is no rate, time or size")

    def disk_s(self, read_bytes: int, written_bytes: int) -> float:
        """Seconds that the disk needs to read and write at the same time."""
        return max(
            read_bytes / self.disk_read_bytes_per_s,
            written_bytes / self.disk_write_bytes_per_s,
            (read_bytes + written_bytes) / self.disk_mixed_bytes_per_s,
        )

    def op_s(self, name: str, flops: int, moved_bytes: int, output_bytes: int, is_half: bool = False) -> float:
        """Seconds of one op by roofline: the longer of computing and moving, and its launch.

        Source: Williams et al. 2009, "Roofline". `name` is an overload's, such as "aten.gelu.default"; `is_half`: its
        inputs have 16 bits.
        """
        base = name.split(".")[1] if "." in name else name
        rate = self.transcendental_bytes_per_s if base.rstrip("_") in _TRANSCENDENTAL else self.bytes_per_s
        flops_per_s = (self.half_flops_per_s if is_half else 0.0) or self.flops_per_s
        return max(flops / flops_per_s, moved_bytes / rate) + self.launch_s


def _gpu(name: str, tflops: float, tb_per_s: float, gib: int) -> Hardware:
    # 60% of the data sheet's dense bf16 rate and 80% of its bandwidth are what large kernels reach.
    return Hardware(
        name=name,
        flops_per_s=0.6 * tflops * 1e12,
        bytes_per_s=0.8 * tb_per_s * 1e12,
        transcendental_bytes_per_s=0.8 * tb_per_s * 1e12,
        launch_s=5e-6,
        record_s=12e-6,
        replay_s=12e-6,
        memory_bytes=gib * 2**30,
    )


# Sources: the makers' data sheets (dense bf16 TFLOP/s, TB/s, GiB). "cpu" was measured on two cores of a server CPU.
CATALOGUE: dict[str, Hardware] = {
    "cpu": Hardware(
        name="cpu",
        flops_per_s=100e9,
        bytes_per_s=10e9,
        transcendental_bytes_per_s=3.5e9,
        launch_s=8e-6,
        record_s=20e-6,
        replay_s=20e-6,
    ),
    "h200": _gpu("h200", 989, 4.8, 141),
    "h100": _gpu("h100", 989, 3.35, 80),
    "a100": _gpu("a100", 312, 2.04, 80),
    "l40s": _gpu("l40s", 362, 0.864, 48),
    "rtx4090": _gpu("rtx4090", 165, 1.01, 24),
}


def hardware_named(name: str) -> Hardware:
    """The catalogue's entry for a name such as "h100" or a device's own name ("NVIDIA H100 80GB HBM3").

    Raises ValueError with the known names if there is none.
    """
    text = name.lower().replace(" ", "")
    for key, hardware in CATALOGUE.items():
        if key in text:
            return hardware
    raise ValueError(f"no hardware named {name!r} in the catalogue; known: {', '.join(sorted(CATALOGUE))}")
