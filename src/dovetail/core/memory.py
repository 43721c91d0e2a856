"""Declared bytes and accounted bytes.

A `Budget` is what the user declares. A `Ledger` is one operator's account of it: every component (window,
cache, block buffer, ...) holds a `Reservation` there and resizes it *before* it allocates, so the sum never
exceeds the budget and a refusal leaves everything as it was. Not thread-safe: an operator runs in one thread.

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
dovetail.errors.BudgetError: 'cache' asks for 400001 bytes (+1), but 0 B of the budget of 1 MB are free; \
held: window 600 kB, cache 400 kB. Raise the budget to at least 1000001 bytes.
"""

import operator
import re
from dataclasses import dataclass
from decimal import Decimal
from types import TracebackType
from typing import Self

from dovetail.errors import BudgetError, InternalError

__all__ = ["Budget", "Ledger", "Reservation", "format_bytes"]

_EXAMPLES = 'Examples: "256MB" (256 * 10**6), "1.5GiB" (1.5 * 2**30), 64 * 2**20.'
_LARGEST_BYTES = 2**63 - 1
_DECIMAL_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_BYTES_PER_UNIT = {unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL_UNITS)} | {
    unit[0].lower() + "ib": 1024**power for power, unit in enumerate(_DECIMAL_UNITS) if power
}
_AMOUNT = re.compile(r"(?P<number>\d+(?:\.\d+)?|\.\d+)\s*(?P<unit>[a-z]*)", re.ASCII | re.IGNORECASE)


def format_bytes(size_bytes: int) -> str:
    """Write an amount of memory for people: decimal units, three significant digits.

    Rounded, so not for a minimum that somebody is going to type back.

    Examples
    --------
    >>> [format_bytes(size) for size in (0, 999, 1_500_000, 64 * 2**20, -2000)]
    ['0 B', '999 B', '1.5 MB', '67.1 MB', '-2 kB']
    """
    scaled, power = float(size_bytes), 0
    # 999.5 would print as 1000, which the next unit says shorter.
    while abs(scaled) >= 999.5 and power < len(_DECIMAL_UNITS) - 1:
        scaled, power = scaled / 1000, power + 1
    unit = _DECIMAL_UNITS[power]
    if abs(scaled) >= 99.95:
        return f"{scaled:.0f} {unit}"
    decimals = 1 if abs(scaled) >= 9.995 else 2
    return f"{scaled:.{decimals}f}".rstrip("0").rstrip(".") + f" {unit}"


