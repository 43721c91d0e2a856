"""The join code and the shard of a row as Spark expressions, computed in the JVM."""

from collections.abc import Sequence

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.core.errors import SchemaError
from dovetail.relation.format import CodeKind

INTEGRAL = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)


def quoted(name: str) -> str:
    """A column name quoted for Spark's parser."""
    return "`" + name.replace("`", "``") + "`"


def check_key_columns(schema: T.StructType, key: Sequence[str]) -> None:
    """Refuse key columns that are not compared by their bytes, or that change type on their way to Python."""
    for name in key:
        kind = schema[name].dataType
        if isinstance(kind, T.YearMonthIntervalType):
            raise SchemaError(
                f"column {name!r} of type {kind.simpleString()} cannot be a key: use an integral, string, binary, "
                "boolean, float, double, decimal, date or timestamp column."
            )
        if isinstance(kind, T.StringType) and kind != T.StringType():
            raise SchemaError(
                f"column {name!r} has the collation of {kind.simpleString()}: a key is compared by its bytes. Cast "
                f"it with collate({name}, 'UTF8_BINARY') first."
            )


def code_column(schema: T.StructType, key: Sequence[str], kind: CodeKind) -> Column:
    """The code of a row; NULL if any key column is NULL."""
    columns = [F.col(quoted(name)) for name in key]
    if kind == "xxhash64":
        no_null = columns[0].isNotNull()
        for column in columns[1:]:
            no_null = no_null & column.isNotNull()
        return F.when(no_null, F.xxhash64(*columns))
    only = schema[key[0]].dataType
    if isinstance(only, INTEGRAL):
        return columns[0].cast("long")
    if isinstance(only, T.DateType):
        return F.unix_date(columns[0]).cast("long")
    if isinstance(only, T.TimestampNTZType):
        return _local_micros(columns[0])
    return F.unix_micros(columns[0])


def shard_column(code: Column, shards: int) -> Column:
    """The shard of a code; rows without a code go to shard 0."""
    # Not coalesce: Spark's hash of a NULL is its seed, not a NULL.
    return F.when(code.isNotNull(), F.pmod(F.xxhash64(code), F.lit(shards))).otherwise(F.lit(0)).cast("int")


def _local_micros(moment: Column) -> Column:
    """Microseconds of a timestamp without time zone, computed from its parts: Spark's conversions use the session's
    time zone, which has hours that do not exist.
    """
    seconds = F.unix_date(moment.cast("date")).cast("long") * 86_400 + F.hour(moment) * 3_600 + F.minute(moment) * 60
    micros = (F.extract(F.lit("SECOND"), moment) * 1_000_000).cast("long")
    return seconds * 1_000_000 + micros
