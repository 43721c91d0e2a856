"""Columns of every Spark type come back from a relation as they went in, whatever the session's time zone."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail import Relation
from dovetail.relation import compute_codes
from dovetail.spark.plan.payload import nullable_schema
from dovetail.spark.plan.relation_jobs import read, spark_schema

POINT = "X'0101000000000000000000F03F0000000000000040'"

# name: a value, as SQL. Every third row has NULL instead.
PAYLOADS = {
    "boolean": "id % 2 = 0",
    "byte": "cast(id - 128 as byte)",
    "short": "cast(id - 32768 as short)",
    "int": "cast(id - 2147483648 as int)",
    "long": "id - 9223372036854775807 - 1",
    "float": "if(id = 0, float('NaN'), float('-0.0'))",
    "double": "if(id = 0, double('-Infinity'), double('-0.0'))",
    "decimal": "cast('-99999999999999999999.000000000000000001' as decimal(38,18))",
    "short decimal": "cast(id / 7 as decimal(5,2))",
    "string": "repeat('é', cast(id as int) * 20)",
    "char": "cast('a' as char(5))",
    "varchar": "cast('a' as varchar(5))",
    "collated": "collate('aB', 'UTF8_LCASE')",
    "binary": "unhex('00ff')",
    "date": "date'1582-10-04' + cast(id as int)",
    "far date": "date'+99999-01-01'",
    "timestamp": "timestamp'1883-11-18 12:03:57.999999 UTC' + make_dt_interval(0, id)",
    "far timestamp": "timestamp'+200000-01-01 00:00:00 UTC'",
    "timestamp_ntz": "timestamp_ntz'2024-03-10 02:30:00.123456'",
    "time": "time'23:59:59.999999'",
    "day-time": "interval '-1 02:03:04.000005' day to second",
    "hour": "interval '5' hour",
    "year-month": "make_ym_interval(-1, -2)",
    "year": "interval '-3' year",
    "month": "interval '14' month",
    "variant": """parse_json('{"a": [1, null, "x"]}')""",
    "array": "array(1, null, cast(id as int))",
    "array never null": "array(1, 2)",
    "empty array": "array()",
    "map": "map('a', array(1.5), 'b', null)",
    "struct": "named_struct('a', id, 'b c', named_struct('d.e', 'x', 'n', null))",
    "struct never null": "struct(id, 'x' as s)",
    "nested timestamps": "array(struct(timestamp'1900-01-01 00:00:00' as t, timestamp_ntz'2024-03-10 02:30:00' as n))",
    "nested intervals": """array(
        struct(make_ym_interval(1, 2) as ym, null as nothing),
        struct(null as ym, null as nothing),
        null)""",
    "map of intervals": "map(interval '1' year, interval '2' month, interval '-2' year, null)",
    "map of day-time": "map(1, interval '1 02:03:04' day to second)",
    "nested variant": "struct(array(parse_json('1'), null) as v)",
    "nested time": "array(time'12:34:56.1', null)",
    "nested collated": "array(collate('aB', 'UTF8_LCASE'))",
    "geometry": f"st_geomfromwkb({POINT})",
    "geography": f"st_geogfromwkb({POINT})",
}
NAMES = ["plain", "a.b", "with space", "back`tick", "größe", "SELECT", '"quoted"', "semi;colon"]


@pytest.fixture
def zone(spark: SparkSession, request: pytest.FixtureRequest) -> Iterator[str]:
    """A session whose clocks go forward at 2024-03-10 02:00; then UTC again."""
    settings = {
        "spark.sql.session.timeZone": request.param,
        "spark.sql.timeType.enabled": "true",
        # For seven rows of fifty columns, compiling takes most of a minute.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    }
    for name, value in settings.items():
        spark.conf.set(name, value)
    yield request.param
    for name in settings:
        spark.conf.unset(name)


def source(spark: SparkSession) -> DataFrame:
    rows = spark.range(7).withColumnRenamed("id", "k").withColumn("id", F.col("k"))
    columns = [F.expr(f"if(id % 3 = 2, null, {sql})").alias(f"p {name}") for name, sql in PAYLOADS.items()]
    odd = [F.expr(f"id + {number}").alias(name, metadata={"comment": name}) for number, name in enumerate(NAMES)]
    # Not `array(null)` and not a column of NULL: both are of the type void.
    return rows.select("k", *columns, F.lit(None).alias("void"), F.expr("array(null)").alias("voids"), *odd)


def as_text(df: DataFrame) -> list[list[str | None]]:
    """Every value as text made by the JVM: Python has no form for some of them."""

    def text(field: T.StructField) -> F.Column:
        column = F.col("`" + field.name.replace("`", "``") + "`")
        if isinstance(field.dataType, T.BinaryType):
            return F.hex(column)
        if isinstance(field.dataType, T.GeometryType | T.GeographyType):
            return F.hex(F.st_asbinary(column))
        if isinstance(field.dataType, T.VariantType) or "variant" in field.dataType.simpleString():
            return F.to_json(F.struct(column))
        return column.cast("string")

    rows = df.select(*(text(field).alias(f"c{number}") for number, field in enumerate(df.schema))).collect()
    return sorted((list(row) for row in rows), key=str)


@pytest.mark.parametrize("zone", ["America/New_York"], indirect=True)
def test_every_type_survives_a_round_trip(spark: SparkSession, tmp_path: Path, zone: str) -> None:
    df = source(spark)
    relation = Relation.build(df, tmp_path / "r", on="k", shards=3)
    back = read(relation, spark)
    expected = nullable_schema(df.schema)
    assert spark_schema(relation) == expected
    assert [(f.name, f.dataType) for f in back.schema] == [(f.name, f.dataType) for f in expected]
    assert [f.metadata for f in back.schema] == [f.metadata for f in df.schema]
    wanted, found = as_text(df), as_text(back)
    for row, other in zip(wanted, found, strict=True):
        for field, value, other_value in zip(df.schema, row, other, strict=True):
            assert other_value == value, field.name
    # Once more round: written by Arrow, read and written by Spark in another zone, read in this one.
    upserted = relation.upsert(relation.to_arrow())
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    again = relation.upsert(read(upserted, spark))
    assert again.stats.rows == 7
    spark.conf.set("spark.sql.session.timeZone", zone)
    assert as_text(read(again, spark)) == wanted


def test_user_defined_type_survives(spark: SparkSession, tmp_path: Path) -> None:
    schema = T.StructType([T.StructField("k", T.IntegerType()), T.StructField("at", VectorUDT())])
    rows = [(1, Vectors.dense(1.0, 2.0)), (2, None), (3, Vectors.sparse(4, [1], [2.0]))]
    relation = Relation.build(spark.createDataFrame(rows, schema), tmp_path / "r", on="k", shards=1)
    back = read(relation, spark)
    assert back.schema == schema
    assert sorted(map(tuple, back.collect())) == rows


def test_relation_made_by_arrow_is_read_by_spark(spark: SparkSession, tmp_path: Path) -> None:
    table = pa.table(
        {
            "k": [1, 2, None],
            "at": pa.array([0, None, 1], pa.timestamp("us", tz="UTC")),
            "local": pa.array([0, None, 1], pa.timestamp("us")),
            "tags": pa.array([["a"], [], None], pa.list_(pa.string())),
            "counts": pa.array([[("x", 1)], None, []], pa.map_(pa.string(), pa.int32())),
            "for": pa.array([0, 1, None], pa.duration("us")),
            "row": pa.array([{"a": 1}, None, {"a": None}], pa.struct([("a", pa.int16())])),
        }
    )
    relation = Relation.build(table, tmp_path / "r", on="k", shards=2)
    back = read(relation, spark)
    types = {f.name: f.dataType.simpleString() for f in back.schema}
    assert types == {
        "k": "bigint",
        "at": "timestamp",
        "local": "timestamp_ntz",
        "tags": "array<string>",
        "counts": "map<string,int>",
        "for": "interval day to second",
        "row": "struct<a:smallint>",
    }
    wanted = as_text(back)
    assert len(wanted) == 3
    # A DataFrame of the same columns can be upserted into it, nested ones included.
    changed = relation.upsert(back.where("k is not null"))
    assert as_text(read(changed, spark)) == wanted
    assert compute_codes(changed.to_arrow(), ["k"]).null_count == 1
