"""A small join shared by the tests of every operator: some cities, and a stream of requests for them."""

from dataclasses import replace
from typing import Any

import pyarrow as pa

from dovetail.core.errors import BudgetError
from dovetail.core.memory import Budget
from dovetail.joins import OPERATORS, JoinSpec, SemiStreamOperator
from dovetail.testing.batches import stream_batches
from dovetail.testing.shard import MemoryShard

__all__ = [
    "CITIES",
    "CITY_SCHEMA",
    "STREAM",
    "STREAM_SCHEMA",
    "batch_of",
    "minimum_of",
    "shard_of",
    "spec_of",
    "state_of",
]

CITIES = [
    {"id": 1, "city": "Rome", "since": 0, "until": 10},
    {"id": 2, "city": "Oslo", "since": 0, "until": 5},
    {"id": 2, "city": "Bergen", "since": 5, "until": 10},
    {"id": 3, "city": None, "since": 0, "until": 1},
]
CITY_SCHEMA = pa.schema({"id": pa.int64(), "city": pa.string(), "since": pa.int64(), "until": pa.int64()})
STREAM = [
    {"id": 2, "t": 4},
    {"id": 7, "t": 5},
    {"id": None, "t": 6},
    {"id": 1, "t": 20},
    {"id": 2, "t": 7},
]
STREAM_SCHEMA = pa.schema({"id": pa.int64(), "t": pa.int64()})


def shard_of(rows: list[dict[str, Any]], schema: pa.Schema = CITY_SCHEMA) -> MemoryShard:
    """A shard of these rows, keyed by id."""
    return MemoryShard.of_rows(rows, schema, lambda row: row["id"])


def spec_of(rows: list[dict[str, Any]], schema: pa.Schema = STREAM_SCHEMA, **options: Any) -> JoinSpec:
    """A join of a stream with these rows, by id."""
    options.setdefault("budget", Budget(50_000))
    options.setdefault("shard", shard_of(rows))
    options.setdefault("identity", {"relation": "cities", "version": 1, "shard": 0})
    coded = schema.insert(0, pa.field("__code", pa.int64()))
    return JoinSpec(stream_schema=coded, on=(("id", "id"),), **options)


def batch_of(rows: list[dict[str, Any]], schema: pa.Schema = STREAM_SCHEMA) -> pa.RecordBatch:
    """Stream tuples as one batch with codes."""
    (batch,) = stream_batches(rows, on="id", schema=schema)
    return batch


def minimum_of(kind: str, spec: JoinSpec) -> int:
    """The minimum budget of an operator, as named in its error for a smaller one."""
    minimum = None
    try:
        OPERATORS[kind](replace(spec, budget=Budget(1)))
    except BudgetError as refused:
        minimum = refused.minimum_bytes
    assert minimum is not None, f"{kind} must refuse a budget of 1 byte and name the minimum."
    return minimum


def state_of(operator: SemiStreamOperator) -> tuple[Any, ...]:
    """The full state of an operator, for comparison before and after a refused call."""
    saved = operator.snapshot()
    values = dict(saved.values)
    seconds = ("cpu_seconds", "disk_seconds")
    values["metrics"] = {name: value for name, value in values["metrics"].items() if name not in seconds}
    tables = {name: table.to_pylist() for name, table in saved.tables.items()}
    return saved.kind, saved.fingerprint, values, tables, operator.sizes(), operator.pending
