"""`enrich` with only keys in Python: when, one evaluation whatever comes behind it, and the same rows as otherwise."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

import dovetail as dt
from dovetail.relation import Relation
from dovetail.spark.plan.determinism import require_deterministic

ROWS = pa.table(
    {
        "k": list(range(0, 100, 2)),
        "name": [f"n{number}" for number in range(50)],
        "size": [number * 1.5 for number in range(50)],
        "next": [number % 10 * 2 for number in range(50)],
    }
)
_EVALUATION = re.compile(r"ArrowEvalPython \[dovetail_enrich_[0-9a-f]{12}")


@pytest.fixture(scope="module")
def relation(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    return Relation.build(ROWS, tmp_path_factory.mktemp("keys") / "r", on="k", shards=2)


@pytest.fixture
def stream(spark: SparkSession) -> DataFrame:
    return spark.range(60).select((F.col("id") % 30).alias("k"), F.col("id").alias("v"), (F.col("id") * 2).alias("w"))


def executed(df: DataFrame) -> str:
    """The plan as Spark runs it."""
    return str(df._jdf.queryExecution().executedPlan().toString())


def rows(df: DataFrame) -> list[str]:
    """All rows as text, whatever the names and types of their columns."""
    names = [f"c{number}" for number in range(len(df.columns))]
    return sorted(map(str, df.toDF(*names).select(*(F.col(name).cast("string") for name in names)).collect()))


def transfer(df: DataFrame) -> str:
    (join,) = dt.explain(df).joins
    return str(join.transfer)


def doubled(name: str) -> Column:
    """A function of the user in Python; made when a session is there."""
    return F.udf(lambda value: None if value is None else value * 2, "long")(name)


BEHIND: dict[str, Callable[[DataFrame], DataFrame]] = {
    "nothing": lambda df: df,
    "filter on the stream": lambda df: df.where("v > 3"),
    "filter on the relation": lambda df: df.where("name <> 'n3' and size > 1"),
    "filters on both": lambda df: df.where("name <> 'n3' and v > 3 and k < 20").where("size + v > 8"),
    "several columns": lambda df: df.select("name", "size", (F.col("size") * 2).alias("twice"), F.length("name")),
    "a stream column only": lambda df: df.select("v"),
    "aggregate": lambda df: df.groupBy("name").agg(F.sum("size"), F.count("*")),
    "aggregate of all": lambda df: df.agg(F.sum("v"), F.max("name")),
    "distinct": lambda df: df.select("name").distinct(),
    "function of Python": lambda df: df.select("v", doubled("next").alias("twice"), "name").where("twice > 4"),
    "limit of a sort": lambda df: df.orderBy("size", "v").limit(5),
}


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("how", ["inner", "left"])
def test_spark_evaluates_a_lookup_once_whatever_comes_behind(
    spark: SparkSession, relation: Relation, stream: DataFrame, behind: str, how: str
) -> None:
    ours = BEHIND[behind](dt.enrich(stream, relation, on="k", how=how))
    plan = executed(ours)
    assert len(_EVALUATION.findall(plan)) == 1
    assert "MapInArrow" not in plan
    assert rows(ours) == rows(BEHIND[behind](stream.join(spark.createDataFrame(ROWS), "k", how)))


def test_chained_lookups_are_evaluated_once_each(spark: SparkSession, relation: Relation, stream: DataFrame) -> None:
    twice = stream.withColumn("k", doubled("k"))
    first = dt.enrich(twice, relation, on="k", how="left", select=["name", "next"])
    second = dt.enrich(first, relation, on={"next": "k"}, select="size").where("v > 3 and name <> 'n2' and size > 1")
    plan = executed(second)
    assert len(_EVALUATION.findall(plan)) == 2
    assert plan.count("EvalPython [") == 3, "and a function of the user, whose result is the key, is so too"
    table = spark.createDataFrame(ROWS)
    one = twice.join(table.select("k", "name", "next"), "k", "left")
    other = one.join(table.select(F.col("k").alias("next"), "size"), "next")
    assert rows(second) == rows(other.where("v > 3 and name <> 'n2' and size > 1"))


@pytest.mark.parametrize("how", ["inner", "left", "semi", "anti"])
def test_filter_on_the_stream_runs_before_the_lookup(relation: Relation, stream: DataFrame, how: str) -> None:
    filtered = dt.enrich(stream, relation, on="k", how=how).where("v > 33")
    plan = executed(filtered)
    assert plan.index("ArrowEvalPython") < plan.index("> 33)"), "the plan is written from the last step to the first"
    assert all(row.v > 33 for row in filtered.collect())


def test_counters_count_what_arrives_before_a_filter(relation: Relation, stream: DataFrame) -> None:
    watched = dt.enrich(stream, relation, on="k", metrics="keys_only_counts").where("v > 33")
    plan = executed(watched)
    assert plan.index("> 33)") < plan.index("CollectMetrics") < plan.index("ArrowEvalPython")
    assert len(_EVALUATION.findall(plan)) == 1


def test_lookup_is_a_function_of_its_row_for_flows(relation: Relation, stream: DataFrame) -> None:
    require_deterministic(dt.enrich(stream, relation, on="k"), "the input")


# -------------------------------------------------------------------- when


def table_of(duplicates: int, columns: dict[str, Any]) -> pa.Table:
    keys = [key for key in range(20) for _ in range(duplicates)]
    return pa.table({"k": keys, **{name: make(len(keys)) for name, make in columns.items()}})


TEXT = {"text": lambda count: [f"t{number}" for number in range(count)]}
NUMBERS = {"number": lambda count: list(range(count))}


@pytest.mark.parametrize(
    ("columns", "duplicates", "options", "declared", "way", "words"),
    [
        (TEXT, 1, {}, False, "keys", ""),
        (TEXT, 2, {}, False, "rows", "up to 2 rows, whose size is not known"),
        (TEXT, 2, {"how": "semi"}, False, "keys", ""),
        (TEXT, 2, {"how": "anti"}, False, "keys", ""),
        (NUMBERS, 2, {}, False, "keys", ""),
        (NUMBERS, 600, {"how": "left"}, False, "rows", "up to 600 rows, more than 4,096 bytes"),
        (TEXT, 5_000, {"select": []}, False, "rows", "up to 5,000 rows, more than 4,096 bytes"),
        (TEXT, 1, {"refresh": "batch"}, False, "rows", "later version"),
        (TEXT, 1, {"refresh": "batch"}, True, "keys", ""),
        (TEXT, 1, {"strategy": "mesh"}, False, "rows", ""),
    ],
)
def test_keys_travel_where_a_tuple_has_few_rows(
    spark: SparkSession,
    tmp_path: Path,
    columns: dict[str, Any],
    duplicates: int,
    options: dict[str, Any],
    declared: bool,
    way: str,
    words: str,
) -> None:
    table = table_of(duplicates, columns)
    relation = Relation.build(table, tmp_path / "r", on="k", shards=2, unique=declared)
    stream = spark.range(30).select(F.col("id").alias("k"))
    joined = dt.enrich(stream, relation, on="k", **options)
    (join,) = dt.explain(joined).joins
    assert join.transfer == way
    assert words in join.why
    assert ("keys go to Python" in join.text()) == (way == "keys")
    assert (len(_EVALUATION.findall(executed(joined))) == 1) == (way == "keys")
    other = spark.createDataFrame(table.select(["k"]) if "select" in options else table)
    assert rows(joined) == rows(stream.join(other, "k", options.get("how", "inner")))


def test_type_that_arrow_cannot_carry_sends_whole_rows(spark: SparkSession, tmp_path: Path) -> None:
    table = spark.range(5).select(
        "id", F.expr("make_ym_interval(1, cast(id as int))").alias("age"), F.lit(1).alias("n")
    )
    relation = Relation.build(table, tmp_path / "r", on="id", shards=1)
    stream = spark.range(9)
    joined = dt.enrich(stream, relation, on="id")
    assert "'age'" in dt.explain(joined).joins[0].why
    assert rows(joined) == rows(stream.join(table, "id"))
    without = dt.enrich(stream, relation, on="id", select="n")
    assert transfer(without) == "keys"
    assert rows(without) == rows(stream.join(table.select("id", "n"), "id"))


def test_streams_columns_of_any_type_stay_as_they_are(spark: SparkSession, relation: Relation) -> None:
    stream = spark.range(9).select(
        F.col("id").alias("k"),
        F.expr("make_ym_interval(1, cast(id as int))").alias("with.dot"),
        F.lit(None).alias("nothing"),
        F.expr("map('a', array(struct(id as x)))").alias("nested"),
        F.lit("text").alias("a `tick`"),
    )
    joined = dt.enrich(stream, relation, on="k", how="left")
    expected = stream.join(relation.to_df(spark), "k", "left")
    assert transfer(joined) == "keys"
    assert joined.schema == expected.schema
    assert rows(joined) == rows(expected)


def test_later_version_with_several_rows_per_key_is_joined_all_the_same(spark: SparkSession, tmp_path: Path) -> None:
    planned = Relation.build(table_of(1, TEXT), tmp_path / "r", on="k", shards=2, unique=True)
    table = table_of(3, TEXT)
    Relation.build(table, tmp_path / "r", on="k", shards=2, mode="overwrite")
    stream = spark.range(30).select(F.col("id").alias("k"), F.col("id").alias("v"))
    found = joined_stream(spark, tmp_path, planned)
    assert rows(found) == rows(stream.join(spark.createDataFrame(table), "k").select("k", "v", "text"))


def joined_stream(spark: SparkSession, root: Path, planned: Relation) -> DataFrame:
    """What a query gives that was planned with one version and meets the newest."""
    source = spark.range(30).select(F.col("id").alias("k"), F.col("id").alias("v"))
    source.write.parquet(str(root / "in"))
    stream = spark.readStream.schema(source.schema).parquet(str(root / "in"))
    joined = dt.enrich(stream, planned, on="k", refresh="batch")
    assert transfer(joined) == "keys"
    query = joined.writeStream.format("parquet").option("checkpointLocation", str(root / "checkpoint"))
    assert query.trigger(availableNow=True).start(str(root / "out")).awaitTermination(120)
    return spark.read.parquet(str(root / "out"))
