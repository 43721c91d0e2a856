"""The pattern of a punctuation for one column: a range, or one of several values, bound to the column's type.

Ranges have open, closed or no bounds. Values compare as in Spark. NULL and NaN match nothing, which is safe: a
punctuation that says less is only less useful.
"""

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.arrays import BoolArray
from dovetail.core.errors import PlanError, SchemaError

__all__ = ["BoundRange", "BoundSet", "Closed", "Pattern", "Range", "bind_range", "bind_set", "decoded", "encoded"]

Closed = Literal["both", "left", "right", "neither"]


@dataclass(frozen=True, slots=True)
class Range:
    """The values between two bounds; None means unbounded.

    Parameters
    ----------
    low, high
        The bounds, the lower one first.
    closed
        Which bounds are included: ``"both"``, ``"left"``, ``"right"`` or ``"neither"``.

    Examples
    --------
    >>> print(Range(1, 5, closed="left"))
    [1, 5)
    >>> Range(5, 1)
    Traceback (most recent call last):
    dovetail.core.errors.PlanError: The range from 5 to 1 has its bounds in the wrong order. Pass the lower bound first.
    """

    low: Any = None
    high: Any = None
    closed: Closed = "both"

    def __post_init__(self) -> None:
        if self.closed not in get_args(Closed):
            raise PlanError(f"closed={self.closed!r} is none of {', '.join(get_args(Closed))}.")
        for end in (self.low, self.high):
            if isinstance(end, float) and end != end:
                raise PlanError("A range cannot have NaN as a bound.", hint="Leave the bound out.")
        if self.low is None or self.high is None:
            return
        try:
            is_reversed = self.low > self.high
        except TypeError as error:
            raise PlanError(f"The bounds of a range must have one type, not {self.low!r} and {self.high!r}.") from error
        if is_reversed:
            raise PlanError(
                f"The range from {self.low!r} to {self.high!r} has its bounds in the wrong order.",
                hint="Pass the lower bound first.",
            )
        if self.low == self.high and self.closed != "both":
            raise PlanError(
                f"The range {self} is empty.", hint='Include both bounds (closed="both"), or widen the range.'
            )

    def __str__(self) -> str:
        left = "(" if self.low is None or self.closed in ("right", "neither") else "["
        right = ")" if self.high is None or self.closed in ("left", "neither") else "]"
        return f"{left}{'' if self.low is None else self.low}, {'' if self.high is None else self.high}{right}"


@dataclass(frozen=True, slots=True)
class BoundRange:
    """A range of values of one Arrow type."""

    kind: pa.DataType
    low: Any
    high: Any
    low_is_in: bool
    high_is_in: bool

    def matches(self, column: pa.Array) -> BoolArray:
        """Which values lie in the range."""
        found: BoolArray = np.ones(len(column), np.bool_)
        if self.low is not None:
            compare = pc.greater_equal if self.low_is_in else pc.greater
            found &= _flags(compare(column, pa.scalar(self.low, self.kind)))
        if self.high is not None:
            compare = pc.less_equal if self.high_is_in else pc.less
            found &= _flags(compare(column, pa.scalar(self.high, self.kind)))
        if column.null_count:
            found &= _flags(column.is_valid())
        return found

    def covers(self, other: "Pattern") -> bool:
        """Whether every value that the other matches is in the range."""
        if isinstance(other, BoundSet):
            return bool(self.matches(other.values).all())
        if self.low is not None:
            if other.low is None or other.low < self.low:
                return False
            if other.low == self.low and other.low_is_in and not self.low_is_in:
                return False
        if self.high is not None:
            if other.high is None or other.high > self.high:
                return False
            if other.high == self.high and other.high_is_in and not self.high_is_in:
                return False
        return True

    def union(self, other: "Pattern") -> "Pattern | None":
        """The range of the values of both if they overlap or touch, else None."""
        if isinstance(other, BoundSet):
            return self if self.covers(other) else None
        first, second = (self, other) if _starts_before(self, other) else (other, self)
        if first.high is not None and second.low is not None:
            if second.low > first.high:
                return None
            if second.low == first.high and not (second.low_is_in or first.high_is_in):
                return None
        last = first if _ends_after(first, second) else second
        return BoundRange(self.kind, first.low, last.high, first.low_is_in, last.high_is_in)

    @property
    def nbytes(self) -> int:
        """The approximate size in memory."""
        return 64 + len(str(self.low)) + len(str(self.high))

    def as_dict(self) -> dict[str, Any]:
        ends = encoded(pa.array([self.low, self.high], self.kind))
        return {"ends": ends, "low_is_in": self.low_is_in, "high_is_in": self.high_is_in}

    def as_value(self) -> Range:
        """The pattern as a user would write it."""
        closed: dict[tuple[bool, bool], Closed] = {
            (True, True): "both", (True, False): "left", (False, True): "right", (False, False): "neither",
        }  # fmt: skip
        return Range(
            self.low, self.high, closed[self.low_is_in or self.low is None, self.high_is_in or self.high is None]
        )


