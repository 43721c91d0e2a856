"""Windows: how far apart the event times of joined tuples may be, for all inputs alike or for a pair of them.

All bounds together say, for every ordered pair of inputs, how much later the second may be than the first
(`furthest_apart`). Bounds imply others: where b is at most 5 after a, and c at most 5 after b, c is at most 10 after a.
The same numbers tell when a tuple of an input can no longer match: once the watermark is further ahead than any
other input may be.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args

from dovetail.core.errors import PlanError

__all__ = ["Distances", "LatePolicy", "TimeBound", "TimeWindow", "TupleWindow", "furthest_apart"]

LatePolicy = Literal["drop", "side"]
Distances = tuple[tuple[int | None, ...], ...]
"""Per pair of inputs, the most that the second may be later than the first; None for no bound."""


@dataclass(frozen=True)
class TupleWindow:
    """Joins tuples that arrived within `width` tuples of each other, counted over all inputs (the paper's horizon).

    Examples
    --------
    >>> TupleWindow(10_000).width
    10000
    """

    width: int

    def __post_init__(self) -> None:
        if isinstance(self.width, bool) or not isinstance(self.width, int) or self.width < 1:
            raise PlanError(f"window={self.width!r}: a tuple window is an integer of at least 1.")


@dataclass(frozen=True)
class TimeBound:
    """The time of `right` is from `low` to `high` after that of `left`, both included; None for no bound.

    ``paid BETWEEN ordered AND ordered + INTERVAL 1 HOUR`` is ``TimeBound("orders", "payments", 0, 1 hour)``. Negative
    numbers are before. For an input with an earliest and a latest time, the bound holds from the latest of `left` to
    the earliest of `right`, and from the earliest of `left` to the latest of `right`.

    Examples
    --------
    >>> TimeBound("orders", "payments", 0, timedelta(hours=1)).high
    3600000000
    """

    left: str
    right: str
    low: int | None
    high: int | None

    def __init__(
        self, left: str, right: str, low: int | timedelta | None = None, high: int | timedelta | None = None
    ) -> None:
        if left == right:
            raise PlanError(f"A bound between {left!r} and itself.", hint="Filter that input before the join.")
        for name, value in (("low", low), ("high", high)):
            units = value // timedelta(microseconds=1) if isinstance(value, timedelta) else value
            if units is not None and (isinstance(units, bool) or not isinstance(units, int)):
                raise PlanError(f"{name}={value!r}: a bound between event times is an integer, a timedelta or None.")
            object.__setattr__(self, name, units)
        object.__setattr__(self, "left", left)
        object.__setattr__(self, "right", right)
        if self.low is None and self.high is None:
            raise PlanError(f"A bound between {left!r} and {right!r} without an end.", hint="Pass low=, high= or both.")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise PlanError(f"No time of {right!r} is from {self.low} to {self.high} after one of {left!r}.")

    def describe(self) -> str:
        """The bound as text; snapshots are matched by it."""
        return f"{self.right} from {self.low} to {self.high} after {self.left}"


@dataclass(frozen=True)
class TimeWindow:
    """Joins tuples whose event times are pairwise at most `width` apart, and within the bounds of their pair.

    Parameters
    ----------
    width
        In the units of the time columns; a `timedelta` for timestamps (microseconds). None: only `bounds` apply;
        without any, times only tell which tuples are late.
    columns
        The event-time column: one name for all inputs, or one per input. A pair of names is the earliest and the latest
        time of an input that is itself the result of a join.
    lateness
        How far `MJoin.watermark_reached` stays behind the latest event time.
    late
        What to do with tuples behind the watermark: ``"drop"``, or ``"side"`` to fetch them with `MJoin.take_late`.
    bounds
        Bounds between the times of two inputs. An input whose tuples no bound ends is kept for ever.

    Examples
    --------
    >>> TimeWindow(timedelta(seconds=2), "ts").width
    2000000
    >>> TimeWindow(None, "ts", bounds=[TimeBound("a", "b", 0, 10)]).bounds[0].high
    10
    """

    width: int | None
    columns: str | Mapping[str, str | tuple[str, str]]
    lateness: int = 0
    late: LatePolicy = "drop"
    bounds: tuple[TimeBound, ...] = ()

    def __init__(
        self,
        width: int | timedelta | None,
        columns: str | Mapping[str, str | tuple[str, str]] | None = None,
        lateness: int | timedelta = 0,
        late: LatePolicy = "drop",
        bounds: Sequence[TimeBound] = (),
    ) -> None:
        if columns is None:
            raise PlanError("An event-time window needs a time column.", hint='Pass the name, or {"a": "t1", ...}.')
        for name, value in (("width", width), ("lateness", lateness)):
            units = value // timedelta(microseconds=1) if isinstance(value, timedelta) else value
            is_left_out = units is None and name == "width"
            if not is_left_out and (isinstance(units, bool) or not isinstance(units, int) or units < 0):
                raise PlanError(f"{name}={value!r}: the {name} of a window is an integer of at least 0.")
            object.__setattr__(self, name, units)
        if late not in get_args(LatePolicy):
            raise PlanError(f"late={late!r} is none of {', '.join(get_args(LatePolicy))}.")
        object.__setattr__(self, "columns", columns)
        object.__setattr__(self, "late", late)
        object.__setattr__(self, "bounds", tuple(bounds))

    def columns_of(self, name: str) -> tuple[str, str]:
        """The columns with the earliest and latest time of an input's tuples; usually the same."""
        named = self.columns if isinstance(self.columns, str) else self.columns.get(name)
        if named is None:
            raise PlanError(f"The window names no time column of input {name!r}.", hint="Name one for every input.")
        return (named, named) if isinstance(named, str) else (named[0], named[1])


def furthest_apart(names: Sequence[str], window: TupleWindow | TimeWindow | None) -> Distances | None:
    """For every ordered pair of inputs, the most that the second may be later than the first; None without a window.

    A `PlanError` if a bound names no input, or if no combination of tuples can satisfy all bounds.

    Examples
    --------
    >>> bounds = [TimeBound("a", "b", 0, 5), TimeBound("b", "c", -1, 5)]
    >>> furthest_apart("abc", TimeWindow(None, "ts", bounds=bounds))
    ((0, 5, 10), (0, 0, 5), (1, 1, 0))
    """
    if window is None:
        return None
    apart: list[list[int | None]] = [
        [0 if i == j else window.width for j in range(len(names))] for i in range(len(names))
    ]

    def limit(i: int, j: int, most: int | None) -> None:
        now = apart[i][j]
        if most is not None and (now is None or most < now):
            apart[i][j] = most

    for bound in window.bounds if isinstance(window, TimeWindow) else ():
        for name in (bound.left, bound.right):
            if name not in names:
                raise PlanError(f"A bound names {name!r}; the inputs are {', '.join(names)}.")
        left, right = names.index(bound.left), names.index(bound.right)
        limit(left, right, bound.high)
        limit(right, left, None if bound.low is None else -bound.low)
    for middle in range(len(names)):
        for i in range(len(names)):
            for j in range(len(names)):
                there, on = apart[i][middle], apart[middle][j]
                limit(i, j, None if there is None or on is None else there + on)
    contradicted = [name for i, name in enumerate(names) if (apart[i][i] or 0) < 0]
    if contradicted:
        raise PlanError(
            f"No rows can satisfy the bounds on event times of {', '.join(contradicted)} together.",
            hint="Check the signs of the bounds: each says how much later the second input may be.",
        )
    return tuple(tuple(row) for row in apart)