@dataclass(frozen=True, slots=True)
class Budget:
    """An amount of memory that somebody declared: a whole, positive number of bytes.

    Examples
    --------
    >>> Budget(64 * 2**20).total_bytes
    67108864
    >>> str(Budget.parse("1.5GB"))
    '1.5 GB'
    >>> Budget(0)
    Traceback (most recent call last):
    dovetail.errors.BudgetError: budget=0: a budget is more than zero bytes. Examples: "256MB" \
(256 * 10**6), "1.5GiB" (1.5 * 2**30), 64 * 2**20.
    """

    total_bytes: int

    def __post_init__(self) -> None:
        if isinstance(self.total_bytes, bool) or not isinstance(self.total_bytes, int):
            raise _unreadable(self.total_bytes, "total_bytes is a whole number of bytes")
        _refuse_impossible(self.total_bytes, written=self.total_bytes)

    def __str__(self) -> str:
        return format_bytes(self.total_bytes)

    @classmethod
    def parse(cls, value: "str | float | Budget") -> "Budget":
        """Read a budget as users write it.

        Parameters
        ----------
        value
            A number of bytes, or a text of a number and a unit: B, kB, MB, GB, TB, PB, EB (powers of 1000),
            KiB, MiB, GiB, TiB, PiB, EiB (powers of 1024); case does not matter, nor a space between them. A
            text without a unit counts bytes. Parts of a byte are dropped.

        Raises
        ------
        BudgetError
            For anything else; the message says why and gives examples.

        Examples
        --------
        >>> [Budget.parse(text).total_bytes for text in ("256MB", "1.5GiB", "64 MiB", "4096")]
        [256000000, 1610612736, 67108864, 4096]
        >>> Budget.parse(64 * 2**20).total_bytes
        67108864
        >>> Budget.parse("10%")
        Traceback (most recent call last):
        dovetail.errors.BudgetError: budget='10%': a share is not an amount; it does not say of what, and a \
relation that grows would silently take more memory. Examples: "256MB" (256 * 10**6), "1.5GiB" (1.5 * \
2**30), 64 * 2**20.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, str):
            return cls(_bytes_of_text(value))
        return cls(_bytes_of_number(value))

    @classmethod
    def percent_of(cls, whole_bytes: int, percent: float) -> "Budget":
        """A share of a size that is known now, such as 1 % of a relation's bytes; at least one byte.

        Examples
        --------
        >>> Budget.percent_of(420_000_000, 0.5)
        Budget(total_bytes=2100000)
        """
        if not (percent > 0 and whole_bytes > 0):
            raise _unreadable(f"{percent}% of {whole_bytes} bytes", "both must be more than zero")
        return cls(max(1, int(Decimal(whole_bytes) * Decimal(repr(float(percent))) / 100)))

    def split(self, parts: int) -> "Budget":
        """The equal share of each of ``parts`` holders, rounded down; together they stay within this budget.

        Examples
        --------
        >>> Budget(1000).split(3)
        Budget(total_bytes=333)
        """
        if not 0 < parts <= self.total_bytes:
            raise BudgetError(
                f"A budget of {self.total_bytes} bytes cannot be split into {parts} parts of a byte or more."
            )
        return Budget(self.total_bytes // parts)

    def require(self, minimum_bytes: int, purpose: str) -> None:
        """Refuse a budget below a minimum, naming the minimum.

        Parameters
        ----------
        minimum_bytes
            The smallest budget that is enough (inclusive).
        purpose
            What needs it, as the subject of the sentence: ``"mesh on this relation"``.

        Examples
        --------
        >>> Budget(4096).require(4096, "mesh on this relation")
        >>> Budget(4096).require(80_000, "mesh on this relation")
        Traceback (most recent call last):
        dovetail.errors.BudgetError: A budget of 4096 bytes is too small: mesh on this relation needs at \
least 80000 bytes (80 kB).
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
        raise _unreadable(written, "a budget is more than zero bytes")
    if size_bytes > _LARGEST_BYTES:
        raise _unreadable(written, "that is more than any machine can address")


def _bytes_of_number(value: object) -> int:
    if isinstance(value, bool):
        raise _unreadable(value, "a truth value is not an amount of memory")
    if isinstance(value, float):
        if value != value:
            raise _unreadable(value, "not a number")
        if not value.is_integer():
            raise _unreadable(value, "a number of bytes is finite and whole")
        return int(value)
    try:
        # Takes numpy's integers, too.
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        reason = f"{type(value).__name__} is not an amount of memory; a number of bytes or a text is"
        raise _unreadable(value, reason) from None


def _bytes_of_text(text: str) -> int:
    stripped = text.strip()
    amount = _AMOUNT.fullmatch(stripped)
    if amount is None:
        raise _unreadable(text, _why_not_an_amount(stripped))
    number, unit = Decimal(amount["number"]), amount["unit"]
    if not unit and number != int(number):
        raise _unreadable(text, "a number without a unit counts bytes, and those are whole")
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
            "a share is not an amount; it does not say of what, and a relation that grows would silently "
            "take more memory"
        )
    if stripped.startswith("-"):
        return "a budget is more than zero bytes"
    if stripped.lower() in ("nan", "inf", "infinity", "unlimited", "none"):
        return "a budget is a finite amount, declared before the work starts"
    if "," in stripped:
        return "the decimal mark is a point, and there are no thousands separators"
    return "this is not a number with a unit"


