"""What a join must give, computed from scratch in the plainest way.

No Arrow, no numpy, no cleverness: rows are dicts, and every stream row is compared with the relation rows of
its key. The rules are those of Spark's equi-join:

- NULL matches nothing, not even NULL; a composite key with a NULL in it matches nothing;
- NaN equals NaN; -0.0 equals 0.0; both sides' keys are of one type, as Spark makes them before it joins;
- ``left`` and ``anti`` still emit a stream row whose key has a NULL;
- a condition that gives NULL (``None``) is no match;
- output columns: the join columns once, with the stream's names and values, then the stream's others, then the
  relation's others. ``semi`` and ``anti`` give the stream's columns only, the join columns first.

Supported: inner, left, semi and anti joins; equality on one or several columns, a condition on top of it, or
a condition alone. Not supported: right and full joins; columns other than join columns that both sides name
alike.

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
#: One name, or several; a pair is (the stream's name, the relation's name).
KeyNames = str | Sequence[str | tuple[str, str]]
#: Says whether a stream row and a relation row match; ``None`` is SQL's NULL.
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
    """Join two lists of rows, from scratch.

    Parameters
    ----------
    stream_rows, relation_rows
        The rows; each list has the same columns in every row.
    on
        The join columns; a pair where the two sides name them differently. Empty only with ``equi=False``.
    how
        ``"inner"``, ``"left"``, ``"semi"`` or ``"anti"``.
    condition
        Further condition on (stream row, relation row); with ``equi=False`` the only one.
    equi
        Whether there is an equality condition at all.
    select
        The relation's columns to put out; needed for a left join with a relation that has no row to show
        them.

    Returns
    -------
    list of dict
        In stream order; the matches of one stream row in the relation's order.

    Examples
    --------
    >>> join_oracle([{"id": 1, "ts": 5}], [{"k": 1, "since": 3}, {"k": 1, "since": 7}], on=[("id", "k")],
    ...             condition=lambda s, r: r["since"] <= s["ts"])
    [{'id': 1, 'ts': 5, 'since': 3}]
    >>> join_oracle([{"x": 4}], [{"lo": 0, "hi": 3}, {"lo": 4, "hi": 9}], equi=False,
    ...             condition=lambda s, r: r["lo"] <= s["x"] <= r["hi"])
    [{'x': 4, 'lo': 4, 'hi': 9}]
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
    """Join as `join_oracle` does, but keep apart what each stream row gives.

    That is what an ordered join is compared with, by `assert_same_groups`.

    Examples
    --------
    >>> join_oracle_by_tuple([{"k": 1}, {"k": 2}], [{"k": 1, "v": 10}, {"k": 1, "v": 11}], on="k")
    [[{'k': 1, 'v': 10}, {'k': 1, 'v': 11}], []]
    """
    if how not in get_args(JoinType):
        raise ValueError(f"how={how!r} is none of {', '.join(get_args(JoinType))}.")
    stream_keys, relation_keys = _names_per_side(on)
    if equi and not stream_keys:
        raise ValueError("An equi-join needs join columns: pass on=, or equi=False.")
    if not equi and (stream_keys or condition is None):
        raise ValueError("A join without equality has a condition and no join columns.")
    other_columns = _relation_columns_put_out(relation_rows, relation_keys, how, select)
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


def _relation_columns_put_out(
    relation_rows: Sequence[Row], relation_keys: Sequence[str], how: JoinType, select: Sequence[str] | None
) -> list[str]:
    if select is None and not relation_rows and how == "left":
        raise ValueError("An empty relation does not show its columns, which a left join puts out: pass select=.")
    columns = list(relation_rows[0]) if select is None and relation_rows else list(select or ())
    return [name for name in columns if name not in relation_keys]


class _NotANumber:
    """Stands for every NaN in a key: Python's own are not even equal to themselves."""


_NAN = _NotANumber()


def _join_key(row: Row, names: Sequence[str]) -> Hashable:
    """The row's key as something that Python compares as Spark would; ``None`` if it has a NULL in it.

    Without names every row has the same key, so every pair is a candidate. Python's own 0.0 == -0.0 is
    Spark's rule.
    """
    values = [row[name] for name in names]
    if any(value is None for value in values):
        return None
    return tuple(_NAN if isinstance(value, float) and value != value else value for value in values)


def _is_true(verdict: bool | None) -> bool:
    if verdict is not None and not isinstance(verdict, bool):
        raise TypeError(f"A condition gives True, False or None, not {verdict!r}.")
    return verdict is True
