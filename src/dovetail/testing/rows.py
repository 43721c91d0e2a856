"""Compare rows as multisets, with a readable difference.

Rows are dicts of plain Python values, as returned by ``RecordBatch.to_pylist()``. The comparison is strict where SQL
is (1, 1.0 and True are three values, -0.0 is not 0.0) and follows SQL where Python does not (NaN is NaN).

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
    """Convert Arrow batches to rows, in order, without the columns in ``drop``."""
    return [
        {name: value for name, value in row.items() if name not in drop}
        for batch in batches
        for row in batch.to_pylist()
    ]


def canonical(value: Any) -> Hashable:
    """A hashable representation of a value: equal for equal values, including nested values and NaN.

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
        # repr distinguishes -0.0 from 0.0 and is the same for every NaN.
        return ("float", repr(float(value)))
    if not isinstance(value, Hashable):
        raise TypeError(f"{value!r} of type {type(value).__name__} is not a value that a row can hold.")
    return (type(value).__name__, value)


def as_multiset(rows: Iterable[Row]) -> Counter[Hashable]:
    """Count how often each row occurs, regardless of the order of rows and columns."""
    return Counter(canonical(row) for row in rows)


def diff_rows(expected: Sequence[Row], actual: Sequence[Row]) -> str:
    """Describe missing and surplus rows; empty if both have the same rows equally often."""
    expected_counts, actual_counts = as_multiset(expected), as_multiset(actual)
    if expected_counts == actual_counts:
        return ""
    # One original row of each kind: the canonical form is not readable.
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
    """Fail with `diff_rows` unless both have the same rows equally often, with columns in the same order.

    ``context`` helps to reproduce the failure, such as the seed; it is printed first.
    """
    problem = diff_rows(expected, actual) or _column_order_problem(actual, expected)
    if problem:
        raise AssertionError(f"{context}\n{problem}" if context else problem)


def assert_same_groups(actual: Sequence[Row], expected_groups: Sequence[Sequence[Row]], context: str = "") -> None:
    """Fail unless the actual rows are the expected groups in order; the order within a group does not matter.

    A group has the rows of one stream tuple, so this checks stream order: the order of the matches of one tuple is
    unspecified.
    """
    assert_same_rows(actual, [row for group in expected_groups for row in group], context)
    start = 0
    for position, group in enumerate(expected_groups):
        stop = start + len(group)
        problem = diff_rows(group, actual[start:stop])
        if problem:
            place = f"rows {start} to {stop - 1} belong to stream tuple {position}"
            text = f"The rows are right, but their order is not: {place}.\n{problem}"
            raise AssertionError(f"{context}\n{text}" if context else text)
        start = stop


def _column_order_problem(actual: Sequence[Row], expected: Sequence[Row]) -> str:
    if not actual or list(actual[0]) == list(expected[0]):
        return ""
    wanted, found = list(expected[0]), list(actual[0])
    return f"The rows are right, but the order of columns is not: {wanted} expected, {found} found."
