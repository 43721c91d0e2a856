"""What a flow keeps, as other readers see it: while it runs, when a run has ended, and with the next checkpoint."""

import json
import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import dovetail as dt
from dovetail.core.errors import PlanError, StateError
from dovetail.relation import Relation
from dovetail.spark.flow.store import FlowStore
from dovetail.spark.steps import folds
from dovetail.spark.steps.stream import Flow
from dovetail.testing.flows import Feed, published_rows, wait_until

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
SCHEMA = "id long, city string, ts timestamp, n long"

Row = dict[str, Any]


def rows_of(numbers: range) -> pa.Table:
    """Rows whose key comes again and again, with another city from time to time."""
    return pa.table(
        {
            "id": pa.array([n * 7 % 23 for n in numbers], pa.int64()),
            "city": [f"city {n // 20 % 3}" for n in numbers],
            "ts": pa.array([BEGIN + timedelta(seconds=n) for n in numbers], pa.timestamp("us", tz="UTC")),
            "n": pa.array(numbers, pa.int64()),
        }
    )


def source(spark: SparkSession, feed: Feed) -> Any:
    return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(feed.directory))


def upserting(spark: SparkSession, feed: Feed, root: Path, **options: Any) -> Flow:
    """A type 1 dimension; unless told otherwise, only the end of a run folds its few rows."""
    chosen = {"fold_every": "1 hour", **options}
    return dt.stream(source(spark, feed), "kept").upsert(
        root / "dim", on="id", columns=["city", "n"], order_by="n", shards=2, **chosen
    )


def start(flow: Flow, root: Path, checkpoint: str = "ckpt", trigger: str | None = "available-now") -> Any:
    return flow.write(dt.sinks.parquet(root / "out"), checkpoint=root / checkpoint, trigger=trigger)


def run(flow: Flow, root: Path, checkpoint: str = "ckpt") -> None:
    start(flow, root, checkpoint).awaitTermination()


def last_rows(feed: Feed) -> dict[int, tuple[str, int]]:
    """The last row of each key, by plain Python."""
    return {row["id"]: (row["city"], row["n"]) for row in sorted(feed.rows(), key=lambda row: row["n"])}


def in_dimension(root: Path) -> dict[int, tuple[str, int]]:
    rows = Relation.open(root / "dim").to_arrow().to_pylist()
    found = {row["id"]: (row["city"], row["n"]) for row in rows}
    assert len(found) == len(rows), "a key has two rows"
    return found


def versions(path: Path) -> list[int]:
    return [info.version for info in Relation.open(path).versions()]


def test_run_to_the_end_leaves_everything_visible(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "feed")
    for part in range(3):
        feed.add(rows_of(range(part * 30, part * 30 + 30)))
        feed.add(rows_of(range(part * 30 + 10, part * 30 + 20)))
        run(upserting(spark, feed, tmp_path), tmp_path)
        assert in_dimension(tmp_path) == last_rows(feed)


def test_run_without_new_rows_finds_the_last_fold(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "feed")
    feed.add(rows_of(range(40)))
    run(upserting(spark, feed, tmp_path), tmp_path)
    folded = versions(tmp_path / "dim")
    assert len(folded) == 2
    run(upserting(spark, feed, tmp_path), tmp_path)
    assert versions(tmp_path / "dim") == folded
    feed.add(rows_of(range(40, 50)))
    run(upserting(spark, feed, tmp_path), tmp_path)
    assert in_dimension(tmp_path) == last_rows(feed)
    assert len(versions(tmp_path / "dim")) == 3, "the first fold was found, and not made again"


def test_history_of_a_run_is_joined_as_of_a_time(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "feed")
    feed.add(rows_of(range(60)))
    flow = dt.stream(source(spark, feed), "history").history(
        tmp_path / "dim", on="id", time="ts", columns=["city"], shards=2
    )
    run(flow, tmp_path)
    facts = spark.createDataFrame(rows_of(range(60))).select("id", "ts", "n")
    condition = "valid_from <= ts AND ts < valid_to"
    joined = dt.enrich(facts, tmp_path / "dim", on="id", how="left", condition=condition)
    assert {row["n"]: row["city"] for row in joined.collect()} == {row["n"]: row["city"] for row in feed.rows()}


def test_program_that_only_asks_whether_it_runs_sees_everything(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "feed")
    feed.add(rows_of(range(40)))
    query = start(upserting(spark, feed, tmp_path), tmp_path)
    wait_until(lambda: not query.isActive, "the end")
    assert in_dimension(tmp_path) == last_rows(feed)
    assert query.exception() is None


