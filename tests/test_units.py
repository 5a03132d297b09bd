"""Sizes and budgets: what is read, what is refused, and that what is printed reads back."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memopt.errors import BudgetError
from memopt.units import format_bytes, format_bytes_up, parse_budget, parse_bytes

GiB = 1024**3
MAX_BYTES = 64 * 1024**4

sizes = st.integers(1, MAX_BYTES)
shown_sizes = st.one_of(
    sizes, st.integers(1, 4096), st.builds(lambda k, d: 1024**k + d, st.integers(1, 4), st.integers(-9, 9))
)


def reference_reading(size: int | str) -> int:
    """The reading that the library must agree with on all that it accepts."""
    if isinstance(size, bool):
        raise ValueError(size)
    if isinstance(size, int):
        num_bytes = size
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([KMGT]i?)?B\s*", str(size))
        if not match:
            raise ValueError(size)
        exponent = "KMGT".index(match[2][0]) + 1 if match[2] else 0
        num_bytes = int(float(match[1]) * ((1024 if match[2] and match[2].endswith("i") else 1000) ** exponent))
    if num_bytes <= 0:
        raise ValueError(size)
    return num_bytes


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        ("8GiB", 8_589_934_592),
        ("8GB", 8_000_000_000),
        ("8 GiB", 8_589_934_592),
        (" 8GiB\t", 8_589_934_592),
        ("0.5GiB", 536_870_912),
        (".5GiB", 536_870_912),
        ("512MiB", 536_870_912),
        ("1e3MB", 1_000_000_000),
        ("1024KiB", 1_048_576),
        ("24TB", 24_000_000_000_000),
        ("2TiB", 2 * 1024**4),
        ("17B", 17),
        ("1.9B", 1),
        (123456, 123456),
        (1, 1),
    ],
)
def test_sizes_are_read(size, num_bytes):
    assert parse_bytes(size) == num_bytes == reference_reading(size)


REFUSED = [
    *(
        "8",
        "8G",
        "8Gb",
        "8gib",
        "8gB",
        "8KIB",
        "8iB",
        "8PiB",
        "",
        " ",
        "B",
        "GiB",
        ".GiB",
        "8.GiB",
        "1,5GiB",
        "8_0GiB",
        "8 G iB",
    ),
    *(
        "abc",
        "-1GiB",
        "+1GiB",
        "0GiB",
        "0.0B",
        "0.4B",
        "8GiB2",
        "nan GB",
        "nanB",
        "infB",
        "1e400B",
        "1e-3GB",
        "1E3MB",
        "64000MiBGiB",
    ),
    *("8GiB 8GiB", "\u0668GiB", "80%", "min", "9" * 5000, "9" * 5000 + "GiB"),
    *(0, -5, True, False, 8.0, float("nan"), float("inf"), None, b"8GiB", ["8GiB"]),
]


@pytest.mark.parametrize("size", REFUSED, ids=lambda size: repr(size)[:20])
def test_what_is_no_size_is_refused_with_the_text_repeated(size):
    with pytest.raises(BudgetError) as refusal:
        parse_bytes(size)
    assert repr(size) in str(refusal.value)
    assert '"24GiB"' in str(refusal.value)


@given(st.one_of(st.from_regex(r"\A\s?[0-9.]{1,6}(e[0-9]{1,3})?\s?([KMGT]?i?)?[Bb]?\s?\Z"), st.text(max_size=8)))
def test_agrees_with_the_reference_reading(size):
    try:
        expected = reference_reading(size)
    except (ValueError, OverflowError):
        expected = None
    if expected is None:
        with pytest.raises(BudgetError):
            parse_bytes(size)
    else:
        assert parse_bytes(size) == expected


@given(st.integers(1, 10**6), st.sampled_from("KMGT"))
def test_binary_units_are_larger_than_decimal_ones(number, prefix):
    assert parse_bytes(f"{number}{prefix}iB") > parse_bytes(f"{number}{prefix}B")


@given(
    st.integers(1, 10**9),
    st.integers(1, 10**9),
    st.sampled_from(["B", "KB", "KiB", "MB", "MiB", "GB", "GiB", "TB", "TiB"]),
)
def test_larger_numbers_are_more_bytes(one, other, unit):
    assert (one < other) == (parse_bytes(f"{one}{unit}") < parse_bytes(f"{other}{unit}"))


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (17, "17 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (512 * 1024**2, "512.0 MiB"),
        (6 * GiB, "6.00 GiB"),
        (GiB - 1, "1.00 GiB"),
        (-1536, "-1.50 KiB"),
        (5000 * 1024**4, "5000.0 TiB"),
    ],
)
def test_bytes_are_printed_in_the_unit_that_fits(num_bytes, text):
    assert format_bytes(num_bytes) == text


@given(shown_sizes)
def test_what_is_printed_reads_back_within_half_a_percent(num_bytes):
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= 0.005 * num_bytes + 1


@given(shown_sizes)
def test_what_is_printed_rounded_up_reads_back_as_enough_and_hardly_more(num_bytes):
    assert num_bytes <= parse_bytes(format_bytes_up(num_bytes)) <= 1.01 * num_bytes


@given(shown_sizes, shown_sizes)
def test_more_bytes_never_print_as_fewer(one, other):
    fewer, more = sorted((one, other))
    assert parse_bytes(format_bytes(fewer)) <= parse_bytes(format_bytes(more))


@pytest.mark.parametrize(
    ("budget", "num_bytes"),
    [("80%", 80), (" 12.5 %", 12), ("29%", 29), ("100%", 100), (".5e0B", None), ("24GiB", 24 * GiB), (7, 7)],
)
def test_budgets_are_sizes_or_shares_of_the_device(budget, num_bytes):
    if num_bytes is None:
        with pytest.raises(BudgetError):
            parse_budget(budget, 100)
    else:
        assert parse_budget(budget, 100) == num_bytes


@pytest.mark.parametrize(
    "budget", ["0%", "101%", "-5%", "%", "80", "80 percent", "1e1%", "nan%", "0.5%", "min", True, 0, None]
)
def test_what_is_no_budget_is_refused_with_the_text_repeated(budget):
    with pytest.raises(BudgetError, match=re.escape(repr(budget))):
        parse_budget(budget, 100)


def test_a_share_of_an_unknown_device_is_refused():
    with pytest.raises(BudgetError, match=r"'80%' of an unknown device"):
        parse_budget("80%", None)
    assert parse_budget("1KiB", None) == 1024


@given(sizes, st.integers(1, 99))
def test_a_larger_share_is_never_fewer_bytes(device_bytes, percent):
    device_bytes += 100
    smaller, larger = (parse_budget(f"{share}%", device_bytes) for share in (percent, percent + 1))
    assert smaller <= larger <= device_bytes
    assert smaller == device_bytes * percent // 100
