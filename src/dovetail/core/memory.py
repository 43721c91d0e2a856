"""Memory budgets and their accounting.

A `Budget` is the memory that the user declares. A `Ledger` accounts for one operator's use of it: every component
(window, cache, block buffer, ...) holds a `Reservation` and resizes it *before* it allocates. The total never exceeds
the budget, and a refused request changes nothing. Not thread-safe: an operator runs in one thread.

Examples
--------
>>> ledger = Ledger(Budget.parse("1MB"))
>>> window = ledger.reserve("window", 600_000)
>>> cache = ledger.reserve("cache")
>>> cache.resize(400_000)
>>> ledger.by_component(), ledger.free_bytes
({'window': 600000, 'cache': 400000}, 0)
>>> cache.grow(1)
Traceback (most recent call last):
dovetail.core.errors.BudgetError: 'cache' asks for 400001 bytes (+1), but 0 B of the budget of 1 MB are free; \
held: window 600 kB, cache 400 kB. Raise the budget to at least 1000001 bytes.
"""

import operator
import re
from dataclasses import dataclass
from decimal import Decimal
from types import TracebackType
from typing import Self

from dovetail.core.errors import BudgetError, InternalError

__all__ = ["Budget", "Ledger", "Reservation", "format_bytes"]

_EXAMPLES = 'Examples: "256MB" (256 * 10**6), "1.5GiB" (1.5 * 2**30), 64 * 2**20.'
_LARGEST_BYTES = 2**63 - 1
_DECIMAL_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_BYTES_PER_UNIT = {unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL_UNITS)} | {
    unit[0].lower() + "ib": 1024**power for power, unit in enumerate(_DECIMAL_UNITS) if power
}
_AMOUNT = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?P<unit>[a-z]*)", re.ASCII | re.IGNORECASE)


def format_bytes(size_bytes: int) -> str:
    """Format for people: decimal units, three significant digits. Rounded: not for a minimum that a user will type
    back.
    """
    scaled, power = float(size_bytes), 0
    # 999.5 would print as 1000; the next unit is shorter.
    while abs(scaled) >= 999.5 and power < len(_DECIMAL_UNITS) - 1:
        scaled, power = scaled / 1000, power + 1
    unit = _DECIMAL_UNITS[power]
    if abs(scaled) >= 99.95:
        return f"{scaled:.0f} {unit}"
    decimals = 1 if abs(scaled) >= 9.995 else 2
    return f"{scaled:.{decimals}f}".rstrip("0").rstrip(".") + f" {unit}"


