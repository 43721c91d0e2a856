"""Punctuations: promises about the rows that an input will still send.

A `Punctuation` says: from now on, no row matches this. It has one predicate per column, and a row must match all of
them; columns it does not name may have any value. An operator binds a punctuation to an input's columns
(`BoundPunctuation`), which checks names and types.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray
from dovetail.core.errors import PlanError
from dovetail.joins.promises.patterns import (
    BoundSet,
    Closed,
    Pattern,
    Range,
    bind_range,
    bind_set,
    pattern_of,
)

__all__ = ["BoundPunctuation", "Marked", "Punctuation", "patterns_of", "points_of"]

_SETS = (list, tuple, set, frozenset, pa.Array, pa.ChunkedArray)
_MOST_SHOWN = 5


@dataclass(frozen=True)
class Marked:
    """Rows of a stream that end their join value; created by `Punctuation.where`."""

    where: Any
    is_data: bool = True

    def __str__(self) -> str:
        return f"{self.where}{'' if self.is_data else ', which are not data'}"


class Punctuation:
    """No later row of the input matches this.

    Parameters
    ----------
    columns
        What each column must be for a row to match: a value; a list, set or Arrow array for one of several values; a
        `Range`; or ``Punctuation.ANY``, which is the same as leaving the column out.

    Examples
    --------
    >>> print(Punctuation({"sno": 79, "ipaddr": Punctuation.ANY}))
    sno = 79
    >>> print(Punctuation({"day": Punctuation.Range(None, 5, closed="left"), "shop": ["a", "b"]}))
    day in (, 5) and shop in {a, b}
    >>> Punctuation({"sno": None})
    Traceback (most recent call last):
    dovetail.core.errors.PlanError: The punctuation on 'sno' is NULL, which matches nothing. Use Punctuation.ANY for a \
