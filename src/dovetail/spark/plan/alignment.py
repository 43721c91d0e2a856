"""Casts a stream's key columns to the types of a relation's key, so that equal keys have equal codes.

The relation's codes are computed from its own key types, so only the stream can be cast, while Spark's join casts both
sides to a common type. Both agree under two conditions. The stream's value, cast to the relation's type, must equal
itself in Spark's comparison; otherwise it has no equal in the relation, and its code is NULL. And no two values of the
relation's type may equal one value of the stream's, as 2^53 and 2^53 + 1 both equal a double; types that violate this
are refused, because an index would find one of several matches.
"""

from dataclasses import dataclass

from pyspark.errors import AnalysisException
from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.core.errors import PlanError
from dovetail.spark.plan.codes import quoted

__all__ = ["KeyColumn", "aligned_key", "is_aligned"]

_LOCAL_AND_ZONED = (T.TimestampType, T.TimestampNTZType)
_FLOATING = (T.FloatType, T.DoubleType)
_EXACT_IN_FLOAT = (T.ByteType, T.ShortType, T.BooleanType, *_FLOATING)
_DOUBLE_DIGITS = 15
_MOST_DIGITS = 38
_DIGITS = {T.ByteType: 3, T.ShortType: 5, T.IntegerType: 10, T.LongType: 20}


@dataclass(frozen=True)
class KeyColumn:
    """One key column on both sides, under the names of their owners."""

    column: str  # the stream's column in the DataFrame to align
    stream: T.StructField
    relation: T.StructField

    @property
    def described(self) -> str:
        """Both columns with their types, for messages."""
        return (
            f"stream column {self.stream.name!r} ({self.stream.dataType.simpleString()}) and the relation's key "
            f"{self.relation.name!r} ({self.relation.dataType.simpleString()})"
        )


def is_aligned(key: KeyColumn) -> bool:
    """Whether both sides have the same type, so that no cast is needed."""
    return bool(key.stream.dataType == key.relation.dataType)


def aligned_key(spark: SparkSession, key: KeyColumn) -> Column:
    """The stream's key column with the relation's type, NULL where no value of the relation can be equal.

    Raises a `PlanError` if Spark cannot compare the two, or an index on the relation would miss matches.
    """
    column = F.col(quoted(key.column))
    _refuse_collation(key)
    if is_aligned(key):
        return column
    _refuse_incomparable(spark, key)
    if _hides_matches(key.stream.dataType, key.relation.dataType):
        raise PlanError(
            f"{key.described}: several values of the relation's type can equal one value of the stream's, so an index "
            "on the relation would miss matches.",
            hint=f"Cast {key.stream.name!r} to {key.relation.dataType.simpleString()} first, or build the relation "
            "with the stream's type.",
        )
    is_ansi = spark.conf.get("spark.sql.ansi.enabled") == "true"
    cast = column.try_cast(key.relation.dataType) if is_ansi else column.cast(key.relation.dataType)
    return F.when(cast == column, cast)


def _hides_matches(stream: T.DataType, relation: T.DataType) -> bool:
    """Whether several values of the relation's type equal one of the stream's in Spark's comparison."""
    if isinstance(relation, T.StringType):
        # Text is cast to the other type: '7', '07' and ' 7' all equal 7.
        return not isinstance(stream, T.BinaryType | T.NullType)
    if isinstance(relation, _LOCAL_AND_ZONED) and isinstance(stream, _LOCAL_AND_ZONED):
        # An hour skipped by daylight saving has the same instant as the hour after it.
        return True
    if isinstance(relation, T.DecimalType) and isinstance(stream, T.DecimalType | T.NumericType):
        if isinstance(stream, _FLOATING):
            return bool(relation.precision > _DOUBLE_DIGITS)
        scale = stream.scale if isinstance(stream, T.DecimalType) else 0
        digits = stream.precision - scale if isinstance(stream, T.DecimalType) else _DIGITS[type(stream)]
        # Beyond the digits of a decimal, Spark rounds both sides.
        return bool(max(relation.precision - relation.scale, digits) + max(relation.scale, scale) > _MOST_DIGITS)
    if isinstance(relation, T.DecimalType) and isinstance(stream, T.StringType):
        return bool(relation.precision > _DOUBLE_DIGITS)
    if isinstance(stream, _FLOATING) and isinstance(relation, T.NumericType):
        is_int_as_double = isinstance(relation, T.IntegerType) and isinstance(stream, T.DoubleType)
        return not (isinstance(relation, _EXACT_IN_FLOAT) or is_int_as_double)
    return False


def _refuse_collation(key: KeyColumn) -> None:
    kind = key.stream.dataType
    if isinstance(kind, T.StringType) and kind != T.StringType():
        raise PlanError(
            f"stream column {key.stream.name!r} has the collation of {kind.simpleString()}: a relation's key is "
            "compared by its bytes.",
            hint=f"Cast it with collate({key.stream.name}, 'UTF8_BINARY') first.",
        )


def _refuse_incomparable(spark: SparkSession, key: KeyColumn) -> None:
    row = spark.range(0).select(
        F.lit(None).cast(key.stream.dataType).alias("stream"),
        F.lit(None).cast(key.relation.dataType).alias("relation"),
    )
    try:
        row.select(F.col("stream") == F.col("relation")).schema  # noqa: B018 (asks Spark to resolve the comparison)
    except AnalysisException:
        raise PlanError(
            f"{key.described} cannot be compared: Spark has no common type for them.", hint="Cast one of them."
        ) from None
