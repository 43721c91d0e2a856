"""Rows on their way to the shards of a step: one tick per shard added, sent to their shard, sorted there.

The tick makes sure that every task has a row to read its shard's number from, whatever arrived, so that every shard
writes its trailer in every micro-batch.
"""

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.relation.format import SHARD_COLUMN
from dovetail.spark.shard_job import TICK_COLUMN

__all__ = ["is_sortable", "routed"]


def routed(rows: DataFrame, shards: int, sort_by: Sequence[str]) -> DataFrame:
    """Rows with a column ``__shard``, each shard in one partition, sorted there.

    Sorted by the code and then by all else that can be, so that a task that runs twice sees the same rows in the same
    order, however they arrived.
    """
    others = [name for name in rows.columns if name != SHARD_COLUMN]
    ticks = rows.sparkSession.range(0, shards, 1, 1).select(
        F.col("id").cast("int").alias(SHARD_COLUMN),
        F.lit(True).alias(TICK_COLUMN),
        *(F.lit(None).cast(rows.schema[name].dataType).alias(name) for name in others),
    )
    stream = rows.select(SHARD_COLUMN, F.lit(None).cast("boolean").alias(TICK_COLUMN), *others)
    order = [F.col(TICK_COLUMN).asc_nulls_last(), *(F.col(name).asc_nulls_first() for name in sort_by)]
    return stream.union(ticks).repartitionById(shards, F.col(SHARD_COLUMN)).sortWithinPartitions(*order)


def is_sortable(kind: T.DataType) -> bool:
    """Whether Spark can sort by a column of this type."""
    match kind:
        case T.ArrayType():
            return is_sortable(kind.elementType)
        case T.StructType():
            return all(is_sortable(field.dataType) for field in kind)
        case T.MapType() | T.VariantType() | T.CalendarIntervalType():
            return False
        case _:
            return True