@dataclass(frozen=True, slots=True)
class Budget:
    """A declared amount of memory: a positive integer number of bytes."""

    total_bytes: int

    def __post_init__(self) -> None:
        if isinstance(self.total_bytes, bool) or not isinstance(self.total_bytes, int):
            raise _unreadable(self.total_bytes, "total_bytes must be an integer number of bytes")
        _refuse_impossible(self.total_bytes, written=self.total_bytes)

    def __str__(self) -> str:
        return format_bytes(self.total_bytes)

    @classmethod
    def parse(cls, value: "str | float | Budget") -> "Budget":
        """Parse a budget as users write it; a `BudgetError` says why a value is refused.

        A number of bytes, or text: a number and a unit, B, kB to EB (powers of 1000) or KiB to EiB (powers of 1024).
        Case and a space before the unit do not matter. Text without a unit is a number of bytes. Fractions of a byte
        are dropped.

        >>> [Budget.parse(text).total_bytes for text in ("256MB", "1.5GiB", "64 MiB", "4096")]
        [256000000, 1610612736, 67108864, 4096]
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, str):
            return cls(_bytes_of_text(value))
        return cls(_bytes_of_number(value))

    @classmethod
    def percent_of(cls, whole_bytes: int, percent: float) -> "Budget":
        """A percentage of a known size, such as 1 % of a relation's bytes; at least one byte."""
        if not (percent > 0 and whole_bytes > 0):
            raise _unreadable(f"{percent}% of {whole_bytes} bytes", "both must be more than zero")
        return cls(max(1, int(Decimal(whole_bytes) * Decimal(repr(float(percent))) / 100)))

    def split(self, parts: int) -> "Budget":
        """Divide the budget into equal parts, rounded down."""
        if not 0 < parts <= self.total_bytes:
            raise BudgetError(
                f"A budget of {self.total_bytes} bytes cannot be split into {parts} parts of at least one byte."
            )
        return Budget(self.total_bytes // parts)

    def require(self, minimum_bytes: int, purpose: str) -> None:
        """Raise `BudgetError` below this minimum (inclusive). `purpose` is the subject of the message: what needs the
        memory.
        """
        if self.total_bytes < minimum_bytes:
            raise BudgetError(
                f"A budget of {self.total_bytes} bytes is too small: {purpose} needs at least "
                f"{minimum_bytes} bytes ({format_bytes(minimum_bytes)}).",
                minimum_bytes=minimum_bytes,
            )


def _unreadable(value: object, reason: str) -> BudgetError:
    return BudgetError(f"budget={value!r}: {reason}.", hint=_EXAMPLES)


def _refuse_impossible(size_bytes: int, written: object) -> None:
    if size_bytes <= 0:
        raise _unreadable(written, "a budget must be more than zero bytes")
    if size_bytes > _LARGEST_BYTES:
        raise _unreadable(written, "that is more than any machine can address")


def _bytes_of_number(value: object) -> int:
    if isinstance(value, bool):
        raise _unreadable(value, "a boolean is not an amount of memory")
    if isinstance(value, float):
        if value != value:
            raise _unreadable(value, "not a number")
        if not value.is_integer():
            raise _unreadable(value, "a number of bytes must be finite and whole")
        return int(value)
    try:
        # Also accepts numpy integers.
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        reason = f"{type(value).__name__} is not an amount of memory; pass a number of bytes or a text"
        raise _unreadable(value, reason) from None


def _bytes_of_text(text: str) -> int:
    stripped = text.strip()
    amount = _AMOUNT.fullmatch(stripped)
    if amount is None:
        raise _unreadable(text, _why_not_an_amount(stripped))
    number, unit = Decimal(amount["number"]), amount["unit"]
    if not unit and number != int(number):
        raise _unreadable(text, "a number without a unit is in bytes and must be whole")
    bytes_per_unit = _BYTES_PER_UNIT.get(unit.lower() or "b")
    if bytes_per_unit is None:
        raise _unreadable(text, _why_unknown_unit(unit))
    size_bytes = int(number * bytes_per_unit)
    if size_bytes == 0 and number > 0:
        raise _unreadable(text, "that is less than one byte")
    _refuse_impossible(size_bytes, written=text)
    return size_bytes


def _why_not_an_amount(stripped: str) -> str:
    if not stripped:
        return "it is empty"
    if "%" in stripped:
        return (
            "a percentage is not an amount; it does not say of what, and a relation that grows would silently "
            "take more memory"
        )
    if stripped.startswith("-"):
        return "a budget must be more than zero bytes"
    if stripped.lower() in ("nan", "inf", "infinity", "unlimited", "none"):
        return "a budget must be a finite amount, declared before the work starts"
    if "," in stripped:
        return "use a decimal point, and no thousands separators"
    return "this is not a number followed by a unit"


def _why_unknown_unit(unit: str) -> str:
    if len(unit) == 1 and unit.lower() + "b" in _BYTES_PER_UNIT:
        prefix = "k" if unit in "kK" else unit.upper()
        return f"{unit!r} could mean {prefix}B (powers of 1000) or {prefix.upper()}iB (powers of 1024); write one"
    return f"{unit!r} is not a unit of memory"


class Reservation:
    """The memory that one component holds in a `Ledger`; as a context manager, until the end of the block."""

    __slots__ = ("_held_bytes", "_ledger", "name")

    def __init__(self, ledger: "Ledger", name: str) -> None:
        self._ledger: Ledger | None = ledger
        self._held_bytes = 0
        self.name = name

    @property
    def held_bytes(self) -> int:
        """0 after `release`."""
        return self._held_bytes

    def resize(self, size_bytes: int) -> None:
        """Hold exactly `size_bytes`; a `BudgetError`, and no change, if the total would exceed the budget."""
        if self._ledger is None:
            raise InternalError(f"Reservation {self.name!r} was released and cannot be resized.")
        if size_bytes < 0:
            raise InternalError(f"Reservation {self.name!r} cannot hold {size_bytes} bytes.")
        self._ledger._account(self, size_bytes - self._held_bytes)
        self._held_bytes = size_bytes

    def grow(self, extra_bytes: int) -> None:
        """Raises like `resize`."""
        self.resize(self._held_bytes + extra_bytes)

    def shrink(self, fewer_bytes: int) -> None:
        self.resize(self._held_bytes - fewer_bytes)

    def release(self) -> None:
        """Release all memory and leave the ledger. Calling it again does nothing."""
        if self._ledger is not None:
            self.resize(0)
            self._ledger._forget(self)
            self._ledger = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Reservation({self.name!r}, held_bytes={self._held_bytes})"


class Ledger:
    """The account of one budget: which component holds how much of it."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._reservations: dict[str, Reservation] = {}
        self._held_bytes = 0
        self._peak_bytes = 0

    @property
    def budget(self) -> Budget:
        return self._budget

    @property
    def held_bytes(self) -> int:
        """Bytes held by all components."""
        return self._held_bytes

    @property
    def free_bytes(self) -> int:
        return self._budget.total_bytes - self._held_bytes

    @property
    def peak_bytes(self) -> int:
        """The largest total that was held at any time."""
        return self._peak_bytes

    def by_component(self) -> dict[str, int]:
        """Bytes held per component, in order of reservation. The sum is `held_bytes`."""
        return {name: reservation.held_bytes for name, reservation in self._reservations.items()}

    def has_room_for(self, extra_bytes: int) -> bool:
        return extra_bytes <= self.free_bytes

    def reserve(self, name: str, size_bytes: int = 0) -> Reservation:
        """Add a component. Raises `BudgetError`, and adds nothing, if not enough is free."""
        if name in self._reservations:
            raise InternalError(f"This ledger already has a component {name!r}.")
        reservation = Reservation(self, name)
        reservation.resize(size_bytes)
        self._reservations[name] = reservation
        return reservation

    def resize(self, budget: Budget) -> None:
        """Replace the budget. Refused if more than the new budget is held."""
        if budget.total_bytes < self._held_bytes:
            raise BudgetError(
                f"The budget cannot shrink to {budget.total_bytes} bytes: {self._held_bytes} bytes are held "
                f"({self._holders()}).",
                hint=f"Shrink to {self._held_bytes} bytes or more, or release some first.",
                minimum_bytes=self._held_bytes,
            )
        self._budget = budget

    def __repr__(self) -> str:
        return f"Ledger(budget={self._budget}, held={format_bytes(self._held_bytes)}: {self._holders()})"

    def _account(self, reservation: Reservation, change_bytes: int) -> None:
        wanted_bytes = self._held_bytes + change_bytes
        # Shrinking must always succeed, so that cleanup after an error works.
        if change_bytes > 0 and wanted_bytes > self._budget.total_bytes:
            raise BudgetError(
                f"{reservation.name!r} asks for {reservation.held_bytes + change_bytes} bytes "
                f"(+{change_bytes}), but {format_bytes(self.free_bytes)} of the budget of {self._budget} "
                f"are free; held: {self._holders()}.",
                hint=f"Raise the budget to at least {wanted_bytes} bytes.",
                minimum_bytes=wanted_bytes,
            )
        self._held_bytes = wanted_bytes
        self._peak_bytes = max(self._peak_bytes, wanted_bytes)

    def _forget(self, reservation: Reservation) -> None:
        del self._reservations[reservation.name]

    def _holders(self) -> str:
        held = [f"{name} {format_bytes(size)}" for name, size in self.by_component().items()]
        return ", ".join(held) or "nothing"