def _why_unknown_unit(unit: str) -> str:
    if len(unit) == 1 and unit.lower() + "b" in _BYTES_PER_UNIT:
        prefix = "k" if unit in "kK" else unit.upper()
        return f"{unit!r} could mean {prefix}B (powers of 1000) or {prefix.upper()}iB (of 1024); write which"
    return f"{unit!r} is not a unit of memory"


class Reservation:
    """One component's part of a `Ledger`; made by `Ledger.reserve`.

    Usable as a context manager that releases at the end.

    Examples
    --------
    >>> ledger = Ledger(Budget(100))
    >>> with ledger.reserve("block", 60) as block:
    ...     block.shrink(20)
    ...     ledger.held_bytes
    40
    >>> ledger.held_bytes, ledger.peak_bytes
    (0, 60)
    """

    __slots__ = ("_held_bytes", "_ledger", "name")

    def __init__(self, ledger: "Ledger", name: str) -> None:
        self._ledger: Ledger | None = ledger
        self._held_bytes = 0
        self.name = name

    @property
    def held_bytes(self) -> int:
        """Bytes that this component holds now; 0 once released."""
        return self._held_bytes

    def resize(self, size_bytes: int) -> None:
        """Hold exactly ``size_bytes`` from now on.

        Raises
        ------
        BudgetError
            If the ledger's sum would exceed its budget. Nothing changes then.
        """
        if self._ledger is None:
            raise InternalError(f"Reservation {self.name!r} was released and cannot be resized.")
        if size_bytes < 0:
            raise InternalError(f"Reservation {self.name!r} cannot hold {size_bytes} bytes.")
        self._ledger._account(self, size_bytes - self._held_bytes)
        self._held_bytes = size_bytes

    def grow(self, extra_bytes: int) -> None:
        """Hold ``extra_bytes`` more; refused like `resize`."""
        self.resize(self._held_bytes + extra_bytes)

    def shrink(self, fewer_bytes: int) -> None:
        """Hold ``fewer_bytes`` less."""
        self.resize(self._held_bytes - fewer_bytes)

    def release(self) -> None:
        """Give everything back and leave the ledger; again is harmless."""
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
    """The account of one budget: who holds how much of it.

    Examples
    --------
    >>> ledger = Ledger(Budget(1000))
    >>> window = ledger.reserve("window", 700)
    >>> ledger.held_bytes, ledger.free_bytes, ledger.has_room_for(301)
    (700, 300, False)
    >>> ledger.resize(Budget(500))
    Traceback (most recent call last):
    dovetail.errors.BudgetError: The budget cannot shrink to 500 bytes: 700 bytes are held (window 700 B). \
Shrink to 700 bytes or more, or release some first.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._reservations: dict[str, Reservation] = {}
        self._held_bytes = 0
        self._peak_bytes = 0

    @property
    def budget(self) -> Budget:
        """The budget that this ledger accounts for."""
        return self._budget

    @property
    def held_bytes(self) -> int:
        """Bytes that all components hold together, now."""
        return self._held_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that nobody holds."""
        return self._budget.total_bytes - self._held_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was ever held together."""
        return self._peak_bytes

    def by_component(self) -> dict[str, int]:
        """Bytes held per component, in the order in which they were reserved; the sum is `held_bytes`."""
        return {name: reservation.held_bytes for name, reservation in self._reservations.items()}

    def has_room_for(self, extra_bytes: int) -> bool:
        """Whether ``extra_bytes`` more would be granted."""
        return extra_bytes <= self.free_bytes

    def reserve(self, name: str, size_bytes: int = 0) -> Reservation:
        """Open a component's account, holding ``size_bytes`` from the start.

        Raises
        ------
        BudgetError
            If there is not that much left; no account is opened then.
        """
        if name in self._reservations:
            raise InternalError(f"This ledger already has a component {name!r}.")
        reservation = Reservation(self, name)
        reservation.resize(size_bytes)
        self._reservations[name] = reservation
        return reservation

    def resize(self, budget: Budget) -> None:
        """Account for another budget from now on; refused if more than that is held."""
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
        # Shrinking is always granted: after an error the way back must stay open.
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
