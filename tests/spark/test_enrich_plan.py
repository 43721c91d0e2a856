"""What `enrich` refuses at planning, before any data moves, and what it says of its plans."""

import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Observation, SparkSession
from pyspark.sql import functions as F

import dovetail as dt
from dovetail.core.errors import BudgetError, DovetailError, PlanError, RelationNotFound
from dovetail.relation import Relation

ROWS = pa.table(
    {
        "k": pa.array([1, 2], pa.int64()),
        "text": ["a", "b"],
        "moment": pa.array([0, 1], pa.timestamp("us")),
        "ratio": [0.5, 1.5],
    }
)


@pytest.fixture(scope="module")
def relation(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    return Relation.build(ROWS, tmp_path_factory.mktemp("plan") / "r", on="k", shards=2)


def refused(error: type[DovetailError], *words: str) -> Any:
    """An error of this kind whose message has all of these words."""
    return pytest.raises(error, match="(?s)" + "".join(f"(?=.*{word})" for word in words))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"on": "missing"}, ["no column 'missing'", "k, v, day"]),
        ({"on": ["k", "v"]}, ["2 columns", "key"]),
        ({"on": {"k": "text"}}, ["must map stream columns"]),
        ({"on": 7}, ["names no key"]),
        ({"how": "outer"}, ["'outer'", "inner, left, semi or anti"]),
        ({"strategy": "hash"}, ["'hash'", "mesh"]),
        ({"objective": "speed"}, ["'speed'", "rate or memory"]),
        ({"objective": "memory", "strategy": "hybrid"}, ["no meaning for strategy='hybrid'", "mesh, balanced or auto"]),
        ({"objective": "memory", "strategy": "lookup"}, ["no meaning for strategy='lookup'"]),
        ({"objective": "memory", "strategy": "mesh"}, ["needs a rate", "rate= in tuples per second"]),
        ({"rate": 5}, ["rate=", 'objective="memory"']),
        ({"rate": -1, "objective": "memory", "strategy": "mesh"}, ["rate=-1 is not a rate", "above 0"]),
        ({"rate": 5, "objective": "memory"}, ["no meaning for strategy='auto'", "mesh or balanced"]),
        ({"refresh": "always"}, ["'always'", "query"]),
        ({"ordered": True}, ["ordered=True", "arrival order"]),
        ({"shards": 3}, ["shards=3", "built with 2"]),
        ({"shards": 0}, ["shards=0"]),
        ({"select": ["text", "nothing"]}, ["no column 'nothing'", "k, text, moment, ratio"]),
        ({"select": ["text", "TEXT"]}, ["'text' twice"]),
        ({"condition": 5}, ["condition=5"]),
        ({"condition": "v <"}, ["v <", "column"]),
        ({"condition": "v < 5"}, ["'5' is not a column", "BatchPredicate"]),
        ({"condition": "v < other"}, ["neither side has a column 'other'"]),
        ({"condition": "v < day"}, ["both columns of the stream"]),
        ({"condition": "v < text"}, ["int64", "string", "cannot be compared"]),
        ({"on": [], "condition": None}, ["key columns, a condition, or both"]),
        ({"on": [], "condition": "v < ratio", "how": "left"}, ["'left' needs key columns"]),
        ({"on": [], "condition": "v < ratio", "strategy": "hybrid"}, ["hybrid joins on equal keys only"]),
    ],
    ids=str,
)
def test_request_that_cannot_be_names_what_is_wrong(
    spark: SparkSession, relation: Relation, options: dict[str, Any], words: list[str]
) -> None:
    stream = spark.createDataFrame([], "k long, v long, day date")
    with refused(PlanError, *words):
        dt.enrich(stream, relation, **({"on": "k"} | options))