column that may be anything.
    """

    ANY: ClassVar[Any] = type("Any", (), {"__repr__": lambda self: "ANY"})()
    Range: ClassVar[type[Range]] = Range
    __slots__ = ("columns",)
    columns: Mapping[str, Any]

    def __init__(self, columns: Mapping[str, Any]) -> None:
        if not isinstance(columns, Mapping) or not all(isinstance(name, str) for name in columns):
            raise PlanError(
                f"A punctuation is a predicate per column, not {columns!r}.", hint='Write it as Punctuation({"k": 5}).'
            )
        for name, value in columns.items():
            if value is None:
                raise PlanError(
                    f"The punctuation on {name!r} is NULL, which matches nothing.",
                    hint="Use Punctuation.ANY for a column that may be anything.",
                )
        self.columns = {name: value for name, value in columns.items() if value is not Punctuation.ANY}

    @classmethod
    def equals(cls, column: str, value: Any) -> "Punctuation":
        """No later row has this value.

        Examples
        --------
        >>> print(Punctuation.equals("sno", 79))
        sno = 79
        """
        return cls({column: value})

    @classmethod
    def one_of(cls, column: str, values: Iterable[Any]) -> "Punctuation":
        """No later row has one of these values: several punctuations in one.

        Examples
        --------
        >>> print(Punctuation.one_of("sno", [3, 4]))
        sno in {3, 4}
        """
        return cls({column: values if isinstance(values, _SETS) else list(values)})

    @classmethod
    def between(cls, column: str, low: Any, high: Any, closed: Closed = "both") -> "Punctuation":
        """No later row has a value in this range; None means unbounded.

        Examples
        --------
        >>> print(Punctuation.between("day", None, 5, closed="left"))
        day in (, 5)
        """
        return cls({column: Range(low, high, closed)})

    @staticmethod
    def where(condition: Any, *, data: bool = True) -> Marked:
        """Rows that meet a condition end their join value; for the ``punctuations`` of `dovetail.multi_join`.

        Parameters
        ----------
        condition
            SQL text or a Spark column.
        data
            Whether such a row is also a row of the input.

        Examples
        --------
        >>> print(Punctuation.where("status = 'closed'"))
        status = 'closed'
        """
        return Marked(condition, data)

    def __str__(self) -> str:
        return " and ".join(f"{name} {_told(value)}" for name, value in self.columns.items()) or "anything"

    def __repr__(self) -> str:
        return f"Punctuation({self})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Punctuation) and _plain(self.columns) == _plain(other.columns)

    def __hash__(self) -> int:
        return hash(str(self))


@dataclass(frozen=True, slots=True)
class BoundPunctuation:
    """A punctuation whose columns and value types have been checked; without columns it matches every row."""

    columns: Mapping[str, Pattern]

    @classmethod
    def of(cls, written: Punctuation, name: str, schema: pa.Schema) -> "BoundPunctuation":
        """Check a punctuation against the columns of an input."""
        if not isinstance(written, Punctuation):
            raise PlanError(f"{written!r} is not a punctuation.", hint='Write it as Punctuation({"k": 5}).')
        bound: dict[str, Pattern] = {}
        for column, value in written.columns.items():
            if column not in schema.names:
                raise PlanError(
                    f"The punctuation {written} is on a column that input {name!r} does not have.",
                    hint=f"Its columns are {', '.join(schema.names)}.",
                )
            kind, where = schema.field(column).type, f"{name}.{column}"
            if isinstance(value, Range):
                if value.low is not None or value.high is not None:
                    bound[column] = bind_range(value, kind, where)
            else:
                bound[column] = bind_set(value if isinstance(value, _SETS) else [value], kind, where)
        return cls(bound)

    def matches(self, rows: pa.RecordBatch) -> BoolArray:
        """Which rows match in every column."""
        found: BoolArray = np.ones(rows.num_rows, np.bool_)
        for name, pattern in self.columns.items():
            found &= pattern.matches(rows.column(rows.schema.get_field_index(name)))
        return found

    def covers(self, other: "BoundPunctuation") -> bool:
        """Whether every row that matches the other matches this."""
        return all(name in other.columns and p.covers(other.columns[name]) for name, p in self.columns.items())

    def union(self, other: "BoundPunctuation") -> "BoundPunctuation | None":
        """One punctuation that says the same as both, or None; they may differ in one column only."""
        if self.covers(other):
            return self
        if other.covers(self):
            return other
        if set(self.columns) != set(other.columns):
            return None
        same = {n for n, p in self.columns.items() if p.covers(other.columns[n]) and other.columns[n].covers(p)}
        if len(same) != len(self.columns) - 1:
            return None
        name = next(n for n in self.columns if n not in same)
        joined = self.columns[name].union(other.columns[name])
        return None if joined is None else BoundPunctuation({**self.columns, name: joined})

    def renamed(self, names: Mapping[str, str]) -> "BoundPunctuation":
        return BoundPunctuation({names[name]: pattern for name, pattern in self.columns.items()})

    @property
    def nbytes(self) -> int:
        """The approximate size in memory."""
        return 128 + sum(64 + pattern.nbytes for pattern in self.columns.values())

    def unbound(self) -> Punctuation:
        """The punctuation as a user would write it."""
        return Punctuation({name: pattern.as_value() for name, pattern in self.columns.items()})

    def __str__(self) -> str:
        return str(self.unbound())

    def as_dict(self) -> dict[str, Any]:
        """The punctuation as JSON-able data."""
        return {name: pattern.as_dict() for name, pattern in self.columns.items()}

    @classmethod
    def from_dict(cls, described: Mapping[str, Any]) -> "BoundPunctuation":
        return cls({name: pattern_of(pattern) for name, pattern in described.items()})


def patterns_of(rows: pa.RecordBatch) -> list[BoundPunctuation]:
    """Rows as punctuations on their non-NULL columns, each once. Rows that are all NULL, or contain a NaN, give none.

    Examples
    --------
    >>> rows = pa.record_batch({"a": [1, None, 1, None], "b": ["x", "y", "x", None]})
    >>> [str(each) for each in patterns_of(rows)]
    ['a = 1 and b = x', 'b = y']
    >>> [str(each) for each in patterns_of(pa.record_batch({"f": [-0.0, float("nan")]}))]
    ['f = 0.0']
    """
    found: dict[tuple[Any, ...], BoundPunctuation] = {}
    for values in zip(*(column.to_pylist() for column in rows.columns), strict=True):
        # 0.0 and -0.0 are one value, as everywhere else.
        named = [
            (f, v + 0.0 if isinstance(v, float) else v)
            for f, v in zip(rows.schema, values, strict=True)
            if v is not None
        ]
        if named and values not in found and all(value == value for _, value in named):
            found[values] = BoundPunctuation({f.name: BoundSet(pa.array([value], f.type)) for f, value in named})
    return list(found.values())


def points_of(bound: BoundPunctuation, columns: Iterable[str], most: int) -> pa.RecordBatch | None:
    """The value combinations that a punctuation names; None if it names anything else, or more than `most`."""
    names = list(columns)
    patterns = [bound.columns.get(name) for name in names]
    if set(bound.columns) != set(names) or not all(isinstance(pattern, BoundSet) for pattern in patterns):
        return None
    arrays = [pattern.values for pattern in patterns if isinstance(pattern, BoundSet)]
    if len(arrays) > 1:
        sizes = [len(array) for array in arrays]
        if int(np.prod(sizes, dtype=np.float64)) > most:
            return None
        places = np.indices(sizes).reshape(len(sizes), -1)
        arrays = [array.take(pa.array(place)) for array, place in zip(arrays, places, strict=True)]
    return pa.record_batch(arrays, names=names)


def _told(value: Any) -> str:
    if isinstance(value, Range):
        return f"in {value}"
    if isinstance(value, _SETS):
        items = list(value)
        shown = [str(v.as_py() if isinstance(v, pa.Scalar) else v) for v in items[:_MOST_SHOWN]]
        more = f", and {len(items) - _MOST_SHOWN} more" if len(items) > _MOST_SHOWN else ""
        return f"in {{{', '.join(shown)}{more}}}"
    return f"= {value}"


def _plain(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {item.as_py() if isinstance(item, pa.Scalar) else item for item in value}
        if isinstance(value, _SETS)
        else value
        for name, value in columns.items()
    }
