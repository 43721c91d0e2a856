"""Writing relations with Spark: the same codes, shards and rows as without it, and the same clean errors."""

import datetime as dt
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dovetail import Relation
from dovetail.core.errors import PlanError, RelationError, RelationNotFound, SchemaError
from dovetail.kernels.spark_hash import shard_of_codes
from dovetail.relation import compute_codes
from dovetail.relation.keys import code_kind
from dovetail.spark.plan.codes import code_column, shard_column
from dovetail.spark.plan.relation_jobs import DataFrameSource, read
from dovetail.testing.rows import assert_same_rows

# Key columns as SQL over `id`, 0 to 39; every seventh row has NULL instead.
KEYS = {
    "k_boolean": "id % 2 = 0",
    "k_byte": "cast(id - 20 as byte)",
    "k_short": "cast(id * 800 - 16000 as short)",
    "k_int": "cast(id * 100000000 - 2000000000 as int)",
    "k_long": "(id - 20) * 461168601842738790",
    "k_float": "array(float('NaN'), float('-0.0'), float('0.0'), float('-1.5'))[id % 4]",
    "k_double": "array(double('NaN'), double('-0.0'), double('0.0'), double('1e300'))[id % 4]",
    "k_narrow_decimal": "cast((id - 20) / 7 as decimal(18,6))",
    "k_wide_decimal": "cast(pow(-10, id % 20) * (id + 1) as decimal(38,10))",
    "k_string": "repeat('é', cast(id as int))",
    "k_binary": "cast(repeat('x', cast(id as int)) as binary)",
    "k_date": "date'1969-12-20' + cast(id as int)",
    "k_timestamp": "timestamp'1969-12-31 23:59:50.999999 UTC' + make_dt_interval(0, id % 5, 0, id)",
    # New York's clocks go forward over 02:30 and back over 01:30.
    "k_ntz_gap": "timestamp_ntz'2024-03-10 02:30:00.000001' + make_dt_interval(0, 0, id - 20)",
    "k_ntz_fold": "timestamp_ntz'2024-11-03 01:30:00.5' + make_dt_interval(0, 0, id - 20)",
    "k_ntz_old": "timestamp_ntz'0001-01-01 00:00:00.000001' + make_dt_interval(id * 1000, id)",
}
COMPOSITES = [
    ["k_int", "k_string"],
    ["k_double", "k_date", "k_wide_decimal"],
    ["k_timestamp", "k_boolean", "k_ntz_gap"],
]
SHARDS = 5


@pytest.fixture(scope="module")
def keys(spark: SparkSession) -> Iterator[DataFrame]:
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    columns = [F.expr(f"if(id % 7 = 3, null, {sql})").alias(name) for name, sql in KEYS.items()]
    yield spark.range(40).select("id", *columns)
    spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_codes_and_shards_made_in_the_jvm_are_those_made_here(keys: DataFrame) -> None:
    schema = DataFrameSource(keys).schema
    every_key = [[name] for name in KEYS] + COMPOSITES
    made = []
    for number, key in enumerate(every_key):
        code = code_column(keys.schema, key, code_kind(schema, key))
        made += [code.alias(f"code{number}"), shard_column(code, SHARDS).alias(f"shard{number}")]
    table = keys.select("*", *made).toArrow()
    kinds = set()
    for number, key in enumerate(every_key):
        codes = compute_codes(table.select(key).cast(pa.schema([schema.field(name) for name in key])), key)
        kinds.add(code_kind(schema, key))
        assert table.column(f"code{number}").to_pylist() == codes.to_pylist(), key
        shards = shard_of_codes(codes.fill_null(0).to_numpy(), SHARDS).tolist()
        expected = [0 if code is None else shard for code, shard in zip(codes.to_pylist(), shards, strict=True)]
        assert table.column(f"shard{number}").to_pylist() == expected, key
        assert codes.null_count >= 6
    assert kinds == {"value", "xxhash64"}


