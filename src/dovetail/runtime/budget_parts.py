"""Error messages of a task whose part of the budget is too small; the user declared the whole budget."""

from collections.abc import Iterator
from contextlib import contextmanager

from dovetail.core.errors import BudgetError

__all__ = ["part_of_budget"]


@contextmanager
def part_of_budget(parts: int) -> Iterator[None]:
    """Make a `BudgetError` name the whole budget needed, not this part.

    Examples
    --------
    >>> with part_of_budget(2):
    ...     raise BudgetError("One row does not fit.", hint="Raise the budget to 40 bytes.", minimum_bytes=40)
    Traceback (most recent call last):
    dovetail.core.errors.BudgetError: One row does not fit. The budget is divided into 2 parts: raise it to at least \
80 bytes.
    """
    try:
        yield
    except BudgetError as error:
        if parts <= 1 or error.minimum_bytes is None:
            raise
        needed = parts * error.minimum_bytes
        raise BudgetError(
            error.message,
            hint=f"The budget is divided into {parts} parts: raise it to at least {needed} bytes.",
            minimum_bytes=needed,
        ) from error
