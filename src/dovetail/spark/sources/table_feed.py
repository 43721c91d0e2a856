"""What the feeds of table formats share: their columns, and batches in them.

A feed has the table's columns and those of `feed_columns`. Its sequence is twice the table's version, plus one for rows
that are written: of a version that removes a row of a key and writes another one, the written row is the last.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from dovetail.core.errors import PlanError, SchemaError
from dovetail.spark.plan.feed_columns import FEED_COLUMNS, OPERATION, PROBLEM, SEQUENCE

__all__ = ["DELETE", "UPSERT", "feed_schema", "groups", "require_same_types", "shaped", "spark_columns"]

DELETE, UPSERT = "d", "u"
_GROUPS = 8
"""Parts that the files of a micro-batch are read in, at most."""


def spark_columns(table: pa.Schema) -> T.StructType:
    """A table's columns as Spark has them."""
    plain = pa.schema([pa.field(field.name, _plain(field.type)) for field in table])
    found: T.StructType = from_arrow_schema(plain, prefer_timestamp_ntz=True)
    return found


def _plain(kind: pa.DataType) -> pa.DataType:
    """An Arrow type without the forms of it that only some libraries use."""
    t = pa.types
    if t.is_string_view(kind) or t.is_large_string(kind):
        return pa.string()
    if t.is_binary_view(kind) or t.is_large_binary(kind):
        return pa.binary()
    if t.is_timestamp(kind):
        return pa.timestamp("us", tz=kind.tz)
    if t.is_list(kind) or t.is_large_list(kind):
        return pa.list_(_plain(kind.value_type))
    if t.is_map(kind):
        return pa.map_(_plain(kind.key_type), _plain(kind.item_type))
    if t.is_struct(kind):
        return pa.struct([pa.field(part.name, _plain(part.type)) for part in kind])
    return kind


def feed_schema(table: pa.Schema, where: str) -> T.StructType:
    """The columns of a table's feed."""
    taken = [name for name in table.names if name in FEED_COLUMNS]
    if taken:
        raise PlanError(f"{where} has a column {taken[0]!r}, a name that this source uses.", hint="Rename it.")
    columns = spark_columns(table)
    return columns.add(OPERATION, T.StringType()).add(SEQUENCE, T.LongType()).add(PROBLEM, T.StringType())


def require_same_types(expected: T.StructType, table: pa.Schema, where: str, version: object) -> None:
    """Refuse a table that has lost a column since the feed was opened, or changed its type."""
    now = {field.name: field.dataType for field in spark_columns(table)}
    for field in expected:
        if field.name in FEED_COLUMNS:
            continue
        if field.name not in now:
            raise SchemaError(
                f"{where} has no column {field.name!r} any more, in version {version}.",
                hint="Name the columns to keep with columns=, and start with a new checkpoint.",
            )
        if _text(now[field.name]) != _text(field.dataType):
            raise SchemaError(
                f"Column {field.name!r} of {where} is {now[field.name].simpleString()} in version {version}; it was "
                f"{field.dataType.simpleString()}.",
                hint="Build the relation anew, and follow the table with a new checkpoint.",
            )


def _text(kind: T.DataType) -> str:
    return str(kind.simpleString())


def shaped(
    batches: Iterable[pa.RecordBatch], schema: T.StructType, operation: Any, sequence: Any
) -> Iterator[pa.RecordBatch]:
    """The batches in the feed's columns; ``operation`` and ``sequence`` are values, or functions of a batch."""
    target = to_arrow_schema(schema, timezone="UTC")
    for batch in batches:
        if batch.num_rows:
            own = [batch.column(f.name).cast(f.type) for f in target if f.name not in FEED_COLUMNS]
            rows = batch.num_rows
            op = operation(batch) if callable(operation) else pa.repeat(operation, rows)
            number = sequence(batch) if callable(sequence) else pa.repeat(pa.scalar(sequence, pa.int64()), rows)
            problem = pa.nulls(rows, pa.string())
            yield pa.RecordBatch.from_arrays([*own, op, number, problem], schema=target)


def groups(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Names in at most a few groups of about equal size.

    >>> [len(group) for group in groups([str(n) for n in range(20)])]
    [3, 3, 3, 3, 2, 2, 2, 2]
    """
    return [part for part in (tuple(names[n::_GROUPS]) for n in range(_GROUPS)) if part]
