"""The expected result of a cascade of outer joins, computed naively.

Inputs are joined one after the other with the result so far, by nested loops. A row of the result so far is a dict from
inputs to their rows; an input that it lacks is not in it. The rules for values, windows and NULL are those of
`multiway_oracle`. A join column is that of the first input that a row has; a condition on an input that a row lacks is
not satisfied.

>>> inputs = {"a": [{"k": 1, "x": 10}], "b": [{"k": 2, "y": 20}], "c": [{"k": 2, "z": 30}]}
>>> on = [(("a", "k"), ("b", "k")), (("b", "k"), ("c", "k"))]
>>> for row in cascade_oracle(inputs, on, {"b": "full", "c": "left"}):
...     print(row)
{'k': 2, 'x': None, 'y': 20, 'z': 30}
{'k': 1, 'x': 10, 'y': None, 'z': None}
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dovetail.testing.multiway_oracle import MultiJoinType, _classes, _comparable, _output_row
from dovetail.testing.rows import Row

__all__ = ["cascade_oracle"]

Column = tuple[str, str]
PairTest = tuple[str, str, Callable[[Row, Row], bool]]


def cascade_oracle(
    inputs: Mapping[str, Sequence[Row]],
    equalities: Sequence[tuple[Column, Column]],
    how: Mapping[str, MultiJoinType],
    times: Mapping[str, str] | None = None,
    width: int | None = None,
    columns: Mapping[str, Sequence[str]] | None = None,
    conditions: Sequence[PairTest] = (),
) -> list[dict[str, Any]]:
    """Join lists of rows naively, each input after the first with the type that ``how`` names.

    See `multiway_oracle` for the other parameters.
    """
    names = list(inputs)
    shown = {name: list(columns[name]) if columns else list(rows[0] if rows else ()) for name, rows in inputs.items()}
    classes = _classes(equalities)
    carried = [names[0]]
    found: list[dict[str, Row]] = [{names[0]: row} for row in inputs[names[0]]]
    for name in names[1:]:
        links = [c for c in classes if any(n == name for n, _ in c) and any(n in carried for n, _ in c)]
        tests = [each for each in conditions if name in each[:2] and set(each[:2]) <= {name, *carried}]

        def match(
            left: dict[str, Row],
            right: Row,
            name: str = name,
            links: list[list[Column]] = links,
            tests: list[PairTest] = tests,
        ) -> bool:
            for c in links:
                ours = next((_comparable(left[n][column]) for n in names for m, column in c if m == n in left), None)
                theirs = next(_comparable(right[column]) for n, column in c if n == name)
                if ours is None or ours != theirs:
                    return False
            rows = {**left, name: right}
            if times is not None:
                moments = [row[times[n]] for n, row in rows.items()]
                if None in moments or (width is not None and max(moments) - min(moments) > width):
                    return False
            return all(a in rows and b in rows and test(rows[a], rows[b]) for a, b, test in tests)

        pairs = [(n, m) for n, left in enumerate(found) for m, right in enumerate(inputs[name]) if match(left, right)]
        left_matched, right_matched = {n for n, _ in pairs}, {m for _, m in pairs}
        kind = how[name]
        joined = [{**found[n], name: inputs[name][m]} for n, m in pairs]
        alone = [row for n, row in enumerate(found) if n not in left_matched]
        if kind == "semi":
            found = [row for n, row in enumerate(found) if n in left_matched]
        elif kind == "anti":
            found = alone
        else:
            found = joined
            if kind in ("left", "full"):
                found = found + alone
            if kind in ("right", "full"):
                found = found + [{name: row} for m, row in enumerate(inputs[name]) if m not in right_matched]
        if kind not in ("semi", "anti"):
            carried.append(name)
    return [_output_row(row, carried, shown, classes) for row in found]
