"""Sends rows to the shards of a step, with one tick per shard.

The tick guarantees that every task has a row to read its shard's number from, so that every shard writes its trailer in
every micro-batch. It is recognised by its number: -1 - n for shard n. A row's number is its shard, or, if a step tags
its rows, ``tag * shards + shard``.
"""

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.relation.format import SHARD_COLUMN

__all__ = ["Router", "is_sortable"]


class Router:
    """Sends rows to the shards of a step; within a shard sorted by ``sort_by``, or in any order if it is None.

    Sorted, a task that runs twice sees the same rows in the same order, however they arrived. The columns are described
    to the JVM once, not in every micro-batch. ``sort_first`` is an SQL expression, a number that is never NULL, to sort
    by first: Spark compares the first sort key as a plain number, and only equal ones by the rows themselves. Sorting
    by the tick first, which almost no row has, would make it compare rows every time.
    """

    def __init__(
        self, schema: T.StructType, shards: int, sort_by: Sequence[str] | None, sort_first: str | None = None
    ) -> None:
        others = [field for field in schema if field.name != SHARD_COLUMN]
        self.schema, self._shards = schema, shards
        self._ticks = [
            (-1 - F.col("id")).cast("int").alias(SHARD_COLUMN),
            *(F.lit(None).cast(field.dataType).alias(field.name) for field in others),
        ]
        # Spark would have to analyse one more selection in every micro-batch.
        self._rows = None
        if schema.names[0] != SHARD_COLUMN:
            self._rows = [F.col(SHARD_COLUMN), *(F.col(field.name) for field in others)]
        # The tick comes first, whatever rows are sorted by.
        first = F.col(SHARD_COLUMN).asc_nulls_first()
        if sort_first is not None:
            first = F.expr(f"CASE WHEN {SHARD_COLUMN} >= 0 THEN {sort_first} END").asc_nulls_first()
        self._order = None
        if sort_by is not None:
            self._order = [first, *(F.col(name).asc_nulls_first() for name in sort_by)]
        self._tick_rows: DataFrame | None = None
        self._shard = F.expr(
            f"CASE WHEN {SHARD_COLUMN} < 0 THEN -1 - {SHARD_COLUMN} ELSE {SHARD_COLUMN} % {shards} END"
        )

    def route(self, rows: DataFrame) -> DataFrame:
        """The rows and the shards' ticks, each shard in one partition."""
        if self._tick_rows is None:
            self._tick_rows = rows.sparkSession.range(0, self._shards, 1, 1).select(*self._ticks)
        together = (rows if self._rows is None else rows.select(*self._rows)).union(self._tick_rows)
        placed = together.repartitionById(self._shards, self._shard)
        return placed if self._order is None else placed.sortWithinPartitions(*self._order)


def is_sortable(kind: T.DataType) -> bool:
    match kind:
        case T.ArrayType():
            return is_sortable(kind.elementType)
        case T.StructType():
            return all(is_sortable(field.dataType) for field in kind)
        case T.MapType() | T.VariantType() | T.CalendarIntervalType():
            return False
        case _:
            return True
