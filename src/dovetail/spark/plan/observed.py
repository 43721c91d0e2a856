"""What tasks say of themselves, collected by Spark where its users look: in the progress of a streaming query."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.errors import PlanError
from dovetail.spark.metrics_row import COUNTERS, METRICS_COLUMN

__all__ = ["observed", "with_metrics"]


def with_metrics(schema: T.StructType) -> T.StructType:
    """The schema of results that have a column for what their task did."""
    counters = [T.StructField(name, T.LongType()) for name in (*COUNTERS, "relation_version")]
    return T.StructType([*schema, T.StructField(METRICS_COLUMN, T.StructType(counters))])


def observed(results: DataFrame, name: str) -> DataFrame:
    """Results without the rows in which tasks tell what they did, which Spark adds up under this name."""
    if not isinstance(name, str) or not name:
        raise PlanError(f"metrics={name!r} is not a name.", hint="Pass the name to report the metrics under.")
    told = F.col(METRICS_COLUMN)
    sums = [F.sum(told[counter]).alias(counter) for counter in COUNTERS]
    versions = F.max(told["relation_version"]).alias("relation_version")
    return results.observe(name, *sums, versions).where(told.isNull()).drop(METRICS_COLUMN)