@pytest.mark.parametrize(
    ("kind", "key", "words"),
    [
        ("array<int>", "k", ["array<int>", "bigint", "cannot be compared"]),
        ("date", "k", ["date", "bigint", "cannot be compared"]),
        ("double", "k", ["double", "bigint", "several values"]),
        ("int", "text", ["int", "string", "several values", "Cast"]),
        ("timestamp", "moment", ["timestamp", "timestamp_ntz", "several values"]),
        ("string collate UTF8_LCASE", "text", ["collation", "UTF8_BINARY"]),
    ],
)
def test_keys_that_cannot_be_compared_are_refused(
    spark: SparkSession, tmp_path: Path, kind: str, key: str, words: list[str]
) -> None:
    relation = Relation.build(ROWS, tmp_path / "r", on=key, shards=1)
    stream = spark.createDataFrame([], f"`{key}` {kind}")
    with refused(PlanError, *words):
        dt.enrich(stream, relation, on=key)


def test_ambiguous_key_is_refused_and_other_double_names_are_not(spark: SparkSession, relation: Relation) -> None:
    twice = spark.range(3).select(F.col("id").alias("k"), F.col("id").alias("v"), (F.col("id") * 2).alias("v"))
    joined = dt.enrich(twice, relation, on="k", select="text")
    assert sorted(tuple(row) for row in joined.collect()) == [(1, 1, 2, "a"), (2, 2, 4, "b")]
    with refused(PlanError, "2 columns called 'k'"):
        dt.enrich(spark.range(1).select(F.lit(1).alias("k"), F.lit(2).alias("K")), relation, on="K")


def test_what_is_no_relation_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    stream = spark.range(1)
    with refused(PlanError, "a int is not a relation"):
        dt.enrich(stream, 5, on="id")
    with refused(RelationNotFound, "nowhere", "does not exist"):
        dt.enrich(stream, tmp_path / "nowhere", on="id")
    with refused(PlanError, "no key of its own"):
        dt.enrich(stream, spark.range(3))
    with refused(PlanError, "streaming DataFrame"):
        dt.enrich(stream, spark.readStream.format("rate").load(), on="value")


def test_budget_below_the_minimum_is_refused_with_the_minimum(spark: SparkSession, relation: Relation) -> None:
    stream = spark.createDataFrame([], "k long, v long")
    with pytest.raises(BudgetError) as refusal:
        dt.enrich(stream, relation, on="k", strategy="mesh", budget=100)
    assert refusal.value.minimum_bytes is not None
    dt.enrich(stream, relation, on="k", strategy="mesh", budget=refusal.value.minimum_bytes)


def test_names_are_resolved_as_the_session_resolves_them(spark: SparkSession, relation: Relation) -> None:
    stream = spark.createDataFrame([(1,)], "K long")
    assert dt.enrich(stream, relation, on="k", select="TEXT").columns == ["K", "text"]
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        with refused(PlanError, "no column 'k'"):
            dt.enrich(stream, relation, on="k")
    finally:
        spark.conf.set("spark.sql.caseSensitive", "false")


def test_explain_says_how_a_derived_dataframe_is_computed(spark: SparkSession, relation: Relation) -> None:
    stream = spark.createDataFrame([], "k long, v long")
    inner = dt.enrich(stream, relation, on="k", budget="5MB")
    outer = dt.enrich(inner.groupBy("k").count(), relation, on="k", how="anti", strategy="mesh", budget="2MB")
    explanation = dt.explain(outer.where("k > 0"))
    anti, lookup = explanation.joins
    assert (anti.strategy, anti.route, anti.how, anti.budget_bytes) == ("mesh", "shards", "anti", 2_000_000)
    assert (lookup.strategy, lookup.route, lookup.how, lookup.budget_bytes) == ("lookup", "lookup", "inner", 5_000_000)
    assert sum(anti.memory_bytes.values()) <= anti.budget_bytes
    assert anti.tuples_per_second > 0
    assert json.loads(json.dumps(explanation.as_dict()))["joins"][0]["shards"] == 2
    assert "without a shuffle" in str(explanation)
    with refused(PlanError, "no join that enrich made"):
        dt.explain(stream)
    with refused(PlanError, "a int cannot be explained"):
        dt.explain(3)


