"""Numbers of bytes as people write them: read strictly, printed with their unit.

Decimal and binary units differ by 7% at a gigabyte, so nothing is guessed: "24GB" is 24 * 1000**3 bytes, "24GiB" is
24 * 1024**3, and "24G", "24Gb" and "24" are refused.
"""

import math
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

from memopt.errors import BudgetError

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?|\.[0-9]+(?:e[0-9]+)?)\s*(?:([KMGT])(i?))?B\s*")
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*%\s*")
_ACCEPTED_SIZES = (
    'an int of bytes, or a number with B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (1024): "24GiB"'
)


def parse_bytes(size: int | str) -> int:
    """The bytes that `size` says.

    An int is a number of bytes; a text is a number with its unit: "24GiB", "0.5 MB", "1e3MB", "17B". A fraction is
    read as a float and rounded down to a whole byte.

    Raises:
        BudgetError: `size` is not positive, has no unit or an ambiguous one, or is no size at all.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        num_bytes = size
    else:
        match = _SIZE.fullmatch(size) if isinstance(size, str) else None
        if match is None:
            raise BudgetError(f"cannot read {size!r} as a number of bytes; accepted is {_ACCEPTED_SIZES}")
        number, prefix, binary = match.groups()
        unit_bytes = (1024 if binary else 1000) ** (" KMGT".index(prefix) if prefix else 0)
        exact = float(number) * unit_bytes
        if math.isinf(exact):
            raise BudgetError(f"{size!r} is larger than any memory; accepted is {_ACCEPTED_SIZES}")
        num_bytes = int(exact)
    if num_bytes <= 0:
        raise BudgetError(f"{size!r} is not a positive number of bytes; accepted is {_ACCEPTED_SIZES}")
    return num_bytes


def parse_budget(budget: int | str, device_bytes: int | None) -> int:
    """The bytes of a budget that is a size or a share of the device ("80%", rounded down).

    The two budgets that depend on a profile are the caller's: it settles `"min"` and callables before it calls.

    Args:
        budget: what `parse_bytes` accepts, or a percentage above 0 and up to 100.
        device_bytes: the device's memory; None where it is unknown, which leaves percentages without a meaning.

    Raises:
        BudgetError: the budget cannot be read, is not positive, or is a share of an unknown device.
    """
    match = _PERCENT.fullmatch(budget) if isinstance(budget, str) else None
    if match is None:
        try:
            return parse_bytes(budget)
        except BudgetError as error:
            raise BudgetError(f'{error}, or a share of the device: "80%"') from None
    percent = Decimal(match[1])
    if not 0 < percent <= 100:
        raise BudgetError(f"{budget!r} is not a share of the device; accepted is more than 0% and at most 100%")
    if device_bytes is None:
        raise BudgetError(f"{budget!r} of an unknown device is no number of bytes; accepted is {_ACCEPTED_SIZES}")
    num_bytes = int(device_bytes * percent / 100)
    if num_bytes <= 0:
        raise BudgetError(f"{budget!r} of a device of {device_bytes} B is less than one byte")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """The bytes in the binary unit that fits, to the nearest of three digits or more: "6.00 GiB", "512.0 MiB", "17 B".

    What it prints, `parse_bytes` reads back within 0.5%. A negative number (a difference) keeps its sign.
    """
    return _format(num_bytes, round)


def format_bytes_up(num_bytes: int) -> str:
    """As `format_bytes` for what is not negative, rounded up: what a user types to have at least `num_bytes`."""
    return _format(num_bytes, math.ceil)


def _format(num_bytes: int, to_int: Callable[[Fraction], int]) -> str:
    size, sign = abs(num_bytes), "-" if num_bytes < 0 else ""
    if size < 1024:
        return f"{sign}{size} B"
    for exponent, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), start=1):
        hundredths = to_int(Fraction(size * 100, 1024**exponent))
        if hundredths < 100_00:
            return f"{sign}{hundredths // 100}.{hundredths % 100:02} {unit}"
        tenths = to_int(Fraction(size * 10, 1024**exponent))
        if tenths < 1024_0 or unit == "TiB":  # what rounds to 1024 belongs to the next unit
            break
    return f"{sign}{tenths // 10}.{tenths % 10} {unit}"
