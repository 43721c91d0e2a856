"""Relations whose copies are kept: what is in each version, in plain rows, and how it is written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa

import dovetail as dt

Row = dict[str, Any]
BEGIN = datetime(2026, 1, 1, 12, tzinfo=UTC)

TYPES = pa.schema(
    {
        "id": pa.int64(),
        "name": pa.string(),
        "price": pa.decimal128(12, 3),
        "day": pa.date32(),
        "moment": pa.timestamp("us", "UTC"),
        "local": pa.timestamp("us"),
        "raw": pa.binary(),
        "parts": pa.list_(pa.int64()),
        "place": pa.struct({"x": pa.int32(), "y": pa.string()}),
        "labels": pa.map_(pa.string(), pa.int64()),
        "ratio": pa.float64(),
        "small": pa.int16(),
        "flag": pa.bool_(),
    }
)
COMPOSITE = pa.schema({"shop": pa.string(), "number": pa.int32(), "item": pa.string(), "amount": pa.int64()})


@dataclass(frozen=True)
class Change:
    """One write: ``build``, ``append``, ``upsert``, ``delete`` (of the rows' keys) or ``overwrite``."""

    operation: str
    rows: list[Row]


@dataclass(frozen=True)
class RelationCase:
    """A relation, as the changes that made it.

    `changes` are in the copy; `later` is what a test does to it.
    """

    name: str
    schema: pa.Schema
    key: tuple[str, ...]
    shards: int
    is_unique: bool
    changes: list[Change]
    later: list[Change] = field(default_factory=list)

    def apply(self, path: Path, change: Change) -> dt.Relation:
        """Make one change, as a new version."""
        table = pa.Table.from_pylist(change.rows, schema=self.schema)
        if change.operation in ("build", "overwrite"):
            mode = "error" if change.operation == "build" else "overwrite"
            return dt.Relation.build(
                table, path, on=list(self.key), shards=self.shards, unique=self.is_unique, mode=mode
            )
        if change.operation == "delete":
            table = table.select(list(self.key))
        write: Callable[[pa.Table], dt.Relation] = getattr(dt.Relation.open(path), change.operation)
        return write(table)

    def rows_after(self, before: list[Row], change: Change) -> list[Row]:
        """What a version holds, given the version before: a row whose key has a NULL equals no other."""
        if change.operation in ("build", "overwrite"):
            return list(change.rows)
        if change.operation == "append":
            return [*before, *change.rows]
        keys = {self._key(row) for row in change.rows if None not in self._key(row)}
        kept = [row for row in before if self._key(row) not in keys]
        return kept if change.operation == "delete" else [*kept, *change.rows]

    def versions(self) -> list[list[Row]]:
        """The rows of every version in the copy, the oldest first."""
        found: list[list[Row]] = []
        for change in self.changes:
            found.append(self.rows_after(found[-1] if found else [], change))
        return found

    def _key(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in self.key)


def typed_row(key: int | None, turn: int) -> Row:
    """A row with a value of every kind, which tells the change that wrote it; NULLs now and then."""
    number = (key or 0) % 10_000 * 7 + turn
    is_null = number % 9 == 4
    return {
        "id": key,
        "name": None if is_null else f"näme {key}.{turn}",
        "price": None if is_null else Decimal(number * 1001 - 5000).scaleb(-3),
        "day": date(2024, 2, 28) + timedelta(days=number % 40),
        "moment": BEGIN + timedelta(microseconds=number * 1_000_001),
        "local": None if is_null else (BEGIN + timedelta(days=number)).replace(tzinfo=None),
        "raw": None if is_null else bytes([number % 256, 0, 255]),
        "parts": None if is_null else [number, None, turn][: number % 4],
        "place": {"x": number % 100, "y": None if number % 5 == 0 else f"y{number}"},
        "labels": [(f"l{turn}", number)] if number % 3 else [],
        "ratio": float("nan") if number % 11 == 0 else -0.0 if number % 13 == 0 else number / 3,
        "small": number % 300 - 150,
        "flag": None if is_null else number % 2 == 0,
    }


def composite_row(number: int, turn: int) -> Row:
    """A row of a key that several have; NULLs in both parts of the key now and then."""
    return {
        "shop": None if number % 31 == 3 else ("north", "süd", "")[number % 3],
        "number": None if number % 29 == 5 else number % 12 - 6,
        "item": f"i{number}.{turn}",
        "amount": number * 10 + turn,
    }


RELATIONS = [
    RelationCase(
        "relation-types",
        TYPES,
        ("id",),
        2,
        True,
        [
            Change("build", [typed_row(key, 1) for key in range(-10, 40)]),
            Change("upsert", [typed_row(key, 2) for key in range(30, 50, 2)]),
            Change("delete", [typed_row(key, 0) for key in (-10, -7, 0, 31, 32, 39, 5_000)]),
            Change("upsert", [typed_row(key, 3) for key in (-7, -6, 32, 48, 1 << 60)]),
            Change("append", [typed_row(key, 4) for key in (-1_000, 5_000)]),
        ],
        [
            Change("upsert", [typed_row(key, 5) for key in (-1_000, -9, 32, 7_000)]),
            Change("delete", [typed_row(key, 0) for key in (48, 1 << 60)]),
        ],
    ),
    RelationCase(
        "relation-composite",
        COMPOSITE,
        ("shop", "number"),
        1,
        False,
        [
            Change("build", [composite_row(number, 1) for number in range(80)]),
            Change("append", [composite_row(number, 2) for number in range(60, 90)]),
            Change("upsert", [composite_row(number, 3) for number in (1, 1, 2, 37)]),
            Change("delete", [composite_row(number, 0) for number in (0, 4, 7)]),
            Change("overwrite", [composite_row(number, 5) for number in range(50, 100)]),
            Change("upsert", [composite_row(number, 6) for number in range(67, 77)]),
        ],
        [Change("upsert", [composite_row(number, 7) for number in (67, 68, 68)])],
    ),
]
