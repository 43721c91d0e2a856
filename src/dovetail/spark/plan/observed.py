"""Metrics reported by tasks, collected by Spark in the progress of a streaming query."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.core.errors import PlanError
from dovetail.runtime.metrics_row import COUNTERS, METRICS_COLUMN

__all__ = ["observed", "with_metrics"]


def with_metrics(schema: T.StructType) -> T.StructType:
    """The schema of results with a metrics column."""
    counters = [T.StructField(name, T.LongType()) for name in (*COUNTERS, "relation_version")]
    return T.StructType([*schema, T.StructField(METRICS_COLUMN, T.StructType(counters))])


def observed(results: DataFrame, name: str) -> DataFrame:
    """Results without the tasks' metrics rows, which Spark aggregates under this name."""
    if not isinstance(name, str) or not name:
        raise PlanError(f"metrics={name!r} is not a name.", hint="Pass the name to report the metrics under.")
    reported = F.col(METRICS_COLUMN)
    sums = [F.sum(reported[counter]).alias(counter) for counter in COUNTERS]
    versions = F.max(reported["relation_version"]).alias("relation_version")
    return results.observe(name, *sums, versions).where(reported.isNull()).drop(METRICS_COLUMN)