def test_changes_are_seen_while_the_flow_runs(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "feed")
    flow = upserting(spark, feed, tmp_path, fold_every="200 ms")
    query = start(flow, tmp_path, trigger="50 ms")
    try:
        for part in range(3):
            feed.add(rows_of(range(part * 30, part * 30 + 30)))
            wait_until(lambda: in_dimension(tmp_path) == last_rows(feed), "what was added last")
        assert "fold every    0.2 seconds" in str(dt.explain(flow))
    finally:
        query.stop()
    assert in_dimension(tmp_path) == last_rows(feed)


def test_stop_leaves_everything_visible(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "feed")
    feed.add(rows_of(range(40)))
    query = start(upserting(spark, feed, tmp_path, fold_every="1 hour"), tmp_path, trigger=None)
    wait_until(lambda: len(published_rows(tmp_path / "out")) == 40, "all rows")
    assert in_dimension(tmp_path) == {}, "an hour has not passed"
    query.stop()
    assert in_dimension(tmp_path) == last_rows(feed)
    feed.add(rows_of(range(40, 80)))
    run(upserting(spark, feed, tmp_path), tmp_path)
    assert in_dimension(tmp_path) == last_rows(feed)


def test_drained_flow_goes_on_with_a_new_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "feed")

    def keyed() -> Flow:
        return dt.stream(source(spark, feed), "keyed").surrogate_key("sk", tmp_path / "keys", on=["id", "city"])

    feed.add(rows_of(range(40)))
    query = start(keyed(), tmp_path, "first", trigger=None)
    wait_until(lambda: len(published_rows(tmp_path / "out")) == 40, "all rows")
    query.stop(drain=True)
    # The new checkpoint reads the feed from its beginning: every key that was given must come again.
    feed.add(rows_of(range(40, 100)))
    run(keyed(), tmp_path, "second")
    numbers: dict[Any, int] = {}
    rows = published_rows(tmp_path / "out")
    assert len(rows) == 140
    for row in rows:
        assert numbers.setdefault((row["id"], row["city"]), row["sk"]) == row["sk"], "a key has two numbers"
    assert len(set(numbers.values())) == len(numbers) > 40, "a number was given twice"
    stored = {(row["id"], row["city"]): row["sk"] for row in Relation.open(tmp_path / "keys").to_arrow().to_pylist()}
    assert stored == numbers


def test_older_copy_of_the_checkpoint_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "feed")
    feed.add(rows_of(range(40)))
    run(upserting(spark, feed, tmp_path), tmp_path)
    shutil.copytree(tmp_path / "ckpt", tmp_path / "copy")
    feed.add(rows_of(range(40, 80)))
    run(upserting(spark, feed, tmp_path), tmp_path)
    before = versions(tmp_path / "dim")
    shutil.rmtree(tmp_path / "ckpt")
    (tmp_path / "copy").rename(tmp_path / "ckpt")
    feed.add(rows_of(range(80, 90)))
    shutil.rmtree(tmp_path / "out")  # which would refuse the copy as well
    with pytest.raises(StateError, match="older copy of the checkpoint was restored"):
        run(upserting(spark, feed, tmp_path), tmp_path)
    assert versions(tmp_path / "dim") == before


def test_copy_from_before_the_first_commit_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "feed")
    feed.add(rows_of(range(40)))
    run(upserting(spark, feed, tmp_path), tmp_path)
    for name in ("offsets", "commits", "sources", "dovetail/commits", "dovetail/intents"):
        shutil.rmtree(tmp_path / "ckpt" / name)
    shutil.rmtree(tmp_path / "out")  # which would refuse the copy as well
    with pytest.raises(StateError, match="which is at no micro-batch"):
        run(upserting(spark, feed, tmp_path), tmp_path)
    assert in_dimension(tmp_path) == last_rows(feed)


def test_fold_every_must_be_a_duration(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="fold_every='soon' is not a duration"):
        upserting(spark, Feed(tmp_path / "feed"), tmp_path, fold_every="soon")


# ==================================================================== versions that may go


def test_versions_that_nobody_needs_are_removed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folds, "YOUNG_S", 0)
    feed = Feed(tmp_path / "feed")
    for part in range(7):
        feed.add(rows_of(range(part * 20, part * 20 + 20)))
        flow = upserting(spark, feed, tmp_path, fold_every="0 s")
        flow.write(
            dt.sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "ckpt", trigger="available-now", keep_commits=2
        ).awaitTermination()
        assert in_dimension(tmp_path) == last_rows(feed)
    found = versions(tmp_path / "dim")
    assert found[-1] >= 8, "it folded in every run"
    # The newest three, and those that two commits and the intents of their time name.
    assert len(found) <= 6


