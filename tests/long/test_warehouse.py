"""The warehouse's transformations in flows on Spark, against what plain Python makes of the same rows."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import dovetail as dt
from dovetail.core.errors import PlanError, SchemaError
from dovetail.relation import Relation
from dovetail.spark.steps.stream import Flow
from dovetail.testing.flows import Feed, published_rows, wait_until

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
SCHEMA = "source string, id long, city string, ts timestamp, n long"


def rows_of(numbers: range) -> pa.Table:
    """Rows whose key comes again and again, with another city from time to time."""
    return pa.table(
        {
            "source": [("web", "shop")[n % 2] for n in numbers],
            "id": pa.array([None if n % 17 == 0 else n * 7 % 23 for n in numbers], pa.int64()),
            "city": [f"city {n // 20 % 3}" for n in numbers],
            "ts": pa.array([BEGIN + timedelta(seconds=n) for n in numbers], pa.timestamp("us", tz="UTC")),
            "n": pa.array(numbers, pa.int64()),
        }
    )


def source(spark: SparkSession, feed: Feed) -> Any:
    return spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(str(feed.directory))


def run(flow: Flow, root: Path) -> list[dict[str, Any]]:
    query = flow.write(dt.sinks.parquet(root / "out"), checkpoint=root / "ckpt", trigger="available-now")
    query.awaitTermination()
    return published_rows(root / "out")


def test_keys_duplicates_and_changes_over_restarts_and_folds(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "feed")

    def flow() -> Flow:
        return (
            dt.stream(source(spark, feed), "keyed")
            .surrogate_key("sk", tmp_path / "keys", on=["source", "id"], budget="600 B", shards=2)
            .upsert(tmp_path / "dim", on={"sk": "key"}, columns=["city"], order_by="n", budget="400 B", shards=2)
        )

    for part in range(2):
        for number in range(2):
            first = (part * 2 + number) * 40
            feed.add(rows_of(range(first, first + 40)))
        found = run(flow(), tmp_path)
    given = feed.rows()
    assert Counter(row["n"] for row in found) == Counter(row["n"] for row in given)
    numbers: dict[Any, int | None] = {}
    for row in found:
        key = (row["source"], row["id"])
        assert (row["sk"] is None) == (row["id"] is None)
        assert numbers.setdefault(key, row["sk"]) == row["sk"]
    assigned = [number for number in numbers.values() if number is not None]
    assert len(set(assigned)) == len(assigned) > 30
    last: dict[int, str] = {}
    change = {}
    for row in sorted(found, key=lambda row: row["n"]):
        key = row["sk"]
        known = key is not None and key in last
        change[row["n"]] = "inserted" if not known else "unchanged" if last[key] == row["city"] else "changed"
        if key is not None:
            last[key] = row["city"]
    assert {row["n"]: row["change"] for row in found} == change
    versions = [version.operation for version in Relation.open(tmp_path / "keys").versions()]
    assert versions[0] == "build"
    assert "upsert" in versions, "nothing was folded"


def test_history_is_looked_up_by_time(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "feed")
    feed.add(rows_of(range(60)))
    dimension = dt.stream(source(spark, feed), "history").history(
        tmp_path / "dim", on=["source", "id"], time="ts", columns=["city"], shards=2, budget="100 B"
    )
    run(dimension, tmp_path / "first")
    feed.add(rows_of(range(60, 120)))
    versions = run(dimension, tmp_path / "first")
    facts = spark.createDataFrame(rows_of(range(120))).select("source", "id", "ts", "n")
    joined = dt.enrich(
        facts, tmp_path / "dim", on=["source", "id"], how="left", condition="valid_from <= ts AND ts < valid_to"
    )
    found = {row["n"]: row["city"] for row in joined.collect()}
    expected = {row["n"]: row["city"] if row["id"] is not None else None for row in rows_of(range(120)).to_pylist()}
    assert found == expected
    begins = {(row["source"], row["id"], row["valid_from"]) for row in versions}
    assert len(begins) == Relation.open(tmp_path / "dim").stats.rows


def test_early_fact_leaves_when_its_row_comes_or_its_time_is_up(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "feed")
    master = Relation.build(pa.table({"id": [1], "name": ["one"]}), tmp_path / "master", on="id", shards=2)
    ids = [1, 2, 3, None]
    feed.add(
        pa.table(
            {
                "source": ["web"] * 4,
                "id": pa.array(ids, pa.int64()),
                "city": ["x"] * 4,
                "ts": pa.array([BEGIN] * 4, pa.timestamp("us", tz="UTC")),
                "n": pa.array(range(4), pa.int64()),
            }
        )
    )
    flow = dt.stream(source(spark, feed).select("id", "n"), "early").wait_for(master, on="id", deadline="1 hour")
    out, checkpoint = tmp_path / "out", tmp_path / "ckpt"
    query = flow.write(dt.sinks.parquet(out), checkpoint=checkpoint)
    wait_until(lambda: len(published_rows(out)) == 2, "what needs not wait")
    # Rows are to be seen a moment before the flow tells of them.
    wait_until(lambda: query.progress is not None and query.progress.pending == 2, "two rows that wait")
    master.upsert(pa.table({"id": [2], "name": ["two"]}))
    wait_until(lambda: len(published_rows(out)) == 3, "the row that has come")
    query.stop()
    late = dt.stream(source(spark, feed).select("id", "n"), "early").wait_for(master, on="id", deadline="0 seconds")
    query = late.write(dt.sinks.parquet(out), checkpoint=checkpoint)
    wait_until(lambda: len(published_rows(out)) == 4, "the one whose time is up")
    query.stop()
    assert {row["n"]: row["name"] for row in published_rows(out)} == {0: "one", 1: "two", 2: None, 3: None}


def test_early_fact_goes_to_the_side_when_its_time_is_up(spark: SparkSession, tmp_path: Path) -> None:
    feed = Feed(tmp_path / "feed")
    kinds = pa.schema([("id", pa.int64()), ("n", pa.int64()), ("at", pa.timestamp("us", tz="UTC"))])
    feed.add(pa.table({"id": [1, 2, None], "n": [0, 1, 2], "at": [BEGIN] * 3}, schema=kinds))
    master = Relation.build(pa.table({"id": [1], "name": ["one"]}), tmp_path / "master", on="id", shards=2)
    rows = spark.readStream.schema("id long, n long, at timestamp").parquet(str(feed.directory))

    def run_with(deadline: str) -> None:
        aside = dt.sinks.parquet(tmp_path / "aside")
        flow = dt.stream(rows, "early").wait_for(master, on="id", deadline=deadline, expired=aside)
        query = flow.write(dt.sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "ckpt", trigger="available-now")
        query.awaitTermination()

    def put_aside() -> list[dict[str, Any]]:
        found = [{**row, "at": row["at"].replace(tzinfo=UTC)} for row in published_rows(tmp_path / "aside")]
        return sorted(found, key=lambda row: row["n"])

    run_with("1 hour")
    assert [(row["n"], row["name"]) for row in published_rows(tmp_path / "out")] == [(0, "one")]
    nobody = {"id": None, "n": 2, "at": BEGIN, "name": None}
    assert put_aside() == [nobody], "what can find nothing does not wait"
    feed.add(pa.table({"id": [1, 3], "n": [3, 4], "at": [BEGIN] * 2}, schema=kinds))
    run_with("0 seconds")
    waited = {"id": 2, "n": 1, "at": BEGIN, "name": None}
    assert sorted(row["n"] for row in published_rows(tmp_path / "out")) == [0, 3]
    assert put_aside() == [waited, nobody], "it had waited; the new one still waits for the next micro-batch"
    with pytest.raises(PlanError, match="is not a sink"):
        dt.stream(rows, "early").wait_for(master, on="id", deadline="1 hour", expired="aside")  # type: ignore[arg-type]


def test_what_cannot_be_kept_is_refused_before_anything_runs(spark: SparkSession, tmp_path: Path) -> None:
    flow = dt.stream(source(spark, Feed(tmp_path / "feed")), "refused")
    with pytest.raises(PlanError, match="no column 'idd'"):
        flow.surrogate_key("sk", tmp_path / "keys", on="idd")
    with pytest.raises(PlanError, match="has a column 'city' already"):
        flow.surrogate_key("city", tmp_path / "keys", on="id")
    with pytest.raises(PlanError, match="emit="):
        flow.detect_changes(tmp_path / "seen", on="id", emit=["new"])  # type: ignore[list-item]
    with pytest.raises(PlanError, match="must be a timestamp"):
        flow.history(tmp_path / "dim", on="id", time="n")
    Relation.build(pa.table({"id": ["a"], "sk": [1]}), tmp_path / "other", on="id")
    with pytest.raises(SchemaError, match="'id' is int64 here"):
        flow.surrogate_key("sk", tmp_path / "other", on="id")
    assert not (tmp_path / "keys").exists(), "planning alone makes nothing"
