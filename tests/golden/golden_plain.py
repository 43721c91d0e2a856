"""What the golden flows and operators must give, in plain Python: nothing here uses Dovetail."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

Row = dict[str, Any]
Rows = Sequence[Row]


def lookup_join(
    stream: Rows, table: Rows, on: str, how: str, condition: Callable[[Row, Row], bool] | None = None
) -> list[Row]:
    """Join every row of a stream with a table. The join column comes first, then the stream's others, the table's."""
    others = [name for name in table[0] if name != on]
    joined: list[Row] = []
    for row in stream:
        first = {on: row[on], **row}
        found = [
            r for r in table if row[on] is not None and r[on] == row[on] and (condition is None or condition(row, r))
        ]
        if how in ("semi", "anti"):
            joined += [first] if bool(found) == (how == "semi") else []
            continue
        joined += [{**first, **{name: match[name] for name in others}} for match in found]
        if not found and how == "left":
            joined.append({**first, **dict.fromkeys(others)})
    return joined


def streams_join(
    inputs: Mapping[str, Rows], agree: Callable[[Mapping[str, Row]], bool], columns: Mapping[str, tuple[str, str]]
) -> list[Row]:
    """All combinations of one row of each input that agree; `columns` says which input's column each result's is."""
    found = []
    for combination in product(*inputs.values()):
        rows = dict(zip(inputs, combination, strict=True))
        if agree(rows):
            found.append({name: rows[source][column] for name, (source, column) in columns.items()})
    return found


def same_key(rows: Mapping[str, Row], key: str = "k") -> bool:
    """Whether all rows have one key, which is not NULL."""
    keys = {row[key] for row in rows.values()}
    return len(keys) == 1 and None not in keys


def within(rows: Mapping[str, Row], seconds: float) -> bool:
    """Whether no two event times are further apart; column ``t<input>`` has them."""
    times = [row[f"t{name}"] for name, row in rows.items()]
    return None not in times and (max(times) - min(times)).total_seconds() <= seconds


def first_rows(rows: Iterable[Row], key: Sequence[str]) -> list[Row]:
    """The first row of each key; rows with a NULL in the key all stay."""
    seen = set()
    kept = []
    for row in rows:
        value = tuple(row[name] for name in key)
        if None in value or value not in seen:
            kept.append(row)
        seen.add(value)
    return kept


def with_changes(rows: Iterable[Row], key: Callable[[Row], Any], columns: Sequence[str]) -> list[Row]:
    """Rows with a column ``change``: how the columns differ from those of the row of the same key before."""
    last: dict[Any, list[Any]] = {}
    told = []
    for row in rows:
        values = [row[name] for name in columns]
        is_known = key(row) is not None and key(row) in last
        change = "inserted" if not is_known else "unchanged" if last[key(row)] == values else "changed"
        last[key(row)] = values
        told.append({**row, "change": change})
    return told


def dimension(batches: Sequence[Rows], key: str, time: str, column: str, end: Any) -> list[Row]:
    """A dimension of type 2: each key's values with the spans in which they held, micro-batch after micro-batch."""
    versions: dict[Any, dict[Any, Any]] = {}
    for rows in batches:
        for row in sorted((r for r in rows if r[key] is not None and r[time] is not None), key=lambda r: r[time]):
            known = versions.setdefault(row[key], {})
            before = [begin for begin in known if begin <= row[time]]
            if not before or known[max(before)] != row[column]:
                known[row[time]] = row[column]
    spans = []
    for value, known in versions.items():
        begins = sorted(known)
        for begin, until in zip(begins, [*begins[1:], end], strict=True):
            spans.append({key: value, column: known[begin], "valid_from": begin, "valid_to": until})
    return spans
