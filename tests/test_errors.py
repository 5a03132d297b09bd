"""The errors: their families, their messages, and that they cross a process border."""

import copy
import errno
import pickle
from pathlib import Path

import pytest

from memopt.errors import BudgetError, InfeasibleBudgetError, MemoptError, StoreError, UnsupportedError
from memopt.units import parse_bytes

GiB = 1024**3
MiB = 1024**2

INFEASIBLE = InfeasibleBudgetError(
    6 * GiB,
    8_000_000_000,
    {"parameters": 2 * GiB, "states": GiB, "peak at 'layers.11'": 512 * MiB},
    ("give an NVMe path (5.10 GiB)", "allow 8-bit states (6.35 GiB)"),
    device="cuda:0",
)
ERRORS = [
    MemoptError("text"),
    BudgetError("text"),
    INFEASIBLE,
    UnsupportedError("encoder.norm", "its forward writes to an input"),
    StoreError("/disk/run/bucket0", errno.ENOSPC, 16 * MiB),
]


@pytest.mark.parametrize(
    ("error", "family"),
    [
        (BudgetError, ValueError),
        (InfeasibleBudgetError, ValueError),
        (UnsupportedError, ValueError),
        (StoreError, OSError),
    ],
)
def test_every_error_is_a_memopt_error_and_of_its_family(error, family):
    assert issubclass(error, MemoptError)
    assert issubclass(error, family)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy], ids=["pickle", "copy"])
def test_every_error_survives_a_copy(error, copied):
    other = copied(error)
    assert type(other) is type(error)
    assert str(other) == str(error)
    assert vars(other) == vars(error)


def test_infeasible_budget_says_the_numbers_and_the_ways_out():
    assert str(INFEASIBLE) == (
        "no plan fits 6.00 GiB on cuda:0; the smallest found needs 7.46 GiB (parameters 2.00 GiB, states 1.00 GiB, "
        "peak at 'layers.11' 512.0 MiB). Raise the budget to 7.46 GiB, give an NVMe path (5.10 GiB), or allow 8-bit "
        "states (6.35 GiB)."
    )
    assert (INFEASIBLE.budget_bytes, INFEASIBLE.smallest_bytes) == (6 * GiB, 8_000_000_000)
    assert INFEASIBLE.breakdown["states"] == GiB
    assert INFEASIBLE.remedies[1] == "allow 8-bit states (6.35 GiB)"


@pytest.mark.parametrize(
    ("remedies", "advice"),
    [
        ((), "Raise the budget to 2.00 GiB."),
        (("allow offload (1.50 GiB)",), "Raise the budget to 2.00 GiB or allow offload (1.50 GiB)."),
    ],
)
def test_infeasible_budget_reads_well_with_few_remedies(remedies, advice):
    message = str(InfeasibleBudgetError(GiB, 2 * GiB, {}, remedies))
    assert message == f"no plan fits 1.00 GiB; the smallest found needs 2.00 GiB. {advice}"


@pytest.mark.parametrize("smallest_bytes", [6 * GiB + 1, 6 * GiB + 12_345_678, 7_999_999_999])
def test_the_budget_that_the_message_names_is_enough(smallest_bytes):
    message = str(InfeasibleBudgetError(6 * GiB, smallest_bytes, {}))
    assert parse_bytes(message.partition("Raise the budget to ")[2].rstrip(".")) >= smallest_bytes


def test_budgets_that_print_alike_are_told_apart_by_the_byte():
    message = str(InfeasibleBudgetError(6 * GiB - 2, 6 * GiB - 1, {}))
    assert message == (
        "no plan fits 6442450942 B; the smallest found needs 6442450943 B. Raise the budget to 6442450943 B."
    )


def test_unsupported_names_the_part_and_the_reason():
    error = UnsupportedError("encoder.norm", "its forward writes to an input")
    assert (error.part, error.reason) == ("encoder.norm", "its forward writes to an input")
    assert str(error) == "encoder.norm is not supported: its forward writes to an input"


def test_store_error_says_path_errno_and_bytes():
    error = StoreError(Path("/disk/run/bucket0"), errno.ENOSPC, 16 * MiB)
    assert (error.path, error.errno, error.num_bytes) == ("/disk/run/bucket0", errno.ENOSPC, 16 * MiB)
    assert error.filename == "/disk/run/bucket0"
    assert str(error) == (
        "/disk/run/bucket0: No space left on device (ENOSPC) at a request of 16.00 MiB. Free that much there, or give "
        "another path."
    )
    assert "errno 99999" in str(StoreError("/disk", 99999, 1))
