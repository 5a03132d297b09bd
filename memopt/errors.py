"""The errors that memopt raises: what happened, the numbers, and what to do.

A mistake of the user's is also a `ValueError`, a failing disk also an `OSError`. All of them survive pickling, so that
one rank or worker process can hand them to another.
"""

import errno as errno_names
import os
from collections.abc import Mapping, Sequence


class MemoptError(Exception):
    """Anything that memopt refuses or fails at; catch it to catch all of them."""


class BudgetError(MemoptError, ValueError):
    """A budget that cannot be read as a number of bytes; the message repeats it and says what is accepted."""


class InfeasibleBudgetError(MemoptError, ValueError):
    """No plan fits the budget.

    Attributes:
        budget_bytes: what was asked for.
        smallest_bytes: the least peak that any plan found reaches under the levers that are allowed.
        breakdown: the bytes of that peak by what they are, in the message's order: `{"parameters": 2255000000, ...}`.
        remedies: other ways out, as imperatives with their outcome: `"give an NVMe path (5.10 GiB)"`. The message
            names raising the budget by itself, first: it does not belong here.
        device: where the budget was to hold, for example `"cuda:0"`; empty if that goes without saying.
    """

    def __init__(
        self,
        budget_bytes: int,
        smallest_bytes: int,
        breakdown: Mapping[str, int],
        remedies: Sequence[str] = (),
        device: str = "",
    ) -> None:
        super().__init__(budget_bytes, smallest_bytes, dict(breakdown), tuple(remedies), device)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes
        self.breakdown = dict(breakdown)
        self.remedies = tuple(remedies)
        self.device = device

    def __str__(self) -> str:
        from memopt.units import format_bytes, format_bytes_up  # units imports BudgetError from here

        budget, smallest = format_bytes(self.budget_bytes), format_bytes_up(self.smallest_bytes)
        if budget == smallest:  # the rounded texts hide the difference
            budget, smallest = f"{self.budget_bytes} B", f"{self.smallest_bytes} B"
        where = f" on {self.device}" if self.device else ""
        parts = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in self.breakdown.items())
        found = f"the smallest found needs {smallest}" + (f" ({parts})" if parts else "")
        return f"no plan fits {budget}{where}; {found}. {_either([f'Raise the budget to {smallest}', *self.remedies])}."


class UnsupportedError(MemoptError, ValueError):
    """Something in the model, the optimizer or the request that memopt does not handle.

    Attributes:
        part: what it is, by its dotted name where it has one.
        reason: why it is not handled, and what would be.
    """

    def __init__(self, part: str, reason: str) -> None:
        super().__init__(part, reason)
        self.part = part
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.part} is not supported: {self.reason}"


class FakeStepError(UnsupportedError):
    """The step can't be followed on fake tensors: it depends on the values of its data, or an op has no fake form."""


class StoreError(MemoptError, OSError):
    """A read, a write or a reservation on disk that failed; the bytes it was about are still where they came from.

    Attributes:
        path: the file or directory (also `filename`, as for any `OSError`).
        errno: the operating system's number, for example `errno.ENOSPC`.
        num_bytes: what the failed request was to transfer or reserve.
    """

    def __init__(self, path: str | os.PathLike[str], errno: int, num_bytes: int) -> None:
        super().__init__(errno, os.strerror(errno), os.fspath(path))
        self.path = os.fspath(path)
        self.num_bytes = num_bytes

    def __str__(self) -> str:
        from memopt.units import format_bytes  # units imports BudgetError from here

        assert self.errno is not None
        name = errno_names.errorcode.get(self.errno, f"errno {self.errno}")
        advice = _DISK_ADVICE.get(self.errno, "")
        return f"{self.path}: {self.strerror} ({name}) at a request of {format_bytes(self.num_bytes)}{advice}"

    def __reduce__(self) -> tuple[type["StoreError"], tuple[str, int | None, int]]:
        # OSError's own would call StoreError(errno, strerror, filename).
        return type(self), (self.path, self.errno, self.num_bytes)


class NonFiniteGradientError(MemoptError, FloatingPointError):
    """A gradient that is NaN, infinite or too large for an 8-bit state; nothing was stepped.

    Attributes:
        part: the parameter's name, or its shape.
    """

    def __init__(self, part: str) -> None:
        super().__init__(part)
        self.part = part

    def __str__(self) -> str:
        return (
            f"the gradient of {self.part} is not finite; the step was not taken. Lower the learning rate, clip, or use "
            'nonfinite="skip" to go on with the next batch.'
        )


_DISK_ADVICE = {
    errno_names.ENOSPC: ". Free that much there, or give another path.",
    errno_names.EDQUOT: ". Raise the quota by that much, or give another path.",
    errno_names.EIO: ". The device itself reports a fault: give a path on another one.",
}


def _either(choices: Sequence[str]) -> str:
    """The choices as one phrase: "a", "a or b", "a, b, or c"."""
    if len(choices) < 3:
        return " or ".join(choices)
    return ", ".join(choices[:-1]) + f", or {choices[-1]}"


class ReplayError(MemoptError, RuntimeError):
    """A tensor that a recomputation reads was changed between forward and backward, where memopt could not see it.

    Plain torch raises alike where autograd saved that tensor. The message says which op reads it.
    """

    def __init__(self, op: str, shape: Sequence[int], what: str) -> None:
        super().__init__(op, tuple(shape), what)
        self.op, self.shape, self.what = op, tuple(shape), what

    def __str__(self) -> str:
        return (
            f"a tensor of shape {list(self.shape)} that the recomputation of {self.op} reads was changed "
            f"after the forward: "
            f"{self.what}. Change it after backward(), or change a copy."
        )
