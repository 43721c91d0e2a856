"""`enrich` gives what Spark's own join gives: rows, columns, types and nullability, for every join and key type."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import dovetail as dt
from dovetail.joins import BatchPredicate, Comparison
from dovetail.joins.matching import matcher_for
from dovetail.relation import Relation
from dovetail.spark.plan.join_plan import JoinPlan, plan_join

HOWS = ["inner", "left", "semi", "anti"]
STRATEGIES = ["mesh", "hybrid", "balanced", "index_nested_loop", "auto"]
SEED = 11

# What the number n of a key becomes; NULL for some n. Every type that can be a key.
KEYS = {
    "boolean": "n % 2 = 0",
    "byte": "cast(n - 20 as byte)",
    "short": "cast(n * 700 - 20000 as short)",
    "int": "cast(n * 50000000 - 2000000000 as int)",
    "long": "(n - 30) * 300000000000000000",
    "float": "case n % 9 when 0 then float('NaN') when 1 then float('-0.0') when 2 then float(0) else float(n / 3) end",
    "double": "case n % 9 when 0 then double('NaN') when 1 then -0.0D when 2 then 0D else n / 7.0D end",
    "decimal": "cast(n / 7 as decimal(10,2))",
    "wide decimal": "cast(n * 1000000000000 / 7 as decimal(38,9))",
    "string": "concat(repeat('é😀ß', cast(n % 3 as int)), cast(n as string))",
    "binary": "unhex(concat('00ff', lpad(hex(n), 4, '0')))",
    "date": "date'1960-01-01' + cast(n * 1000 as int)",
    "timestamp": "timestamp'1883-11-18 12:03:57.999999 UTC' + make_dt_interval(cast(n as int) * 1000)",
    "timestamp_ntz": "timestamp_ntz'2024-03-10 02:30:00.000001' + make_dt_interval(cast(n as int))",
}
COMPOSITE = {
    "int and string": ["int", "string"],
    "three": ["date", "decimal", "binary"],
    "float and boolean": ["double", "boolean"],
}
# stream type, relation type: compared after a cast.
CROSSED = [
    ("int", "long"),
    ("long", "int"),
    ("string", "int"),
    ("double", "int"),
    ("decimal", "long"),
    ("int", "decimal"),
    ("float", "double"),
    ("double", "float"),
    ("long", "double"),
    ("date", "timestamp"),
    ("timestamp", "date"),
    ("string", "date"),
    ("byte", "wide decimal"),
    ("binary", "string"),
]
NUMBERS = {
    "int": "cast(n as int)",
    "long": "n",
    "byte": "cast(n as byte)",
    "string": "if(n % 4 = 0, 'nothing', concat('0', n))",
    "double": "n / 2.0D",
    "float": "float(n / 2)",
    "decimal": "cast(n / 2 as decimal(10,2))",
    "wide decimal": "cast(n as decimal(30,4))",
    "date": "date'2024-01-01' + cast(n as int)",
    "timestamp": "timestamp'2024-01-01 00:00:00 UTC' + make_dt_interval(cast(n as int), cast(n % 2 as int))",
    "binary": "cast(concat('0', n) as binary)",
}
DATES_AS_TEXT = "cast(date'2024-01-01' + cast(n as int) as string)"


def numbered(spark: SparkSession, rows: int, first: int, keys: int, salt: int) -> DataFrame:
    """Rows whose number n is random, with duplicates; one in ten is NULL."""
    draw = F.pmod(F.xxhash64(F.col("id"), F.lit(salt), F.lit(SEED)), F.lit(keys)) + first
    return spark.range(rows).select(
        F.when(F.pmod(F.xxhash64("id", F.lit(salt + 1)), F.lit(10)) > 0, draw).alias("n"),
        F.col("id"),
        F.pmod(F.xxhash64("id", F.lit(salt + 2)), F.lit(100)).alias("moment"),
    )


def table_of(spark: SparkSession, expressions: dict[str, str]) -> pa.Table:
    rows = numbered(spark, 150, first=20, keys=40, salt=100).select(
        *(F.expr(text).alias(name) for name, text in expressions.items()),
        F.concat(F.lit("ü"), "id").alias("pay"),
        F.when(F.col("id") % 5 > 0, F.col("id") * 1.5).alias("weight"),
        F.col("moment").alias("low"),
        F.when(F.col("id") % 7 > 0, F.col("moment") + 30).alias("high"),
    )
    table = rows.toArrow()
    # A relation's columns can all hold NULLs, as those of Spark's own file sources.
    return table.cast(pa.schema([column.with_nullable(True) for column in table.schema]))


def stream_of(spark: SparkSession, expressions: dict[str, str]) -> DataFrame:
    return numbered(spark, 400, first=0, keys=50, salt=0).select(
        F.col("id").alias("v"),
        *(F.expr(text).alias(name) for name, text in expressions.items()),
        F.when(F.col("id") % 6 > 0, F.col("moment")).alias("ts"),
        F.lit("same name").alias("weight"),
    )


def as_text(df: DataFrame, tag: str) -> DataFrame:
    """Each row as one string, whatever its columns are called."""
    numbers = [f"c{number}" for number in range(len(df.columns))]
    options = {"ignoreNullFields": "false"}
    return df.toDF(*numbers).select(F.lit(tag).alias("tag"), F.to_json(F.struct(*numbers), options).alias("row"))


def rows_of(parts: dict[str, DataFrame]) -> Counter[tuple[str, str]]:
    """The rows of several DataFrames, computed by one job."""
    tagged = [as_text(df, tag) for tag, df in parts.items()]
    union = tagged[0]
    for other in tagged[1:]:
        union = union.union(other)
    return Counter((row.tag, row.row) for row in union.collect())


def check(ours: dict[str, DataFrame], theirs: dict[str, DataFrame]) -> None:
    for tag in ours:
        assert ours[tag].schema == theirs[tag].schema, tag
    found, expected = rows_of(ours), rows_of(theirs)
    assert found == expected, f"missing {expected - found}, surplus {found - expected}"
    assert {tag for tag, _ in found} == set(ours), "a join without any row tests nothing"


@pytest.fixture(scope="module", autouse=True)
def _interpreted(spark: SparkSession) -> Iterator[None]:
    """For a few hundred rows, compiling every plan would take most of the time."""
    settings = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
    before = {name: spark.conf.get(name) for name in settings}
    for name, value in settings.items():
        spark.conf.set(name, value)
    yield
    for name, value in before.items():
        spark.conf.set(name, value)


@pytest.fixture(scope="module")
def key_table(spark: SparkSession) -> pa.Table:
    return table_of(spark, KEYS)


def relation_with(table: pa.Table, keys: list[str], path: Path) -> tuple[Relation, pa.Table]:
    """A relation of two versions over a table, and the rows that it then has."""
    rows = table.select([*keys, "pay", "weight", "low", "high"])
    rows = rows.rename_columns([*(f"k{number}" for number in range(len(keys))), "pay", "weight", "low", "high"])
    names = [f"k{number}" for number in range(len(keys))]
    relation = Relation.build(rows.slice(0, 120), path / "relation", on=names, shards=3).append(rows.slice(120))
    return relation, rows


@pytest.mark.parametrize("keys", [[name] for name in KEYS] + list(COMPOSITE.values()), ids=str)
def test_every_join_type_gives_what_sparks_join_gives(
    spark: SparkSession, key_table: pa.Table, tmp_path: Path, keys: list[str], way: str
) -> None:
    relation, rows = relation_with(key_table, keys, tmp_path)
    names = [f"k{number}" for number in range(len(keys))]
    stream = stream_of(spark, {name: KEYS[key] for name, key in zip(names, keys, strict=True)})
    table = spark.createDataFrame(rows)
    asked = names[::-1]
    ours = {how: dt.enrich(stream, relation, on=asked, how=how) for how in HOWS}
    assert {dt.explain(ours[how]).joins[0].transfer for how in HOWS} == {way}
    check(ours, {how: stream.join(table, on=asked, how=how) for how in HOWS})


@pytest.mark.parametrize(("mine", "theirs"), CROSSED, ids=str)
def test_keys_of_different_types_are_compared_as_by_spark(
    spark: SparkSession, tmp_path: Path, mine: str, theirs: str, way: str
) -> None:
    of_stream = DATES_AS_TEXT if (mine, theirs) == ("string", "date") else NUMBERS[mine]
    of_relation = NUMBERS["string"] if theirs == "string" else NUMBERS[theirs]
    if (mine, theirs) == ("string", "int"):
        of_stream = "concat('0', n)"  # Spark's own join refuses text that is not a number, row by row.
    relation, rows = relation_with(table_of(spark, {"k": of_relation}), ["k"], tmp_path)
    stream = stream_of(spark, {"k0": of_stream})
    table = spark.createDataFrame(rows)
    ours = {how: dt.enrich(stream, relation, "k0", how) for how in ("left", "semi")}
    check(ours, {how: stream.join(table, "k0", how) for how in ("left", "semi")})


@pytest.mark.parametrize("key", ["long", "string"])
def test_conditions_besides_the_key_decide_as_in_a_join_of_sparks(
    spark: SparkSession, key_table: pa.Table, tmp_path: Path, key: str, way: str
) -> None:
    relation, rows = relation_with(key_table, [key], tmp_path)
    stream = stream_of(spark, {"k0": KEYS[key]})
    table = spark.createDataFrame(rows).withColumnRenamed("k0", "rk")
    is_key, within = F.col("k0") == F.col("rk"), (F.col("low") <= F.col("ts")) & (F.col("ts") < F.col("high"))
    conditions = {
        "range": ("low <= ts AND ts < high", within),
        "comparison": (Comparison("v", ">", "low"), F.col("v") > F.col("low")),
        "predicate": (BatchPredicate(is_even_sum, ["v"], ["low"]), (F.col("v") + F.col("low")) % 2 == 0),
        "clash": ("stream.weight <> relation.pay AND ts <> low", F.col("ts") != F.col("low")),
    }
    ours, theirs = {}, {}
    for name, (condition, expected) in conditions.items():
        for how in HOWS:
            ours[f"{name} {how}"] = dt.enrich(stream, relation, {"k0": "k0"}, how, condition=condition)
            joined = stream.join(table, is_key & expected, how)
            of_stream = [stream[name] for name in ("k0", "v", "ts", "weight")]
            of_table = [table[name] for name in ("pay", "weight", "low", "high")] if how in ("inner", "left") else []
            theirs[f"{name} {how}"] = joined.select(*of_stream, *of_table)
    check(ours, theirs)


def is_even_sum(stream: pa.RecordBatch, relation: pa.RecordBatch) -> object:
    return (stream["v"].to_numpy() + relation["low"].to_numpy()) % 2 == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_on_shuffled_shards_gives_the_same_rows(
    spark: SparkSession, key_table: pa.Table, tmp_path: Path, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A relation that no worker could map is what makes "auto" shuffle.
    monkeypatch.setattr("dovetail.spark.steps.enrich.is_mapped_by_every_worker", lambda relation: False)
    relation, rows = relation_with(key_table, ["string"], tmp_path)
    stream = stream_of(spark, {"k0": KEYS["string"]})
    table = spark.createDataFrame(rows)
    ours = {how: dt.enrich(stream, relation, "k0", how, strategy=strategy, budget="1MB") for how in HOWS}
    assert {join.route for how in HOWS for join in dt.explain(ours[how]).joins} == {"shards"}
    check(ours, {how: stream.join(table, "k0", how) for how in HOWS})


def test_condition_without_equality_meets_every_shard(spark: SparkSession, key_table: pa.Table, tmp_path: Path) -> None:
    relation, rows = relation_with(key_table, ["long"], tmp_path)
    stream = stream_of(spark, {"k": KEYS["long"]}).drop("weight")
    table = spark.createDataFrame(rows)
    ours = dt.enrich(stream, relation, on=[], condition="low <= ts AND ts < high", budget="1MB")
    joined = stream.join(table, (F.col("low") <= F.col("ts")) & (F.col("ts") < F.col("high")))
    check({"inner": ours}, {"inner": joined})
    assert dt.explain(ours).joins[0].route == "every shard"


def test_moments_between_two_others_are_found_in_any_time_zone(spark: SparkSession, tmp_path: Path) -> None:
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    try:
        at = "timestamp'2024-03-31 00:00:00' + make_dt_interval(0, 0, cast({} * 10 as int))"
        rows = spark.range(40).select(
            F.col("id").alias("band"),
            F.expr(at.format("id")).alias("valid_from"),
            F.expr(f"if(id % 9 = 0, NULL, {at.format('(id + 3)')})").alias("valid_to"),
        )
        Relation.build(rows, tmp_path / "r", on="band", shards=3)
        stream = numbered(spark, 300, first=0, keys=60, salt=7).select("id", F.expr(at.format("n")).alias("ts"))
        condition = "valid_from <= ts AND ts < valid_to"
        relation = Relation.open(tmp_path / "r")
        ours = dt.enrich(stream, relation, on=[], condition=condition)
        within = (F.col("valid_from") <= F.col("ts")) & (F.col("ts") < F.col("valid_to"))
        check({"inner": ours}, {"inner": stream.join(relation.to_df(spark), within)})
        plan = plan_join(stream, relation, on=[], condition=condition)
        assert is_ordered(plan), "the window is not searched in order"
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


def is_ordered(plan: JoinPlan) -> bool:
    """Whether a shard's window is kept in the order of the column that a range is about."""
    shard = plan.relation.shard(0, list(plan.recipe.relation_columns), include_null_keys=True)
    matcher = matcher_for(plan.recipe.spec(shard, plan.stream_schema, plan.budget))
    return type(matcher).__name__ == "_OrderedRange"