def test_young_versions_stay_for_readers_that_pin_nothing(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "feed")
    for part in range(6):
        feed.add(rows_of(range(part * 20, part * 20 + 20)))
        flow = upserting(spark, feed, tmp_path, fold_every="0 s")
        flow.write(
            dt.sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "ckpt", trigger="available-now", keep_commits=2
        ).awaitTermination()
    found = versions(tmp_path / "dim")
    assert found == list(range(1, found[-1] + 1))


def test_reader_and_flow_keep_their_versions_when_somebody_vacuums(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "feed")
    feed.add(rows_of(range(40)))
    query = start(upserting(spark, feed, tmp_path, fold_every="1 hour"), tmp_path, trigger=None)
    wait_until(lambda: len(published_rows(tmp_path / "out")) == 40, "all rows")
    query.stop()
    seen = in_dimension(tmp_path)
    facts = spark.createDataFrame([(key,) for key in seen], "id long")
    joined = dt.enrich(facts, tmp_path / "dim", on="id", select=["city", "n"])
    listed = Relation.open(tmp_path / "dim").to_df(spark)
    for part in range(2, 5):
        feed.add(rows_of(range(part * 20, part * 20 + 20)))
        run(upserting(spark, feed, tmp_path, fold_every="0 s"), tmp_path)
        Relation.open(tmp_path / "dim").vacuum(keep=1)
    for rows in (joined, listed):
        assert {row["id"]: (row["city"], row["n"]) for row in rows.collect()} == seen
    assert in_dimension(tmp_path) == last_rows(feed) != seen


def test_micro_batch_that_was_under_way_when_the_last_fold_was_made_goes_on_as_it_began(
    spark: SparkSession, tmp_path: Path
) -> None:
    feed = Feed(tmp_path / "feed")
    feed.add(rows_of(range(40)))
    query = start(upserting(spark, feed, tmp_path, fold_every="1 hour"), tmp_path, trigger=None)
    wait_until(lambda: len(published_rows(tmp_path / "out")) == 40, "all rows")
    query.stop()
    assert versions(tmp_path / "dim") == [1, 2]
    store = FlowStore(tmp_path / "ckpt")
    last = store.last_batch()
    assert last is not None
    intent = store.intent(last)
    assert intent is not None
    parts = {"1-upsert": {**intent["operators"]["1-upsert"], "batch": last + 1}}
    # What the driver had written down if it was stopped at that moment; most often it was. Of which rows, Spark says.
    others = {name: value for name, value in intent.items() if name != "offsets"}
    interrupted = store.create_intent(last + 1, {**others, "batch": last + 1, "operators": parts})
    assert interrupted["operators"]["1-upsert"]["version"] == 1, "the version before the fold"
    Relation.open(tmp_path / "dim").vacuum(keep=1)
    feed.add(rows_of(range(40, 80)))
    run(upserting(spark, feed, tmp_path), tmp_path)
    commit = store.commit(last + 1)
    assert commit is not None
    assert {shard["values"]["version"] for shard in commit["operators"]["1-upsert"]} == {1}
    assert in_dimension(tmp_path) == last_rows(feed)
    assert sorted(row["n"] for row in published_rows(tmp_path / "out")) == list(range(80))


def test_version_of_a_flow_that_joins_is_pinned_until_a_week_after_its_end(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "feed")
    relation = Relation.build(pa.table({"id": [1], "name": ["old"]}), tmp_path / "names", on="id", shards=2)
    flow = dt.stream(source(spark, feed).select("id", "n"), "joins").enrich(relation, on="id", how="left")
    query = start(flow, tmp_path, trigger=None)
    try:
        wait_until(lambda: query.progress is not None, "the first micro-batch")
        for name in ("newer", "newest"):
            relation = relation.upsert(pa.table({"id": [1], "name": [name]}))
        assert relation.vacuum(keep=1).versions == (2,)
        feed.add(pa.table({"id": [1], "city": ["x"], "ts": pa.array([BEGIN]), "n": [7]}))
        wait_until(lambda: published_rows(tmp_path / "out"), "the row")
    finally:
        query.stop()
    assert [(row["n"], row["name"]) for row in published_rows(tmp_path / "out")] == [(7, "old")]
    assert relation.vacuum(keep=1).versions == ()
    (pin,) = (tmp_path / "names" / "pins").glob("flow-*.json")
    assert json.loads(pin.read_text())["holder"]["checkpoint"] == str(tmp_path / "ckpt")
    os.utime(pin, (0, 0))
    assert relation.vacuum(keep=1).versions == (1,)
