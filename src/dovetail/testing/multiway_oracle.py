"""The expected result of a multi-way join, computed naively.

Rows are dicts. Inputs are bound one after the other; a row is used if it agrees with all rows bound so far. The rules
are Spark's: NULL equals nothing, NaN equals NaN, -0.0 equals 0.0. A window is pairwise: the latest and the earliest
time of a combination are at most the width apart, and a NULL time is in no window; a bound is on the difference of two
times. A left join keeps the rows of its driving input that are in no complete combination. Output columns: one per set
of equal columns, with the name and value of the first input that has it, then all others; for an unmatched row, those
of its own input.

>>> inputs = {"a": [{"k": 1, "x": 10}], "b": [{"id": 1, "y": 20}, {"id": 2, "y": 21}]}
>>> multiway_oracle(inputs, [(("a", "k"), ("b", "id"))])
[{'k': 1, 'x': 10, 'y': 20}]
>>> multiway_oracle(inputs, [(("a", "k"), ("b", "id"))], how="right")[1:]
[{'k': 2, 'x': None, 'y': 21}]
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Literal

from dovetail.testing.rows import Row

__all__ = ["MultiJoinType", "multiway_oracle"]

Column = tuple[str, str]
PairTest = tuple[str, str, Callable[[Row, Row], bool]]
MultiJoinType = Literal["inner", "left", "right", "full", "semi", "anti"]


def multiway_oracle(
    inputs: Mapping[str, Sequence[Row]],
    equalities: Sequence[tuple[Column, Column]],
    how: MultiJoinType = "inner",
    driving: str | None = None,
    times: Mapping[str, str] | None = None,
    width: int | None = None,
    columns: Mapping[str, Sequence[str]] | None = None,
    conditions: Sequence[PairTest] = (),
) -> list[dict[str, Any]]:
    """Join lists of rows naively.

    ``equalities`` are pairs of ``(input, column)``. ``driving`` is the preserved input of a left join, by default the
    first. ``times`` is the time column of each input, ``width`` the maximum distance of two times. ``columns`` are the
    columns of each input, required if an input has no rows. ``conditions`` are two inputs and a function of their rows:
    a complete combination is used if it satisfies all of them. With ``times`` but no ``width``, a NULL time still
    matches nothing.
    """
    names = list(inputs)
    shown = {name: list(columns[name]) if columns else list(rows[0] if rows else ()) for name, rows in inputs.items()}
    classes = _classes(equalities)
    combinations = [
        found
        for found in _combinations(inputs, names, classes, times, width)
        if all(test(inputs[a][found[a]], inputs[b][found[b]]) for a, b, test in conditions)
    ]
    matched = {name: {combination[name] for combination in combinations} for name in names}
    if how in ("semi", "anti"):
        rows = [row for number, row in enumerate(inputs[names[0]]) if (number in matched[names[0]]) == (how == "semi")]
        return [_output_row({names[0]: row}, names[:1], shown, classes) for row in rows]
    result = [_output_row({n: inputs[n][c[n]] for n in names}, names, shown, classes) for c in combinations]
    kept = {"left": [driving or names[0]], "right": names[1:2], "full": names[:2]}.get(how, [])
    for name in kept:
        unmatched = [row for number, row in enumerate(inputs[name]) if number not in matched[name]]
        result += [_output_row({name: row}, names, shown, classes) for row in unmatched]
    return result


def _classes(equalities: Sequence[tuple[Column, Column]]) -> list[list[Column]]:
    """Sets of equal columns, by repeated merging."""
    classes: list[list[Column]] = []
    for left, right in equalities:
        touched = [c for c in classes if left in c or right in c]
        merged = [column for c in touched for column in c]
        merged += [column for column in (left, right) if column not in merged]
        classes = [c for c in classes if c not in touched] + [merged]
    return classes


def _combinations(
    inputs: Mapping[str, Sequence[Row]],
    names: Sequence[str],
    classes: Sequence[Sequence[Column]],
    times: Mapping[str, str] | None,
    width: int | None,
) -> Iterator[dict[str, int]]:
    """Row numbers, one per input, of rows that agree."""
    order = [names[0]]
    while len(order) < len(names):
        order.append(next(n for n in names if n not in order and _links(classes, order, n)))
    by_value: dict[tuple[str, str], dict[Hashable, list[int]]] = {}
    for c in classes:
        for name, column in c:
            index: dict[Hashable, list[int]] = {}
            for number, row in enumerate(inputs[name]):
                index.setdefault(_comparable(row[column]), []).append(number)
            by_value[name, column] = index

    def extend(bound: dict[str, int], rest: Sequence[str]) -> Iterator[dict[str, int]]:
        if not rest:
            yield dict(bound)
            return
        name = rest[0]
        links = _links(classes, list(bound), name)
        (other, other_column), (_, column) = links[0]
        value = _comparable(inputs[other][bound[other]][other_column])
        for number in by_value[name, column].get(value, []) if value is not None else []:
            row = inputs[name][number]
            agrees = all(
                _comparable(row[c]) == _comparable(inputs[n][bound[n]][nc]) is not None for (n, nc), (_, c) in links
            )
            if agrees and _is_within({**bound, name: number}, inputs, times, width):
                yield from extend({**bound, name: number}, rest[1:])

    for number, row in enumerate(inputs[order[0]]):
        has_null = any(row[c] is None for each in classes for n, c in each if n == order[0])
        if not has_null and _is_within({order[0]: number}, inputs, times, width):
            yield from extend({order[0]: number}, order[1:])


def _links(classes: Sequence[Sequence[Column]], bound: Sequence[str], name: str) -> list[tuple[Column, Column]]:
    return [(theirs, ours) for c in classes for theirs in c for ours in c if theirs[0] in bound and ours[0] == name]


def _is_within(
    bound: Mapping[str, int], inputs: Mapping[str, Sequence[Row]], times: Mapping[str, str] | None, width: int | None
) -> bool:
    if times is None:
        return True
    moments = [inputs[name][number][times[name]] for name, number in bound.items()]
    return None not in moments and (width is None or max(moments) - min(moments) <= width)


def _output_row(
    rows: Mapping[str, Row],
    names: Sequence[str],
    shown: Mapping[str, Sequence[str]],
    classes: Sequence[Sequence[Column]],
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    joined: set[Column] = set()
    for c in classes:
        in_order = sorted((column for column in c if column[0] in names), key=lambda column: names.index(column[0]))
        joined.update(c)
        if in_order:
            holder = next(((n, column) for n, column in in_order if n in rows), None)
            result[in_order[0][1]] = None if holder is None else rows[holder[0]][holder[1]]
    for name in names:
        for column in shown[name]:
            if (name, column) not in joined:
                result[column] = rows[name][column] if name in rows else None
    return result


def _comparable(value: Any) -> Hashable:
    if isinstance(value, float):
        return "NaN" if value != value else value + 0.0
    return value  # type: ignore[no-any-return]