def test_selected_columns_come_in_the_order_asked_for(
    spark: SparkSession, key_table: pa.Table, tmp_path: Path, way: str
) -> None:
    relation, rows = relation_with(key_table, ["int"], tmp_path)
    stream = stream_of(spark, {"K0": KEYS["int"]})
    table = spark.createDataFrame(rows).select("k0", "high", "pay")
    ours = {how: dt.enrich(stream, relation, on="k0", how=how, select=["HIGH", "pay"]) for how in HOWS}
    check(ours, {how: stream.join(table, on="k0", how=how) for how in HOWS})


def test_one_key_with_more_rows_than_a_batch_is_put_out_in_parts(spark: SparkSession, tmp_path: Path, way: str) -> None:
    numbers = pa.array(range(200_000))
    rows = pa.table({"k": pa.array([7] * 150_000 + [8] * 50_000), "row": numbers})
    relation = Relation.build(rows, tmp_path / "r", on="k", shards=2)
    stream = spark.createDataFrame([(7, "a"), (8, "b"), (None, "c"), (9, "d"), (8, "e")], "k long, v string")
    joined = dt.enrich(stream, relation, "k", "left")
    counted = {row.v: (row["count"], row.rows) for row in summary(joined).collect()}
    assert counted == {
        "a": (150_000, 150_000),
        "b": (50_000, 50_000),
        "c": (1, 0),
        "d": (1, 0),
        "e": (50_000, 50_000),
    }
    assert dt.enrich(stream, relation, "k", "semi").count() == 3
    rarely = BatchPredicate(lambda _, rows: rows["row"].to_numpy() == 149_999, ["v"], ["row"])
    assert [row.v for row in dt.enrich(stream, relation, "k", "semi", condition=rarely).collect()] == ["a"]


def summary(df: DataFrame) -> DataFrame:
    return df.groupBy("v").agg(F.count("*").alias("count"), F.countDistinct("row").alias("rows"))