@pytest.mark.parametrize("key", [["k_ntz_gap"], ["k_timestamp", "k_string"]], ids=str)
def test_spark_and_arrow_change_each_others_relations(keys: DataFrame, tmp_path: Path, key: list[str]) -> None:
    rows = keys.select(*dict.fromkeys([*key, "k_string", "id"])).where(F.col(key[0]).isNotNull() | (F.col("id") == 3))
    by_spark = Relation.build(rows, tmp_path / "spark", on=key, shards=SHARDS)
    table = by_spark.to_arrow()
    by_arrow = Relation.build(table, tmp_path / "arrow", on=key, shards=SHARDS)
    assert by_arrow.schema == by_spark.schema
    expected = [[shard.rows, shard.distinct_codes, shard.null_key_rows] for shard in by_arrow.stats.shards]
    assert [[s.rows, s.distinct_codes, s.null_key_rows] for s in by_spark.stats.shards] == expected
    keyed = [row for row in table.to_pylist() if row[key[0]] is not None]
    new = {row["id"]: {**row, "id": row["id"] + 1_000} for row in keyed[::2]}
    wanted = [new.get(row["id"], row) for row in table.to_pylist()]
    some = pa.Table.from_pylist(list(new.values()), schema=table.schema)
    some_df = rows.where(F.col("id").isin(list(new))).withColumn("id", F.col("id") + 1_000)
    for relation, rows_given in ((by_spark, some), (by_arrow, some_df)):
        changed = relation.upsert(rows_given)
        assert_same_rows(changed.to_arrow().to_pylist(), wanted)
    gone = [row for row in wanted if row["id"] in {row["id"] for row in new.values()}]
    left = [row for row in wanted if row not in gone]
    for relation, rows_given in ((by_spark, some_df.select(*key)), (by_arrow, some.select(key))):
        changed = relation.delete(rows_given)
        assert_same_rows(changed.to_arrow().to_pylist(), left)
    appended = by_arrow.append(some_df.select(*reversed(some_df.columns)))
    assert_same_rows(appended.to_arrow().to_pylist(), left + list(new.values()))


def test_large_var_types_of_the_session_make_no_difference(spark: SparkSession, tmp_path: Path) -> None:
    spark.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")
    try:
        df = spark.createDataFrame([("a", 1), ("b", 2)], "k string, n int")
        relation = Relation.build(df, tmp_path / "r", on="k", shards=2)
        assert relation.schema.field("k").type == pa.string()
        changed = relation.delete(df.select("k").where("k = 'a'"))
        assert [tuple(row) for row in read(changed, spark).collect()] == [("b", 2)]
    finally:
        spark.conf.unset("spark.sql.execution.arrow.useLargeVarTypes")


# -------------------------------------------------------------------- shapes


def test_many_rows_few_rows_and_none(spark: SparkSession, tmp_path: Path) -> None:
    # More than Spark's 10,000 rows per Arrow batch, AQE on as it is by default, most rows of one key.
    assert spark.conf.get("spark.sql.adaptive.enabled") == "true"
    many = spark.range(60_000, numPartitions=3).selectExpr("if(id % 3 = 0, id, 7) as k", "cast(id as string) as s")
    relation = Relation.build(many, tmp_path / "many", on="k", shards=3)
    assert (relation.stats.rows, relation.stats.max_multiplicity) == (60_000, 40_000)
    assert relation.stats.distinct_codes == 20_001
    assert sorted(map(int, relation.to_arrow().column("s").to_pylist())) == list(range(60_000))
    # More shards than rows; a progress that ends with all parts done.
    told: list[tuple[int, int]] = []
    few = Relation.build(
        many.limit(2), tmp_path / "few", on="s", shards=9, progress=lambda done, total: told.append((done, total))
    )
    assert (few.stats.rows, few.num_shards, told[-1]) == (2, 9, (9, 9))
    none = Relation.build(many.where("false"), tmp_path / "none", on="k", shards=2, unique=True)
    assert (none.stats.rows, Relation.open(tmp_path / "none").schema.names) == (0, ["k", "s"])
    assert read(none, spark).collect() == []
    assert none.upsert(many.limit(1)).stats.rows == 1
    # Read back as a DataFrame it is a table like any other.
    assert read(relation, spark).where("k = 7").count() == 40_000


# -------------------------------------------------------------------- refusals


