"""Joins of a flow that let nothing wait: done where the rows are, without a shuffle, and exactly once all the same."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import dovetail as dt
from dovetail import Relation
from dovetail.core.errors import InternalError, RelationError
from dovetail.spark import sinks
from dovetail.spark.flow.noop import NoopSink
from dovetail.spark.flow.query import FlowQuery
from dovetail.spark.flow.sink import Receipt
from dovetail.spark.steps.stream import Flow, stream
from dovetail.testing.flows import Feed, commits_of, published_rows, unnamed_state_files, wait_until
from dovetail.testing.oracle import join_oracle
from dovetail.testing.rows import assert_same_rows

KEYS = 400
CITIES = [{"k": key, "city": f"c{key % 17}"} for key in range(0, KEYS, 2)]
MAYORS = [{"city": f"c{number}", "mayor": f"m{number}"} for number in range(12)]
SHUFFLE = re.compile(r"\bExchange\b")


def orders(first: int, count: int) -> pa.Table:
    numbers = range(first, first + count)
    keys = [None if number % 97 == 0 else number * 7919 % KEYS for number in numbers]
    return pa.table({"n": list(numbers), "k": pa.array(keys, pa.int64())})


@pytest.fixture
def relation(tmp_path: Path) -> Relation:
    return Relation.build(pa.Table.from_pylist(CITIES), tmp_path / "cities", on="k", shards=3)


@pytest.fixture
def mayors(tmp_path: Path) -> Relation:
    return Relation.build(pa.Table.from_pylist(MAYORS), tmp_path / "mayors", on="city", shards=2)


@pytest.fixture
def feed(tmp_path: Path) -> Feed:
    return Feed(tmp_path / "feed")


@pytest.fixture
def source(spark: SparkSession, feed: Feed) -> DataFrame:
    reader = spark.readStream.schema("n long, k long").option("maxFilesPerTrigger", 1)
    return reader.parquet(str(feed.directory))


class PlanReader(NoopSink):
    """Keeps the executed plan of each micro-batch."""

    def __init__(self) -> None:
        self.plans: list[str] = []
        self.partitions: list[int] = []

    def stage(self, df: DataFrame, batch: int) -> Receipt:
        receipt = super().stage(df, batch)
        execution = df._jdf.queryExecution()
        self.plans.append(execution.executedPlan().toString())
        self.partitions.append(execution.toRdd().getNumPartitions())
        return receipt


def finished(flow: Flow, tmp_path: Path, sink: Any = None) -> FlowQuery:
    """Let the flow take all that is there."""
    into = sinks.parquet(tmp_path / "out") if sink is None else sink
    query = flow.write(into, checkpoint=tmp_path / "checkpoint", trigger="available-now")
    assert query.awaitTermination(120), "the flow did not end"
    return query


def counted(query: FlowQuery) -> dict[str, int]:
    totals = query.progress.operators[0].totals
    return {
        "in": totals.stream_tuples_in,
        "null": totals.null_key_tuples,
        "matched": totals.matched_tuples,
        "unmatched": totals.unmatched_tuples,
        "out": totals.output_rows,
    }


def counts_of(rows: list[dict[str, Any]], out: int) -> dict[str, int]:
    keys = {city["k"] for city in CITIES}
    matched = sum(row["k"] in keys for row in rows)
    nulls = sum(row["k"] is None for row in rows)
    return {"in": len(rows), "null": nulls, "matched": matched, "unmatched": len(rows) - matched, "out": out}


# ==================================================================== what comes out


@pytest.mark.parametrize("how", ["inner", "left", "semi", "anti"])
def test_oracle_rows_and_counters_of_every_kind_of_join(
    relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path, how: str
) -> None:
    flow = stream(source, "orders").enrich(relation, on="k", how=how)
    for number in range(3):
        feed.add(orders(200 * number, 200))
    query = finished(flow, tmp_path)
    expected = join_oracle(feed.rows(), CITIES, on=["k"], how=how)
    assert_same_rows(published_rows(tmp_path / "out"), expected, how)
    assert counted(query) == counts_of(feed.rows(), len(expected))
    feed.add(orders(600, 200))
    query = finished(flow, tmp_path)
    expected = join_oracle(feed.rows(), CITIES, on=["k"], how=how)
    assert_same_rows(published_rows(tmp_path / "out"), expected, f"{how}, after a restart")
    assert counted(query) == counts_of(feed.rows(), len(expected))
    assert query.progress.operators[0].relation_version == 1
    assert [commit["rows"]["1-enrich"] for commit in commits_of(tmp_path / "checkpoint")][-1] > 0
    assert unnamed_state_files(tmp_path / "checkpoint") == set()
    assert not list((tmp_path / "checkpoint" / "dovetail" / "state").rglob("*.arrow"))


def test_keys_that_are_cast_and_conditions_give_the_rows_of_shards(
    relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path
) -> None:
    names = stream(source, "names").transform(lambda df: df.withColumn("n", F.concat(F.lit("c"), F.col("n") % 17)))
    feed.add(orders(0, 300))
    rows = {}
    for strategy in ("auto", "balanced"):
        flow = names.enrich(relation, on="k", how="left", condition="city <> n", strategy=strategy)
        finished(flow, tmp_path / strategy)
        rows[strategy] = published_rows(tmp_path / strategy / "out")
    assert_same_rows(rows["auto"], rows["balanced"], "with a condition")
    flow = stream(source, "cast").transform(lambda df: df.withColumn("k", F.col("k").cast("int")))
    finished(flow.enrich(relation, on="k", how="left"), tmp_path / "cast")
    assert_same_rows(
        published_rows(tmp_path / "cast" / "out"), join_oracle(feed.rows(), CITIES, on=["k"], how="left"), "cast"
    )


def test_empty_micro_batches_commit_nothing_but_the_columns(
    relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path, spark: SparkSession
) -> None:
    feed.add(orders(0, 50).slice(0, 0))
    query = finished(stream(source, "empty").enrich(relation, on="k"), tmp_path)
    assert spark.read.parquet(str(tmp_path / "out")).columns == ["k", "n", "city"]
    assert counted(query) == {"in": 0, "null": 0, "matched": 0, "unmatched": 0, "out": 0}


# ==================================================================== how it is done


def test_lookups_need_no_shuffle_and_a_step_behind_them_only_its_own(
    relation: Relation, mayors: Relation, feed: Feed, source: DataFrame, tmp_path: Path
) -> None:
    feed.add(orders(0, 100))
    flow = stream(source, "one").enrich(relation, on="k").enrich(mayors, on="city", how="left")
    reader = PlanReader()
    finished(flow, tmp_path / "one", reader)
    assert not SHUFFLE.search(reader.plans[0]), reader.plans[0]
    assert reader.plans[0].count("MapInArrow") == 2
    assert reader.partitions == [1], "one for the file, and none for ticks"
    keyed = flow.surrogate_key("number", tmp_path / "keys", on="n").enrich(mayors, on="city", how="semi")
    reader = PlanReader()
    finished(keyed, tmp_path / "keyed", reader)
    assert len(SHUFFLE.findall(reader.plans[0])) == 1
    assert reader.plans[0].count("MapInArrow") == 4


def test_explain_tells_of_lookups_and_of_shards_where_there_are(relation: Relation, source: DataFrame) -> None:
    flow = stream(source, "told")
    plain = dt.explain(flow.enrich(relation, on="k", refresh="batch")).as_dict()["steps"][0]
    assert (plain["plan"]["route"], plain["plan"]["refresh"]) == ("lookup", "batch")
    for options in ({"strategy": "balanced"}, {"max_delay": "1 second"}):
        sharded = dt.explain(flow.enrich(relation, on="k", **options)).as_dict()["steps"][0]
        assert (sharded["plan"]["route"], sharded["shards"]) == ("shards", 3)


@pytest.mark.parametrize("options", [{"strategy": "mesh"}, {"strategy": "balanced"}, {"max_delay": "1 hour"}])
def test_strategy_asked_for_and_rows_that_may_wait_go_to_shards(
    relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path, options: dict[str, str]
) -> None:
    feed.add(orders(0, 100))
    reader = PlanReader()
    finished(stream(source, "sharded").enrich(relation, on="k", **options), tmp_path, reader)
    assert len(SHUFFLE.findall(reader.plans[0])) == 1


# ==================================================================== counters


@pytest.mark.parametrize(
    "then",
    [
        lambda rows: rows.orderBy("n"),  # Spark samples first: every task runs twice
        lambda rows: rows.repartition(5).coalesce(1).coalesce(1),
        lambda rows: rows.coalesce(1),  # one task computes several partitions
        lambda rows: rows.union(rows).distinct(),
    ],
    ids=["sorted", "repartitioned", "coalesced", "twice"],
)
def test_counters_are_exact_however_tasks_are_run(
    relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path, then: Callable[[DataFrame], DataFrame]
) -> None:
    feed.add(orders(0, 400))
    spread = stream(source, "counted").transform(lambda rows: rows.repartition(7, "n"))
    query = finished(spread.enrich(relation, on="k", how="left").transform(then), tmp_path)
    assert_same_rows(published_rows(tmp_path / "out"), join_oracle(feed.rows(), CITIES, on=["k"], how="left"), "rows")
    assert counted(query) == counts_of(feed.rows(), 400)
    assert commits_of(tmp_path / "checkpoint")[0]["rows"] == {"1-enrich": 400}


def test_transformation_that_leaves_rows_uncomputed_fails_the_micro_batch(
    relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path
) -> None:
    feed.add(orders(0, 400))
    flow = stream(source, "limited").enrich(relation, on="k", how="left").transform(lambda rows: rows.limit(3))
    with pytest.raises(InternalError, match="some task was not computed to its end"):
        finished(flow, tmp_path)
    assert commits_of(tmp_path / "checkpoint") == []


# ==================================================================== the relation changes


class FailsOnce(sinks.parquet("unused").__class__):  # type: ignore[misc]
    """Fails after the rows of its first micro-batch were staged: what is done again must be the same."""

    failed = False

    def stage(self, df: DataFrame, batch: int) -> Receipt:
        receipt = super().stage(df, batch)
        if not FailsOnce.failed:
            FailsOnce.failed = True
            raise ValueError("the power is gone")
        return receipt


@pytest.mark.parametrize(
    ("refresh", "later"),
    [("query", {}), ("batch", {}), ("batch", {"max_delay": "1 hour"})],
    ids=["query", "batch", "on shards"],
)
def test_replay_sees_the_version_of_the_intent_and_the_next_batch_the_newest(
    relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path, refresh: Any, later: dict[str, Any]
) -> None:
    def flow(**options: Any) -> Flow:
        newest = Relation.open(relation.path)
        return stream(source, "fresh").enrich(newest, on="k", how="left", refresh=refresh, **options)

    FailsOnce.failed = False
    feed.add(orders(0, 100))
    with pytest.raises(ValueError, match="the power is gone"):
        finished(flow(), tmp_path, FailsOnce(tmp_path / "out"))
    relation.upsert(pa.table({"k": list(range(KEYS)), "city": ["new"] * KEYS}))
    feed.add(orders(100, 100))
    query = finished(flow(**later), tmp_path)
    old = join_oracle(orders(0, 100).to_pylist(), CITIES, on=["k"], how="left")
    changed = [{"k": key, "city": "new"} for key in range(KEYS)]
    new = join_oracle(orders(100, 100).to_pylist(), changed, on=["k"], how="left")
    assert_same_rows(published_rows(tmp_path / "out"), old + new, "two versions")
    assert query.progress.operators[0].relation_version == 2


def test_relation_that_goes_away_or_is_built_anew_is_a_clear_error_and_nothing_is_lost(
    relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path
) -> None:
    planned = stream(source, "lost").enrich(relation, on="k", how="left")
    feed.add(orders(0, 100))
    finished(planned, tmp_path)
    path, away = Path(relation.path), tmp_path / "away"
    shutil.move(path, away)
    feed.add(orders(100, 100))
    with pytest.raises(RelationError, match=r"does not exist.*Nothing was lost: put the relation back"):
        finished(planned, tmp_path)
    Relation.build(pa.Table.from_pylist(CITIES), path, on="k", shards=3)
    with pytest.raises(RelationError, match="was removed and built anew while the flow was running"):
        finished(planned, tmp_path)
    shutil.rmtree(path)
    shutil.move(away, path)
    finished(planned, tmp_path)
    assert_same_rows(published_rows(tmp_path / "out"), join_oracle(feed.rows(), CITIES, on=["k"], how="left"), "all")


# ==================================================================== checkpoints


def test_tuples_that_wait_of_a_time_with_a_delay_are_drained_and_then_nothing_waits(
    relation: Relation, feed: Feed, source: DataFrame, tmp_path: Path
) -> None:
    def flow(**options: Any) -> Flow:
        return stream(source, "delays").enrich(relation, on="k", how="left", budget="900kB", **options)

    def taken(query: FlowQuery) -> int:
        return 0 if query.progress is None else query.progress.operators[0].totals.stream_tuples_in

    # So many tuples for so few rows that a scan is the cheapest way on any host: they wait for it.
    count = 5000
    sink, checkpoint = sinks.parquet(tmp_path / "out"), tmp_path / "checkpoint"
    for delay in ("1 hour", None, "1 hour"):
        feed.add(orders(count * len(feed.files()), count))
        feed.add(orders(count * len(feed.files()), count))
        query = flow(max_delay=delay).write(sink, checkpoint=checkpoint)
        wait_until(lambda q=query: taken(q) == count * len(feed.files()) or not q.isActive, "the files")  # type: ignore[misc]
        query.stop()
        assert query.exception() is None
        newest = commits_of(checkpoint)[-1]["operators"]["1-enrich"]
        assert len(newest) == (1 if delay is None else 3)
        assert delay is not None or query.progress.pending == 0
        if delay == "1 hour" and len(feed.files()) == 2:
            _let_all_wait(checkpoint)
    query = finished(flow(), tmp_path, sink)
    expected = join_oracle(feed.rows(), CITIES, on=["k"], how="left")
    assert_same_rows(published_rows(tmp_path / "out"), expected, "whatever waited")
    assert counted(query) == counts_of(feed.rows(), len(expected))


def _let_all_wait(checkpoint: Path) -> None:
    """There must be something to drain, or the test shows nothing."""
    shards = commits_of(checkpoint)[-1]["operators"]["1-enrich"]
    assert sum(shard["report"]["pending"] for shard in shards) > 0
    assert any(shard["files"] for shard in shards)
