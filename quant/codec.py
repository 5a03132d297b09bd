"""8-bit codes for optimizer states: blocks of 256 elements that share a float32 scale.

[Note: Companding] A signed state is sign * (c / 127)^2 * max and a non-negative one (c / 255)^4 * max of its block:
what is small beside the block's maximum keeps relative precision, as Adam's quotient needs it. A second moment is about
the square of a first one, and the fourth power is the square of the square: small elements of both fade together.

[Note: Fixed point] encode(decode(codes)) gives the same codes and scales, so that a checkpoint in float32 resumes bit
for bit. The scale is max / 127^2 by a division: times 127^2 and divided again it is the same for every mantissa.

[Note: Rounding] A first moment rounds to the next code; of a second moment, whose square root counts, 1.015 units of it
already get code 2 rather than 1. So whatever an element's share of its block, the quotient of the two is at most 1.8
times too large. A second moment that is not zero never becomes zero: a zero under a non-zero first moment would make
the update explode.

[Note: Accumulators] A state that only grows, by steps far below the distance of two codes, would stop growing. It
rounds up as often as the increment's share of that distance says; the dice are a hash of the block's own bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from memopt.quant.sizes import BLOCK, num_blocks

VERSION = 1

_SIGNED_TOP = 127.0**2
_POSITIVE_TOP = float(torch.tensor(255.0).square().square())  # 255^4 as float32 has it, in the order of `decode`
_LEAST_SCALE = 2.0**-126  # the smallest normal float32
_SIGNED_ROUND = 0.4975  # just below a half: see [Note: Rounding], and 1/127 of the maximum bounds every error
_POSITIVE_SHIFT = 1.235
_HASH = 2654435761  # Knuth's multiplicative hash


class Codec(Enum):
    """How a state's elements become codes."""

    SIGNED = "signed"  # int8
    NON_NEGATIVE = "non-negative"  # uint8
    ACCUMULATOR = "accumulator"  # uint8, of a state that never falls

    @property
    def dtype(self) -> torch.dtype:
        return torch.int8 if self is Codec.SIGNED else torch.uint8


@dataclass(slots=True)
class Coded:
    """One state in 8 bits.

    Attributes:
        codes: int8 or uint8, one for each element in the order of the parameter's memory.
        scales: float32 of shape [blocks, 1].
    """

    codec: Codec
    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, codec: Codec, numel: int, device: torch.device | str = "cpu") -> Coded:
        codes = torch.empty(numel, dtype=codec.dtype, device=device)
        return cls(codec, codes, torch.empty(num_blocks(numel), 1, device=device))

    def part(self, start: int, stop: int) -> Coded:
        """A view of the elements from `start`, a multiple of BLOCK."""
        return Coded(self.codec, self.codes[start:stop], self.scales[start // BLOCK : num_blocks(stop)])


def decode(coded: Coded, out: torch.Tensor, spare: torch.Tensor) -> None:
    """Fill the first elements of `out` (float32, whole blocks long) with the state; what pads the last block is zero.

    `spare` is float32 memory of the same length.
    """
    _fill(out, coded.codes)
    if coded.codec is Codec.SIGNED:
        out.mul_(torch.abs(out, out=spare))
    else:
        out.square_().square_()
    out.view(-1, BLOCK).mul_(coded.scales)


def encode(x: torch.Tensor, into: Coded, spare: torch.Tensor) -> None:
    """Write `x` (float32, finite, whole blocks long, zero where it pads the last block) as codes and scales.

    `spare` is float32 memory of the same length; `x` is left as it is.
    """
    if into.codec is Codec.SIGNED:
        _encode_signed(x, into, spare)
    else:
        _encode_non_negative(x, into, spare)


# Calls count here: each costs as much as thousands of elements.


def _encode_signed(x: torch.Tensor, into: Coded, spare: torch.Tensor) -> None:
    torch.abs(x, out=spare)
    blocks, scales = spare.view(-1, BLOCK), into.scales
    torch.amax(blocks, 1, True, out=scales)
    scales.div_(_SIGNED_TOP).clamp_min_(_LEAST_SCALE)
    blocks.div_(scales)
    spare.sqrt_().add_(_SIGNED_ROUND).copysign_(x)
    into.codes.copy_(_first(spare, into.codes))  # towards zero


def _encode_non_negative(x: torch.Tensor, into: Coded, spare: torch.Tensor) -> None:
    values, blocks, scales = x.view(-1, BLOCK), spare.view(-1, BLOCK), into.scales
    torch.amax(values, 1, True, out=scales)
    scales.div_(_POSITIVE_TOP).clamp_min_(_LEAST_SCALE)
    torch.div(values, scales, out=blocks)
    spare.sqrt_()
    if into.codec is Codec.ACCUMULATOR:
        dice = _dice(x)
        blocks.sub_(3 * dice * (1 - dice)).clamp_min_(0).sqrt_().add_(dice).clamp_min_(1)
    else:
        spare.add_(_POSITIVE_SHIFT).sqrt_().add_(0.5)
    into.codes.copy_(_first(spare, into.codes))
    if float(x.min()) == 0:
        into.codes.mul_((_first(x, into.codes) > 0).view(torch.uint8))


def _first(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return x if len(x) == len(codes) else x[: len(codes)]


def _fill(out: torch.Tensor, values: torch.Tensor) -> None:
    if len(out) == len(values):
        out.copy_(values)
    else:
        out[: len(values)].copy_(values)
        out[len(values) :].zero_()


def _dice(x: torch.Tensor) -> torch.Tensor:
    """A number between 0 and 1 for each block, as a column, that any change of the block changes."""
    bits = x.view(torch.int32).view(-1, BLOCK).sum(1, keepdim=True)
    return ((bits * _HASH >> 16) & 511).to(torch.float32).add_(0.5).div_(512)