@dataclass(frozen=True, slots=True)
class BoundSet:
    """One of several values of one Arrow type, without duplicates."""

    values: pa.Array

    def matches(self, column: pa.Array) -> BoolArray:
        if pa.types.is_floating(column.type):
            column = pc.add(column, pa.scalar(0.0, column.type))  # one zero
        if len(self.values) == 1:
            return _flags(pc.equal(column, self.values[0]))
        return _flags(pc.is_in(column, value_set=self.values))

    def covers(self, other: "Pattern") -> bool:
        return isinstance(other, BoundSet) and bool(self.matches(other.values).all())

    def union(self, other: "Pattern") -> "Pattern | None":
        """The values of both; None if the other is a range that does not contain them all."""
        if isinstance(other, BoundRange):
            return other.union(self)
        return BoundSet(pa.concat_arrays([self.values, other.values]).unique())

    @property
    def nbytes(self) -> int:
        return 64 + int(self.values.get_total_buffer_size())

    def as_dict(self) -> dict[str, Any]:
        return {"values": encoded(self.values)}

    def as_value(self) -> Any:
        return self.values[0].as_py() if len(self.values) == 1 else self.values.to_pylist()


Pattern = BoundRange | BoundSet


def bind_range(written: Range, kind: pa.DataType, where: str) -> BoundRange:
    """Bind a range to a column's type; refused if a bound has another type."""
    low, high = (None if end is None else _values([end], kind, where)[0].as_py() for end in (written.low, written.high))
    return BoundRange(kind, low, high, written.closed in ("both", "left"), written.closed in ("both", "right"))


def bind_set(written: Iterable[Any] | pa.Array, kind: pa.DataType, where: str) -> BoundSet:
    """Bind values to a column's type; refused if there is none, or one is NULL or has another type."""
    values = _values(written, kind, where)
    if len(values) == 0:
        raise PlanError(f"The punctuation on {where} names no value.", hint="Name one, or leave the column out.")
    if values.null_count or (pa.types.is_floating(kind) and _flags(pc.is_nan(values)).any()):
        raise PlanError(f"The punctuation on {where} names NULL or NaN, which match nothing.")
    if pa.types.is_floating(kind):
        values = pc.add(values, pa.scalar(0.0, kind))
    return BoundSet(values.unique() if len(values) > 1 else values)


def pattern_of(described: dict[str, Any]) -> Pattern:
    """The inverse of `as_dict` of a pattern."""
    if "values" in described:
        return BoundSet(decoded(described["values"]))
    ends = decoded(described["ends"])
    low, high = ends.to_pylist()
    return BoundRange(ends.type, low, high, described["low_is_in"], described["high_is_in"])


def encoded(values: pa.Array) -> str:
    """An array as text: an Arrow stream in base64."""
    sink = pa.BufferOutputStream()
    batch = pa.record_batch([values], names=["values"])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return base64.b64encode(sink.getvalue().to_pybytes()).decode("ascii")


def decoded(text: str) -> pa.Array:
    """The inverse of `encoded`.

    Examples
    --------
    >>> decoded(encoded(pa.array(["a", None]))).to_pylist()
    ['a', None]
    """
    return pa.ipc.open_stream(base64.b64decode(text)).read_next_batch().column(0)


def _flags(verdict: pa.Array) -> BoolArray:
    flags: BoolArray = verdict.fill_null(False).to_numpy(zero_copy_only=False)
    return flags


def _starts_before(one: BoundRange, other: BoundRange) -> bool:
    if one.low is None or other.low is None:
        return one.low is None
    return bool(one.low < other.low or (one.low == other.low and one.low_is_in))


def _ends_after(one: BoundRange, other: BoundRange) -> bool:
    if one.high is None or other.high is None:
        return one.high is None
    return bool(one.high > other.high or (one.high == other.high and one.high_is_in))


# ---------------------------------------------------------------- types

_PYTHON: tuple[tuple[Any, tuple[type, ...]], ...] = (
    (pa.types.is_boolean, (bool,)),
    (pa.types.is_integer, (int,)),
    (pa.types.is_floating, (int, float)),
    (pa.types.is_decimal, (int, Decimal)),
    (pa.types.is_string, (str,)),
    (pa.types.is_large_string, (str,)),
    (pa.types.is_binary, (bytes,)),
    (pa.types.is_large_binary, (bytes,)),
    (pa.types.is_timestamp, (datetime,)),
    (pa.types.is_date, (date,)),
)


def _values(written: Iterable[Any] | pa.Array, kind: pa.DataType, where: str) -> pa.Array:
    if isinstance(written, pa.ChunkedArray):
        written = written.combine_chunks()
    if isinstance(written, pa.Array):
        if written.type != kind:
            raise SchemaError(f"The punctuation on {where} has {written.type} values; the column is {kind}.")
        return written
    values = [value.as_py() if isinstance(value, pa.Scalar) else value for value in written]
    allowed = next((types for is_kind, types in _PYTHON if is_kind(kind)), None)
    if allowed is None:
        raise SchemaError(f"The column {where} is {kind}, which a punctuation cannot compare.")
    for value in values:
        is_wrong = value is not None and (
            not isinstance(value, allowed)
            or (isinstance(value, bool) and bool not in allowed)
            or (isinstance(value, datetime) and datetime not in allowed)
        )
        if is_wrong:
            raise SchemaError(
                f"The punctuation on {where} has the value {value!r} of type {type(value).__name__}; the column is "
                f"{kind}.",
                hint="Write the value in the column's type.",
            )
    try:
        return pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise SchemaError(f"The punctuation on {where} has a value that is no {kind}: {error}.") from error