def test_refusals_before_any_job_runs(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.range(2).withColumnRenamed("id", "k")
    stream = spark.readStream.format("rate").load()
    with pytest.raises(PlanError, match=r"a streaming DataFrame cannot be written.*foreachBatch"):
        Relation.build(stream, tmp_path / "r", on="value")
    with pytest.raises(PlanError, match="key column 'id' is not in the data: its columns are k"):
        Relation.build(df, tmp_path / "r", on="id")
    keys = {
        "array(1)": r"list<element: int32>",
        "map('a', 1)": r"map<string, int32.*>",
        "struct(1 as a)": r"struct<a: int32>",
        "interval '1' day": r"duration\[us\]",
        "parse_json('1')": r"struct<value: binary, metadata: binary>",
    }
    for sql, name in keys.items():
        with pytest.raises(SchemaError, match=rf"column 'k' of type {name} cannot be a key: use an integral"):
            Relation.build(df.selectExpr(f"{sql} as k"), tmp_path / "r", on="k")
    with pytest.raises(SchemaError, match="column 'c' is a calendar interval, which Spark cannot store either"):
        Relation.build(df.selectExpr("k", "make_interval(1, 2) as c"), tmp_path / "r", on="k")
    with pytest.raises(SchemaError, match="column 's' is a calendar interval"):
        Relation.build(df.selectExpr("k", "struct(array(make_interval(1))) as s"), tmp_path / "r", on="k")
    with pytest.raises(SchemaError, match="column 'k' appears more than once"):
        Relation.build(df.selectExpr("k", "k + 1 as k"), tmp_path / "r", on="k")
    assert not (tmp_path / "r").exists()
    with pytest.raises(SchemaError, match=r"column 'k' has the collation of string collate UTF8_LCASE.*UTF8_BINARY"):
        Relation.build(df.selectExpr("collate('a', 'UTF8_LCASE') as k"), tmp_path / "collated", on="k")
    with pytest.raises(SchemaError, match="column 'k' of type interval year cannot be a key"):
        Relation.build(df.selectExpr("interval '1' year as k"), tmp_path / "months", on="k")
    for refused in ("collated", "months"):
        with pytest.raises(RelationNotFound):
            Relation.open(tmp_path / refused)


def test_errors_in_tasks_arrive_as_their_own_class_and_change_nothing(spark: SparkSession, tmp_path: Path) -> None:
    df = spark.range(30_000).selectExpr("cast(id as string) as k", "id as n")
    twice = df.union(df.where("n = 17"))
    with pytest.raises(RelationError, match=r"the key \(k\) was declared unique.*more than one row for \{'k': '17'\}"):
        Relation.build(twice, tmp_path / "r", on="k", shards=2, unique=True)
    with pytest.raises(RelationNotFound, match="first build did not finish"):
        Relation.open(tmp_path / "r")
    relation = Relation.build(df.limit(100), tmp_path / "r", on="k", shards=2, unique=True)
    with pytest.raises(RelationError, match="appended rows have a key that the relation already has, such as"):
        relation.append(df.limit(3))
    with pytest.raises(RelationError, match=r"have a NULL in the key \(k\)"):
        relation.upsert(df.limit(3).selectExpr("if(n = 1, null, k) as k", "n"))
    with pytest.raises(SchemaError, match="upsert: column 'k' has type int64, but string in the relation"):
        relation.upsert(df.selectExpr("n as k", "n"))
    with pytest.raises(SchemaError, match="append: column 'm' is not in the relation"):
        relation.append(df.selectExpr("k", "n", "n as m"))
    newest = Relation.open(tmp_path / "r")
    assert (newest.version, newest.stats.rows) == (1, 100)
    assert relation.append(spark.createDataFrame([("new", 1)], "k string, n long")).stats.rows == 101


def test_timestamps_keep_their_moment_whatever_zone_the_writer_was_in(spark: SparkSession, tmp_path: Path) -> None:
    moment = dt.datetime(2024, 7, 1, 12, tzinfo=dt.UTC)
    zones = ["Asia/Tokyo", "America/New_York"]
    try:
        for number, zone in enumerate(zones):
            spark.conf.set("spark.sql.session.timeZone", zone)
            df = spark.createDataFrame([(moment, number)], "at timestamp, n int")
            if number == 0:
                relation = Relation.build(df, tmp_path / "r", on="at", shards=1)
            else:
                relation = relation.upsert(df)
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert relation.to_arrow().to_pylist() == [{"at": moment, "n": 1}]