@pytest.mark.parametrize("strategy", ["mesh", "balanced"])
def test_memory_for_a_rate_is_within_the_budget_and_explained(
    spark: SparkSession, tmp_path: Path, strategy: str
) -> None:
    rows = pa.table({"k": list(range(5_000)), "text": [f"text {number}" for number in range(5_000)]})
    relation = Relation.build(rows, tmp_path / "r", on="k", shards=2)
    stream = spark.range(8_000).select((F.col("id") * 7 % 9_000).alias("k"), F.col("id").alias("v"))
    options: dict[str, Any] = {"on": "k", "how": "left", "strategy": strategy, "budget": "64MB"}
    little = dt.enrich(stream, relation, objective="memory", rate=1_000, **options)
    much = dt.enrich(stream, relation, objective="memory", rate=1e12, **options)
    (small,), (large,) = dt.explain(little).joins, dt.explain(much).joins
    assert (small.rate, large.rate) == (1_000, 1e12)
    assert small.plan.required_rate == 500, "the rate is divided among the shards"
    assert small.plan.binds in small.text()
    assert "1,000 tuples/s" in small.text()
    assert "serve about" in large.why, "more than the budget allows is said"
    assert small.plan.budget_bytes < large.plan.budget_bytes / 10
    assert large.plan.budget_bytes == 32_000_000
    json.dumps(dt.explain(little).as_dict())
    assert sorted(map(str, little.collect())) == sorted(
        map(str, stream.join(relation.to_df(spark), "k", "left").collect())
    )


def test_null_typed_key_matches_nothing(spark: SparkSession, relation: Relation) -> None:
    stream = spark.range(2).select(F.lit(None).alias("k"), "id")
    assert dt.enrich(stream, relation, on="k", how="left", select="text").collect() == [
        (None, 0, None),
        (None, 1, None),
    ]


def test_metrics_are_observed_and_leave_no_trace_in_the_rows(spark: SparkSession, relation: Relation, way: str) -> None:
    stream = spark.createDataFrame([(1, 5), (1, 6), (9, 7), (None, 8)], "k long, v long").repartition(2)
    for strategy in ("auto", "mesh"):
        name = f"join {strategy} {way}"
        watched = dt.enrich(stream, relation, on="k", how="anti", strategy=strategy, metrics=name)
        assert watched.schema == dt.enrich(stream, relation, on="k", how="anti").schema
        observation = Observation(name + " again")
        assert sorted(row.v for row in watched.observe(observation, F.count("*").alias("n")).collect()) == [7, 8]
        assert observation.get == {"n": 2}


def test_metrics_appear_in_the_progress_of_a_query(
    spark: SparkSession, relation: Relation, tmp_path: Path, way: str
) -> None:
    numbers = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 30).load()
    stream = numbers.select((F.col("value") % 3).alias("k"), F.col("value").alias("v"))
    joined = dt.enrich(stream, relation, on="k", metrics="lookups")
    # Twice in one query: the same numbers under the same name.
    both = joined.union(dt.enrich(stream, relation, on="k", how="left", select=["text", "moment", "ratio"]))
    writer = both.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.trigger(processingTime="0 seconds").start()
    while (progress := query.lastProgress) is None or progress["batchId"] < 1:
        assert query.isActive, query.exception()
        time.sleep(0.05)
    query.stop()
    told = query.recentProgress[0]["observedMetrics"]["lookups"]
    assert (told["stream_tuples_in"], told["matched_tuples"], told["unmatched_tuples"]) == (30, 20, 10)
    assert (told["output_rows"], told["relation_version"]) == (20, 1)


def test_swapped_arguments_are_named(tmp_path: Path) -> None:
    relation = Relation.build(pa.table({"k": [1]}), tmp_path / "swapped", on="k", shards=1)
    with pytest.raises(PlanError, match="the first is a Relation"):
        dt.enrich(relation, "anything", on="k")
