"""Spark settings for a flow or one of its jobs, used only if they change nothing but speed."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

__all__ = ["job_settings", "row_bytes", "set_for_a_while", "stream_settings"]

_ADAPTIVE = "spark.sql.adaptive.enabled"
_MOST_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_MOST_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_WITHOUT_LIMIT = str(2**31 - 1)
_PRUNES_STREAMS = "spark.sql.optimizer.pruneFiltersCanPruneStreamingSubplan"
_STATELESS = {
    "EventTimeWatermark",
    "Filter",
    "Generate",
    "MapInArrow",
    "MapInPandas",
    "Project",
    "StreamingRelation",
    "StreamingRelationV2",
    "SubqueryAlias",
    "Union",
    "View",
}
_WIDTHS: Mapping[type[T.DataType], int] = {
    T.BooleanType: 1,
    T.ByteType: 1,
    T.ShortType: 2,
    T.IntegerType: 4,
    T.LongType: 8,
    T.FloatType: 4,
    T.DoubleType: 8,
    T.DateType: 4,
    T.TimestampType: 8,
    T.TimestampNTZType: 8,
    T.DayTimeIntervalType: 8,
    T.DecimalType: 16,
}


def job_settings(spark: SparkSession, schemas: Iterable[T.StructType], stages_in_jvm: bool) -> dict[str, str]:
    """Settings for a job that has only steps, whose rows go to Python with these columns.

    Adaptive planning is off: Spark would plan again after every shuffle, with nothing to change.

    Spark limits the bytes of a batch for Python, and for that sums the bytes of all columns again for every row, which
    took half of the CPU time of such a task. If the maximum number of rows cannot reach the limit, the limit is lifted.
    This requires that the sink stages in the JVM, so that no other rows go to Python.
    """
    settings = {_ADAPTIVE: "false"}
    widths = [row_bytes(schema) for schema in schemas]
    limit = re.fullmatch(r"(\d+)b?", str(spark.conf.get(_MOST_BYTES)))
    rows = int(str(spark.conf.get(_MOST_ROWS)))
    known = [width for width in widths if width is not None]
    most_bytes = rows * max(known, default=0)
    if stages_in_jvm and limit and rows > 0 and len(known) == len(widths) and most_bytes < int(limit[1]):
        settings[_MOST_BYTES] = _WITHOUT_LIMIT
    return settings


def stream_settings(df: DataFrame) -> dict[str, str]:
    """Settings while a flow with this input is started; its micro-batches inherit them.

    No row of the tick source is ever read, see `dovetail.spark.flow.ticks`. Spark knows that, but keeps its branch of
    the plan, and with it a task that only starts Python if the first step works in place: on two cores, two partitions
    took as long as four. Spark keeps it for stateful operators, which must run in every micro-batch. If the input has
    none, the branch is pruned.
    """
    if not _is_stateless(df._jdf.queryExecution().analyzed()):
        return {}
    try:
        df.sparkSession.conf.get(_PRUNES_STREAMS)
    except PySparkException:
        return {}  # a Spark that has no such setting
    return {_PRUNES_STREAMS: "true"}


def _is_stateless(plan: Any) -> bool:
    children = plan.children()
    return plan.nodeName() in _STATELESS and all(_is_stateless(children.apply(n)) for n in range(children.size()))


def row_bytes(schema: T.DataType) -> int | None:
    """The maximum bytes of a row in Arrow's format, with a validity byte per column; None if there is no bound.

    >>> row_bytes(T.StructType().add("k", "long").add("at", "timestamp"))
    19
    >>> row_bytes(T.StructType().add("k", "long").add("name", "string")) is None
    True
    """
    if not isinstance(schema, T.StructType):
        width = _WIDTHS.get(type(schema))
        return None if width is None else width + 1
    widths = [row_bytes(field.dataType) for field in schema]
    known = [width for width in widths if width is not None]
    return sum(known) + 1 if len(known) == len(widths) else None


@contextmanager
def set_for_a_while(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Change settings of a session, and restore them."""
    before = {name: str(spark.conf.get(name)) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)
