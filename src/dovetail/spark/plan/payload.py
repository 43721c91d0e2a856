"""Encodes columns whose Spark type has no Arrow form, on their way into a relation and back.

Spark passes every type to Python as Arrow data, with three exceptions. Year-month intervals travel as a number of
months. The void type travels as a boolean, because Spark gives its Arrow arrays a wrong length in structs inside
arrays. Calendar intervals are refused, as by Spark itself.
"""

from collections.abc import Callable, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.core.errors import SchemaError
from dovetail.spark.plan.codes import quoted

Change = Callable[[Column, T.DataType], Column]


def encoded_schema(schema: T.StructType) -> T.StructType:
    """``schema`` with every type that Arrow cannot carry replaced by its encoding."""
    encoded = _encoded_type(schema, "")
    assert isinstance(encoded, T.StructType)
    return encoded


def nullable_schema(schema: T.StructType) -> T.StructType:
    """``schema`` with NULLs allowed everywhere, as in Spark's own file sources.

    A later upsert may contain NULLs, and Spark computes wrong results if data breaks a NOT NULL promise.
    """
    nullable = _nullable_type(schema)
    assert isinstance(nullable, T.StructType)
    return nullable


def encode(df: DataFrame) -> DataFrame:
    """``df`` with encoded columns."""
    return df.select(
        *(_encode(F.col(quoted(f.name)), f.dataType).alias(f.name, metadata=f.metadata) for f in df.schema)
    )


def encoded_column(column: Column, kind: T.DataType) -> Column:
    """A column of this type, encoded."""
    return _encode(column, kind)


def decode(df: DataFrame, schema: T.StructType) -> DataFrame:
    """The inverse of :func:`encode`: ``df`` with the types of ``schema``."""
    return df.select(*decoded_columns(schema, schema.names))


def decoded_columns(schema: T.StructType, names: Sequence[str]) -> list[Column]:
    """The columns that :func:`decode` selects, under other names; for callers that reuse them."""
    return [
        _decode(F.col(quoted(f.name)), f.dataType).alias(name, metadata=f.metadata)
        for f, name in zip(schema, names, strict=True)
    ]


def is_plain(kind: T.DataType) -> bool:
    """Whether columns of this type need no encoding."""
    return bool(_encoded_type(kind, "") == kind)


def _encoded_type(kind: T.DataType, where: str) -> T.DataType:
    match kind:
        case T.YearMonthIntervalType():
            return T.IntegerType()
        case T.NullType():
            return T.BooleanType()
        case T.CalendarIntervalType():
            raise SchemaError(
                f"column {where!r} is a calendar interval, which Spark cannot store either: cast it to a year-month or "
                "day-time interval."
            )
        case T.ArrayType():
            return T.ArrayType(_encoded_type(kind.elementType, where), kind.containsNull)
        case T.MapType():
            return T.MapType(
                _encoded_type(kind.keyType, where),
                _encoded_type(kind.valueType, where),
                kind.valueContainsNull,
            )
        case T.StructType():
            fields = [
                T.StructField(f.name, _encoded_type(f.dataType, where or f.name), f.nullable, f.metadata) for f in kind
            ]
            return T.StructType(fields)
        case _:
            return kind


def _nullable_type(kind: T.DataType) -> T.DataType:
    match kind:
        case T.ArrayType():
            return T.ArrayType(_nullable_type(kind.elementType), True)
        case T.MapType():
            return T.MapType(_nullable_type(kind.keyType), _nullable_type(kind.valueType), True)
        case T.StructType():
            return T.StructType([T.StructField(f.name, _nullable_type(f.dataType), True, f.metadata) for f in kind])
        case _:
            return kind


def _encode(column: Column, kind: T.DataType) -> Column:
    if is_plain(kind):
        return column
    if isinstance(kind, T.YearMonthIntervalType):
        years, months = F.extract(F.lit("YEAR"), column), F.extract(F.lit("MONTH"), column)
        if kind.endField == T.YearMonthIntervalType.YEAR:
            return (years * 12).cast("int")
        if kind.startField == T.YearMonthIntervalType.MONTH:
            full = column.cast("interval year to month")
            years, months = F.extract(F.lit("YEAR"), full), F.extract(F.lit("MONTH"), full)
        return (years * 12 + months).cast("int")
    if isinstance(kind, T.NullType):
        return F.lit(None).cast("boolean")
    return _rebuild(column, kind, _encode)


def _decode(column: Column, kind: T.DataType) -> Column:
    if is_plain(kind):
        return column
    if isinstance(kind, T.YearMonthIntervalType):
        return F.make_ym_interval(F.lit(0), column).cast(kind)
    if isinstance(kind, T.NullType):
        return F.lit(None)
    return _rebuild(column, kind, _decode)


def _rebuild(column: Column, kind: T.DataType, change: Change) -> Column:
    match kind:
        case T.ArrayType():
            return F.transform(column, lambda element: change(element, kind.elementType))
        case T.MapType():
            pairs = F.transform(
                F.map_entries(column),
                lambda pair: F.struct(
                    change(pair["key"], kind.keyType).alias("key"),
                    change(pair["value"], kind.valueType).alias("value"),
                ),
            )
            return F.map_from_entries(pairs)
        case T.StructType():
            fields = [change(column.getField(f.name), f.dataType).alias(f.name) for f in kind]
            return F.when(column.isNotNull(), F.struct(*fields))
        case _:
            raise SchemaError(f"type {kind.simpleString()} cannot be stored.")
