"""Settings of Spark's that hold for one job of a flow, where it is known that they change nothing but its speed."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from pyspark.sql import SparkSession
from pyspark.sql import types as T

__all__ = ["job_settings", "row_bytes", "set_for_a_while"]

_ADAPTIVE = "spark.sql.adaptive.enabled"
_MOST_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_MOST_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_WITHOUT_LIMIT = str(2**31 - 1)
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
    """What to set for a job that has steps only, whose rows go to Python with these columns.

    They go there for the steps alone if the sink stages in the JVM.

    Spark plans it before it runs and not again after every shuffle: there is nothing that it could change.

    Spark ends a batch of rows for Python where it has so many bytes, and for that adds up the bytes of all columns anew
    for every row, which took half of the CPU time of such a task. Where so many rows cannot have so many bytes, it need
    not look.
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


def row_bytes(schema: T.DataType) -> int | None:
    """The most bytes of a row in Arrow's format, with a byte per column for whether it is NULL; None: no such bound.

    Examples
    --------
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
    """Change settings of a session, and put them back."""
    before = {name: str(spark.conf.get(name)) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)
