"""A source that ticks: every trigger has a micro-batch, so that waiting rows make progress when nothing arrives."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dovetail.core.errors import PlanError

__all__ = ["CLOCK_COLUMN", "with_ticks", "without_ticks"]

CLOCK_COLUMN = "__clock"
"""True in the rows of the tick source, NULL in the stream's own."""


def with_ticks(df: DataFrame) -> DataFrame:
    """A streaming DataFrame with new input at every trigger; `without_ticks` returns its own rows."""
    if CLOCK_COLUMN in df.columns:
        raise PlanError(f"The stream has a column {CLOCK_COLUMN!r}, a name that flows use.", hint="Rename it.")
    # Not the source "rate": under available-now it ignores its limits.
    source = df.sparkSession.readStream.format("rate-micro-batch")
    ticks = source.option("rowsPerBatch", 1).option("numPartitions", 1).load()
    nothing = [F.lit(None).cast(field.dataType).alias(field.name) for field in df.schema]
    return df.withColumn(CLOCK_COLUMN, F.lit(None).cast("boolean")).union(
        ticks.select(*nothing, F.lit(True).alias(CLOCK_COLUMN))
    )


def without_ticks(df: DataFrame) -> DataFrame:
    """The stream's own rows of `with_ticks`. The source still ticks: its offsets count, not the rows read."""
    return df.where(F.col(CLOCK_COLUMN).isNull()).drop(CLOCK_COLUMN)
