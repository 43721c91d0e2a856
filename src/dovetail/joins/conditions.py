"""Conditions between columns of a stream tuple and a relation row, beyond the equality of their keys.

A condition is evaluated on many pairs at once: two record batches of the same length, pair i being row i of both. Its
result is true only if it is certainly true: a comparison with NULL is not. Floating-point numbers compare as in Spark:
NaN equals NaN and is above every other number.

The same condition objects serve as the residual of an equality join and, with ``mesh``, as the whole condition.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.arrays import BoolArray
from dovetail.core.errors import PlanError

__all__ = ["AllOf", "BatchPredicate", "Comparison", "Condition", "Range"]

ComparisonOperator = Literal["<", "<=", "=", "!=", ">=", ">"]
_OPERATORS = ("<", "<=", "=", "!=", ">=", ">")


class Condition(Protocol):
    """The interface of conditions."""

    def columns(self, stream: pa.Schema, relation: pa.Schema) -> tuple[list[str], list[str]]:
        """The columns it reads of each side; a `PlanError` if one is missing or has a wrong type."""

    def mask(self, stream: pa.RecordBatch, relation: pa.RecordBatch) -> BoolArray:
        """Which pairs satisfy it. The batches hold at least the columns it reads."""

    def describe(self) -> str:
        """The condition as text; snapshots are matched by it."""


@dataclass(frozen=True)
class Comparison:
    """A stream column compared with a relation column.

    Examples
    --------
    >>> stream, relation = pa.record_batch({"price": [5, 9]}), pa.record_batch({"limit": [7, 7]})
    >>> Comparison("price", "<=", "limit").mask(stream, relation).tolist()
    [True, False]
    """

    stream_column: str
    operator: ComparisonOperator
    relation_column: str

    def __post_init__(self) -> None:
        if self.operator not in _OPERATORS:
            raise PlanError(f"{self.operator!r} is not a comparison.", hint=f"Use one of {', '.join(_OPERATORS)}.")

    def columns(self, stream: pa.Schema, relation: pa.Schema) -> tuple[list[str], list[str]]:
        """See `Condition.columns`."""
        _require_comparable(self, stream, self.stream_column, relation, self.relation_column)
        return [self.stream_column], [self.relation_column]

    def mask(self, stream: pa.RecordBatch, relation: pa.RecordBatch) -> BoolArray:
        """See `Condition.mask`."""
        return compare(stream.column(self.stream_column), self.operator, relation.column(self.relation_column))

    def describe(self) -> str:
        """See `Condition.describe`."""
        return f"stream.{self.stream_column} {self.operator} relation.{self.relation_column}"


@dataclass(frozen=True)
class Range:
    """A stream column between two relation columns, such as ``valid_from <= ts < valid_to``; a NULL bound matches
    nothing.

    Parameters
    ----------
    stream_column, low, high
        The stream's column, and the relation's columns with the bounds.
    includes_low, includes_high
        Whether the bounds themselves are included.

    Examples
    --------
    >>> stream = pa.record_batch({"ts": [1, 5, 9]})
    >>> relation = pa.record_batch({"valid_from": [1, 1, 1], "valid_to": [9, 9, 9]})
    >>> Range("ts", "valid_from", "valid_to").mask(stream, relation).tolist()
    [True, True, False]
    """

    stream_column: str
    low: str
    high: str
    includes_low: bool = True
    includes_high: bool = False

    def columns(self, stream: pa.Schema, relation: pa.Schema) -> tuple[list[str], list[str]]:
        """See `Condition.columns`."""
        for end in (self.low, self.high):
            _require_comparable(self, stream, self.stream_column, relation, end)
        return [self.stream_column], [self.low, self.high]

    def mask(self, stream: pa.RecordBatch, relation: pa.RecordBatch) -> BoolArray:
        """See `Condition.mask`."""
        value = stream.column(self.stream_column)
        above = compare(value, ">=" if self.includes_low else ">", relation.column(self.low))
        below = compare(value, "<=" if self.includes_high else "<", relation.column(self.high))
        return above & below

    def describe(self) -> str:
        """See `Condition.describe`."""
        low, high = ("<=" if inside else "<" for inside in (self.includes_low, self.includes_high))
        return f"relation.{self.low} {low} stream.{self.stream_column} {high} relation.{self.high}"


@dataclass(frozen=True)
class BatchPredicate:
    """A function of two record batches of the same length that returns one boolean per pair.

    Parameters
    ----------
    function
        Called with the stream's and the relation's columns of many pairs; returns a boolean Arrow or numpy array of the
        same length, in which NULL counts as false. It must depend on its arguments only.
    stream_columns, relation_columns
        The columns it needs; None means all. Naming them saves work and memory.
    name
        Its name in messages and snapshots; default: the name of the function.

    Examples
    --------
    >>> near = BatchPredicate(
    ...     lambda s, r: pc.less(pc.abs(pc.subtract(s["x"], r["x0"])), 2), ["x"], ["x0"], name="near"
    ... )
    >>> near.mask(pa.record_batch({"x": [1, 5]}), pa.record_batch({"x0": [2, 2]})).tolist()
    [True, False]
    """

    function: Callable[[pa.RecordBatch, pa.RecordBatch], Any]
    stream_columns: Sequence[str] | None = None
    relation_columns: Sequence[str] | None = None
    name: str | None = None

    def columns(self, stream: pa.Schema, relation: pa.Schema) -> tuple[list[str], list[str]]:
        """See `Condition.columns`."""
        if not callable(self.function):
            raise PlanError(f"{self.describe()}: {type(self.function).__name__} is not callable.")
        wanted = (
            list(stream.names if self.stream_columns is None else self.stream_columns),
            list(relation.names if self.relation_columns is None else self.relation_columns),
        )
        for side, schema, names in zip(("stream", "relation"), (stream, relation), wanted, strict=True):
            for name in names:
                _require_column(self, side, schema, name)
        return wanted

    def mask(self, stream: pa.RecordBatch, relation: pa.RecordBatch) -> BoolArray:
        """See `Condition.mask`; every failure of the function is a `PlanError` that names it."""
        if self.stream_columns is not None:
            stream = stream.select(list(self.stream_columns))
        if self.relation_columns is not None:
            relation = relation.select(list(self.relation_columns))
        try:
            answer = self.function(stream, relation)
        except Exception as error:
            raise PlanError(f"{self.describe()} raised {type(error).__name__}: {error}") from error
        if isinstance(answer, pa.ChunkedArray):
            answer = answer.combine_chunks()
        if isinstance(answer, pa.Array) and pa.types.is_boolean(answer.type):
            answer = answer.fill_null(False).to_numpy(zero_copy_only=False)
        if not isinstance(answer, np.ndarray) or answer.dtype != np.bool_ or answer.ndim != 1:
            given = getattr(answer, "type", None) or getattr(answer, "dtype", None) or type(answer).__name__
            raise PlanError(
                f"{self.describe()} returned {given} instead of a boolean array.",
                hint="Return a boolean pyarrow or numpy array with one value per pair.",
            )
        if len(answer) != stream.num_rows:
            raise PlanError(f"{self.describe()} returned {len(answer)} values for {stream.num_rows} pairs.")
        return answer

    def describe(self) -> str:
        """See `Condition.describe`."""
        return f"predicate {self.name or getattr(self.function, '__name__', repr(self.function))}"


class AllOf:
    """A conjunction of conditions.

    Examples
    --------
    >>> both = AllOf(Comparison("a", ">", "x"), Comparison("a", "<", "y"))
    >>> both.mask(pa.record_batch({"a": [1, 2]}), pa.record_batch({"x": [1, 1], "y": [3, 3]})).tolist()
    [False, True]
    """

    def __init__(self, *conditions: Condition) -> None:
        if not conditions:
            raise PlanError("AllOf needs at least one condition.")
        self.conditions = conditions

    def columns(self, stream: pa.Schema, relation: pa.Schema) -> tuple[list[str], list[str]]:
        """See `Condition.columns`."""
        asked = [condition.columns(stream, relation) for condition in self.conditions]
        of_stream, of_relation = (list(dict.fromkeys(n for a in asked for n in a[side])) for side in (0, 1))
        return of_stream, of_relation

    def mask(self, stream: pa.RecordBatch, relation: pa.RecordBatch) -> BoolArray:
        """See `Condition.mask`."""
        mask = np.ones(stream.num_rows, np.bool_)
        for condition in self.conditions:
            mask &= condition.mask(stream, relation)
        return mask

    def describe(self) -> str:
        """See `Condition.describe`."""
        return " and ".join(condition.describe() for condition in self.conditions)


def band_of(condition: "Condition | None") -> Range | None:
    """A range implied by a condition, if there is one: the window can be searched in its order."""
    if isinstance(condition, Range):
        return condition
    if isinstance(condition, AllOf):
        return next((found for part in condition.conditions if (found := band_of(part)) is not None), None)
    band = getattr(condition, "band", None)
    return band() if callable(band) else None


def compare(left: pa.Array, operator: ComparisonOperator, right: pa.Array) -> BoolArray:
    """Compare two columns row by row by Spark's rules; NULL gives False.

    Examples
    --------
    >>> nan = float("nan")
    >>> compare(pa.array([1.0, nan, nan]), "<", pa.array([nan, 1.0, nan])).tolist()
    [True, False, False]
    """
    if pa.types.is_floating(left.type) or pa.types.is_floating(right.type):
        return _compare_floats(left, operator, right)
    functions = {
        "<": pc.less,
        "<=": pc.less_equal,
        "=": pc.equal,
        "!=": pc.not_equal,
        ">=": pc.greater_equal,
        ">": pc.greater,
    }
    answer = functions[operator](left, right).fill_null(False)
    return np.asarray(answer.to_numpy(zero_copy_only=False), np.bool_)


def _compare_floats(left: pa.Array, operator: ComparisonOperator, right: pa.Array) -> BoolArray:
    both = np.asarray(pc.and_(left.is_valid(), right.is_valid()).to_numpy(zero_copy_only=False), np.bool_)
    a, b = (side.cast(pa.float64(), safe=False).fill_null(0.0).to_numpy(zero_copy_only=False) for side in (left, right))
    a_nan, b_nan = np.isnan(a), np.isnan(b)
    equal = (a == b) | (a_nan & b_nan)
    less = (a < b) | (~a_nan & b_nan)
    answers = {
        "<": less,
        "<=": less | equal,
        "=": equal,
        "!=": ~equal,
        ">=": ~less,
        ">": ~(less | equal),
    }
    return np.asarray(answers[operator] & both, np.bool_)


def _require_column(condition: Condition, side: str, schema: pa.Schema, name: str) -> None:
    if name not in schema.names:
        raise PlanError(
            f"{condition.describe()}: the {side} has no column {name!r}.", hint=f"It has {', '.join(schema.names)}."
        )


def _require_comparable(
    condition: Condition, stream: pa.Schema, stream_name: str, relation: pa.Schema, relation_name: str
) -> None:
    _require_column(condition, "stream", stream, stream_name)
    _require_column(condition, "relation", relation, relation_name)
    left, right = stream.field(stream_name).type, relation.field(relation_name).type
    try:
        compare(pa.array([], left), "<", pa.array([], right))
    except (pa.ArrowException, NotImplementedError) as error:
        raise PlanError(
            f"{condition.describe()}: {left} and {right} cannot be compared.", hint="Cast one of them."
        ) from error
