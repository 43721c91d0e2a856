"""Compare rows as a person would: same rows, same number of times, and a readable account of what differs.

Rows are dicts of plain Python values, as ``RecordBatch.to_pylist()`` gives them. Comparison is strict where
SQL results are (1, 1.0 and True are three values, -0.0 is not 0.0) and follows SQL where Python does not (NaN
is NaN).

Examples
--------
>>> nan = float("nan")
>>> as_multiset([{"k": nan}, {"k": nan}]) == as_multiset([{"k": float("nan")}] * 2)
True
>>> print(diff_rows(expected=[{"k": 1}, {"k": 2}], actual=[{"k": 2}, {"k": 2}]))
2 rows expected, 2 found.
missing: 1 (1 distinct)
    1 x {'k': 1}
extra: 1 (1 distinct)
    1 x {'k': 2}
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

__all__ = [
    "Row",
    "as_multiset",
    "assert_same_groups",
    "assert_same_rows",
    "canonical",
    "diff_rows",
    "rows_of",
]

Row = Mapping[str, Any]

_MOST_ROWS_SHOWN = 10


def rows_of(batches: Iterable[pa.RecordBatch | pa.Table], drop: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The rows of Arrow batches, in order, as dicts.

    Parameters
    ----------
    batches
        Record batches or tables.
    drop
        Columns to leave out, where present.

    Examples
    --------
    >>> rows_of([pa.table({"k": [1, None], "__code": [1, None]})], drop=["__code"])
    [{'k': 1}, {'k': None}]
    """
    return [
        {name: value for name, value in row.items() if name not in drop}
        for batch in batches
        for row in batch.to_pylist()
    ]


def canonical(value: Any) -> Hashable:
    """A hashable stand-in for a value: equal for equal values, nested ones and NaN included.

    Examples
    --------
    >>> canonical([{"b": float("nan"), "a": b"x"}]) == canonical(({"a": bytearray(b"x"), "b": float("nan")},))
    True
    >>> canonical(1) == canonical(1.0), canonical(0.0) == canonical(-0.0), canonical(1) == canonical(True)
    (False, False, False)
    """
    if isinstance(value, Mapping):
        items = [(str(name), canonical(inner)) for name, inner in value.items()]
        return ("struct", tuple(sorted(items, key=lambda item: item[0])))
    if isinstance(value, list | tuple):
        return ("list", tuple(canonical(inner) for inner in value))
    if isinstance(value, bytes | bytearray | memoryview):
        return ("bytes", bytes(value))
    if isinstance(value, float):
        # repr tells -0.0 from 0.0 and is the same for every NaN.
        return ("float", repr(float(value)))
    if not isinstance(value, Hashable):
        raise TypeError(f"{value!r} of type {type(value).__name__} is not a value that a row can hold.")
    return (type(value).__name__, value)


def as_multiset(rows: Iterable[Row]) -> Counter[Hashable]:
    """How often each row occurs, whatever the order of rows and of columns.

    Examples
    --------
    >>> as_multiset([{"a": 1, "b": [2]}, {"b": [2], "a": 1}]).most_common(1)[0][1]
    2
    """
    return Counter(canonical(row) for row in rows)


def diff_rows(expected: Sequence[Row], actual: Sequence[Row]) -> str:
    """What is missing and what is too many, for a person to read; empty if the rows are the same multiset.

    Examples
    --------
    >>> diff_rows([{"k": 1}, {"k": 2}], [{"k": 2}, {"k": 1}])
    ''
    """
    expected_counts, actual_counts = as_multiset(expected), as_multiset(actual)
    if expected_counts == actual_counts:
        return ""
    # One row of each kind as it was given: the canonical form is not for people.
    examples = {canonical(row): row for row in (*actual, *expected)}
    lines = [f"{len(expected)} rows expected, {len(actual)} found."]
    for title, surplus in (
        ("missing", expected_counts - actual_counts),
        ("extra", actual_counts - expected_counts),
    ):
        if surplus:
            lines.append(f"{title}: {surplus.total()} ({len(surplus)} distinct)")
            shown = surplus.most_common(_MOST_ROWS_SHOWN)
            lines.extend(f"    {count} x {dict(examples[key])!r}" for key, count in shown)
            if len(surplus) > len(shown):
                lines.append(f"    ... and {len(surplus) - len(shown)} more")
    return "\n".join(lines)


def assert_same_rows(actual: Sequence[Row], expected: Sequence[Row], context: str = "") -> None:
    """Fail, with `diff_rows`, unless both hold the same rows equally often, columns in the same order.

    Parameters
    ----------
    actual, expected
        The rows, in any order.
    context
        What a reader of the failure needs to repeat it, such as the seed; put first.

    Examples
    --------
    >>> assert_same_rows([{"k": 1}, {"k": 2}], [{"k": 2}, {"k": 1}])
    >>> assert_same_rows([{"k": 1}], [], context="seed=7")
    Traceback (most recent call last):
    AssertionError: seed=7
    0 rows expected, 1 found.
    extra: 1 (1 distinct)
        1 x {'k': 1}
    """
    problem = diff_rows(expected, actual) or _column_order_problem(actual, expected)
    if problem:
        raise AssertionError(f"{context}\n{problem}" if context else problem)


def assert_same_groups(actual: Sequence[Row], expected_groups: Sequence[Sequence[Row]], context: str = "") -> None:
    """Fail unless the actual rows are the expected groups one after the other, each in any order inside.

    A group is what one stream tuple gives. So this is "in stream order": which match of a tuple comes first
    is nobody's promise.

    Examples
    --------
    >>> assert_same_groups([{"k": 1, "v": "b"}, {"k": 1, "v": "a"}, {"k": 2, "v": "c"}],
    ...                    [[{"k": 1, "v": "a"}, {"k": 1, "v": "b"}], [], [{"k": 2, "v": "c"}]])
    >>> assert_same_groups([{"k": 2}, {"k": 1}], [[{"k": 1}], [{"k": 2}]])
    Traceback (most recent call last):
    AssertionError: The rows are right, their order is not: rows 0 to 0 belong to stream tuple 0.
    1 rows expected, 1 found.
    missing: 1 (1 distinct)
        1 x {'k': 1}
    extra: 1 (1 distinct)
        1 x {'k': 2}
    """
    assert_same_rows(actual, [row for group in expected_groups for row in group], context)
    start = 0
    for position, group in enumerate(expected_groups):
        stop = start + len(group)
        problem = diff_rows(group, actual[start:stop])
        if problem:
            place = f"rows {start} to {stop - 1} belong to stream tuple {position}"
            text = f"The rows are right, their order is not: {place}.\n{problem}"
            raise AssertionError(f"{context}\n{text}" if context else text)
        start = stop


def _column_order_problem(actual: Sequence[Row], expected: Sequence[Row]) -> str:
    if not actual or list(actual[0]) == list(expected[0]):
        return ""
    wanted, found = list(expected[0]), list(actual[0])
    return f"The rows are right, the order of columns is not: {wanted} expected, {found} found."
