"""The expected result of a join, computed naively.

No Arrow, no numpy: rows are dicts, and every stream row is compared with the relation rows of its key. The rules are
those of Spark's equi-join:

- NULL matches nothing, not even NULL; a composite key with a NULL in it matches nothing;
- NaN equals NaN; -0.0 equals 0.0; the keys of both sides have the same type, as Spark casts them before joining;
- ``left`` and ``anti`` still emit a stream row whose key has a NULL;
- a condition that is NULL (``None``) is not a match;
- output columns: the join columns once, with the stream's names and values, then the stream's others, then the
  relation's others. ``semi`` and ``anti`` return only the stream's columns, join columns first.

Supported: inner, left, semi and anti joins; equality on one or several columns, an additional condition, or only a
condition. Not supported: right and full joins; columns with the same name on both sides, other than join columns.

Examples
--------
>>> stream = [{"k": 1, "t": "a"}, {"k": 2, "t": "b"}, {"k": None, "t": "c"}]
>>> relation = [{"k": 1, "v": 10}, {"k": 1, "v": 11}, {"k": None, "v": 12}]
>>> join_oracle(stream, relation, on="k")
[{'k': 1, 't': 'a', 'v': 10}, {'k': 1, 't': 'a', 'v': 11}]
>>> join_oracle(stream, relation, on="k", how="left")[2:]
[{'k': 2, 't': 'b', 'v': None}, {'k': None, 't': 'c', 'v': None}]
>>> join_oracle(stream, relation, on="k", how="anti")
[{'k': 2, 't': 'b'}, {'k': None, 't': 'c'}]
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, get_args

from dovetail.testing.rows import Row, as_multiset, assert_same_groups, assert_same_rows, diff_rows

__all__ = [
    "Condition",
    "JoinType",
    "KeyNames",
    "as_multiset",
    "assert_same_groups",
    "assert_same_rows",
    "diff_rows",
    "join_oracle",
    "join_oracle_by_tuple",
]

JoinType = Literal["inner", "left", "semi", "anti"]
#: One name, or several; a pair is (stream name, relation name).
KeyNames = str | Sequence[str | tuple[str, str]]
#: Returns whether a stream row and a relation row match; ``None`` is SQL's NULL.
Condition = Callable[[Row, Row], bool | None]


def join_oracle(
    stream_rows: Sequence[Row],
    relation_rows: Sequence[Row],
    on: KeyNames = (),
    how: JoinType = "inner",
    condition: Condition | None = None,
    equi: bool = True,
    select: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Join two lists of rows naively: in stream order, the matches of one stream row in relation order.

    Parameters
    ----------
    stream_rows, relation_rows
        The rows; each list has the same columns in every row.
    on
        The join columns; a pair if the two sides have different names. Empty only with ``equi=False``.
    how
        ``"inner"``, ``"left"``, ``"semi"`` or ``"anti"``.
    condition
        Additional condition on (stream row, relation row); with ``equi=False`` the only one.
    equi
        Whether there is an equality condition.
    select
        The relation's columns to return; required for a left join with an empty relation.
    """
    groups = join_oracle_by_tuple(stream_rows, relation_rows, on, how, condition, equi, select)
    return [row for group in groups for row in group]


def join_oracle_by_tuple(
    stream_rows: Sequence[Row],
    relation_rows: Sequence[Row],
    on: KeyNames = (),
    how: JoinType = "inner",
    condition: Condition | None = None,
    equi: bool = True,
    select: Sequence[str] | None = None,
) -> list[list[dict[str, Any]]]:
    """Join like `join_oracle`, but return one list per stream row, for `assert_same_groups`."""
    if how not in get_args(JoinType):
        raise ValueError(f"how={how!r} must be one of {', '.join(get_args(JoinType))}.")
    stream_keys, relation_keys = _names_per_side(on)
    if equi and not stream_keys:
        raise ValueError("An equi-join needs join columns: pass on=, or equi=False.")
    if not equi and (stream_keys or condition is None):
        raise ValueError("A join without equality needs a condition and no join columns.")
    other_columns = _emitted_columns(relation_rows, relation_keys, how, select)
    for name in other_columns if how in ("inner", "left") else ():
        if stream_rows and name in stream_rows[0]:
            raise ValueError(f"Both sides have a column {name!r}; rename one.")

    relation_rows_by_key: dict[Hashable, list[Row]] = {}
    for relation_row in relation_rows:
        relation_rows_by_key.setdefault(_join_key(relation_row, relation_keys), []).append(relation_row)

    groups = []
    for stream_row in stream_rows:
        key = _join_key(stream_row, stream_keys)
        candidates = [] if key is None else relation_rows_by_key.get(key, [])
        matches = [row for row in candidates if condition is None or _is_true(condition(stream_row, row))]
        groups.append(_output_of(_keys_first(stream_row, stream_keys), matches, other_columns, how))
    return groups


def _keys_first(row: Row, keys: Sequence[str]) -> dict[str, Any]:
    return {name: row[name] for name in keys} | dict(row)


def _output_of(
    stream_row: dict[str, Any], matches: Sequence[Row], other_columns: Sequence[str], how: JoinType
) -> list[dict[str, Any]]:
    if how == "semi":
        return [stream_row] if matches else []
    if how == "anti":
        return [] if matches else [stream_row]
    if how == "left" and not matches:
        return [stream_row | dict.fromkeys(other_columns)]
    return [stream_row | {name: match[name] for name in other_columns} for match in matches]


def _names_per_side(on: KeyNames) -> tuple[list[str], list[str]]:
    names = [on] if isinstance(on, str) else list(on)
    pairs = [(name, name) if isinstance(name, str) else name for name in names]
    return [stream_name for stream_name, _ in pairs], [relation_name for _, relation_name in pairs]


def _emitted_columns(
    relation_rows: Sequence[Row], relation_keys: Sequence[str], how: JoinType, select: Sequence[str] | None
) -> list[str]:
    if select is None and not relation_rows and how == "left":
        raise ValueError("The columns of an empty relation are unknown, but a left join returns them: pass select=.")
    columns = list(relation_rows[0]) if select is None and relation_rows else list(select or ())
    return [name for name in columns if name not in relation_keys]


class _NotANumber:
    """Represents every NaN in a key, because Python's NaN is not equal to itself."""


_NAN = _NotANumber()


def _join_key(row: Row, names: Sequence[str]) -> Hashable:
    """The row's key as a value that Python compares like Spark; ``None`` if it has a NULL.

    Without names every row has the same key, so every pair is a candidate. 0.0 == -0.0 in Python, as in Spark.
    """
    values = [row[name] for name in names]
    if any(value is None for value in values):
        return None
    return tuple(_NAN if isinstance(value, float) and value != value else value for value in values)


def _is_true(verdict: bool | None) -> bool:
    if verdict is not None and not isinstance(verdict, bool):
        raise TypeError(f"A condition must return True, False or None, not {verdict!r}.")
    return verdict is True
