"""A changed flow that goes on where an older one stopped: `resume_from`."""

import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dovetail import Relation
from dovetail.core.errors import PlanError, StateError
from dovetail.spark import sinks
from dovetail.spark.flow.query import FlowQuery
from dovetail.spark.steps.stream import Flow, stream
from dovetail.testing.flows import Feed, published_rows, wait_until
from dovetail.testing.oracle import join_oracle
from dovetail.testing.rows import assert_same_rows

CITIES = [{"k": key, "city": f"c{key % 5}"} for key in range(0, 50, 2)]
MAYORS = [{"city": f"c{number}", "mayor": f"m{number}"} for number in range(4)]


def orders(first: int, count: int) -> pa.Table:
    numbers = list(range(first, first + count))
    return pa.table({"n": numbers, "k": [number * 7919 % 50 for number in numbers]})


@pytest.fixture
def cities(tmp_path: Path) -> Relation:
    return Relation.build(pa.Table.from_pylist(CITIES), tmp_path / "cities", on="k", shards=2)


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


def finished(flow: Flow, target: Path, checkpoint: Path, **options: object) -> FlowQuery:
    query = flow.write(sinks.parquet(target), checkpoint=checkpoint, trigger="available-now", **options)  # type: ignore[arg-type]
    assert query.awaitTermination(120), "the flow did not end"
    return query


def test_steps_and_columns_come_and_go_and_every_row_is_taken_once(
    cities: Relation, mayors: Relation, feed: Feed, source: DataFrame, tmp_path: Path
) -> None:
    first = (
        stream(source, "orders")
        .enrich(cities, on="k", how="left")
        .surrogate_key("city_id", tmp_path / "keys", on="city")
    )
    for start in (0, 100):
        feed.add(orders(start, 100))
    finished(first, tmp_path / "one", tmp_path / "old")
    ids = {row["city"]: row["city_id"] for row in published_rows(tmp_path / "one")}
    feed.add(orders(200, 100))
    # A column more, and a step more in front of the one that has state.
    wider = stream(source.withColumn("twice", F.col("n") * 2), "orders")
    changed = (
        wider.enrich(cities, on="k", how="left")
        .enrich(mayors, on="city", how="left")
        .surrogate_key("city_id", tmp_path / "keys", on="city")
    )
    finished(changed, tmp_path / "two", tmp_path / "new", resume_from=tmp_path / "old")
    rows = [row | {"twice": 2 * row["n"]} for row in feed.rows() if row["n"] >= 200]
    joined = join_oracle(join_oracle(rows, CITIES, on=["k"], how="left"), MAYORS, on=["city"], how="left")
    expected = [row | {"city_id": ids[row["city"]]} for row in joined]
    assert_same_rows(published_rows(tmp_path / "two"), expected, "the rows that followed, with the keys as they were")
    # Starting again with resume_from goes on with the new checkpoint.
    feed.add(orders(300, 50))
    finished(changed, tmp_path / "two", tmp_path / "new", resume_from=tmp_path / "old")
    assert sorted(row["n"] for row in published_rows(tmp_path / "two")) == list(range(200, 350))
    with pytest.raises(StateError, match=r"was resumed in .*new: the flow continues there"):
        finished(first, tmp_path / "one", tmp_path / "old")
    with pytest.raises(StateError, match=r"was resumed in .*new already"):
        finished(changed, tmp_path / "two", tmp_path / "third", resume_from=tmp_path / "old")


def test_rows_that_wait_in_a_changed_step_are_not_left_behind(
    cities: Relation, feed: Feed, source: DataFrame, tmp_path: Path
) -> None:
    def flow(**options: object) -> Flow:
        return stream(source, "orders").enrich(cities, on="k", strategy="mesh", budget="900kB", **options)  # type: ignore[arg-type]

    feed.add(orders(0, 3000))
    query = flow(max_delay="1 hour").write(sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "old")
    wait_until(lambda: query.progress is not None and query.progress.pending > 0, "tuples that wait")
    wait_until(lambda: (tmp_path / "old" / "commits" / "0").exists(), "Spark's commit")
    query.stop()
    with pytest.raises(StateError, match=r"'1-enrich' of the old flow .* holds \d+ rows that would be lost"):
        finished(flow(how="left"), tmp_path / "out", tmp_path / "new", resume_from=tmp_path / "old")
    assert not (tmp_path / "old" / "dovetail" / "moved.json").exists(), "the old flow can still go on"
    # Unchanged, the step takes what waits along.
    wait_until(lambda: not query.isActive, "the end")
    finished(flow(), tmp_path / "out", tmp_path / "newer", resume_from=tmp_path / "old")
    assert_same_rows(
        published_rows(tmp_path / "out"), join_oracle(feed.rows(), CITIES, on=["k"], how="inner"), "all rows"
    )


def test_resume_that_was_cut_off_is_done_again(cities: Relation, feed: Feed, source: DataFrame, tmp_path: Path) -> None:
    flow = stream(source, "orders").enrich(cities, on="k", how="left")
    feed.add(orders(0, 100))
    finished(flow, tmp_path / "out", tmp_path / "old")
    feed.add(orders(100, 100))
    # What is there when the process dies before the last document: parts of Spark's half, and the mark in the old one.
    new, untouched = tmp_path / "new", tmp_path / "untouched"
    shutil.copytree(tmp_path / "old", untouched)
    finished(flow, tmp_path / "unused", new, resume_from=tmp_path / "old")
    (new / "dovetail" / "resume-done.json").unlink()
    (new / "offsets" / "0").unlink()
    shutil.rmtree(tmp_path / "old")
    shutil.move(untouched, tmp_path / "old")
    with pytest.raises(StateError, match=r"was to be resumed from .*old, and that was cut off"):
        finished(flow, tmp_path / "out", new)
    finished(flow, tmp_path / "out", new, resume_from=tmp_path / "old")
    assert sorted(row["n"] for row in published_rows(tmp_path / "out")) == list(range(200))


def test_what_cannot_be_resumed_is_refused(cities: Relation, feed: Feed, source: DataFrame, tmp_path: Path) -> None:
    flow = stream(source, "orders").enrich(cities, on="k", how="left")
    feed.add(orders(0, 10))
    finished(flow, tmp_path / "out", tmp_path / "old")
    for options, error, message in [
        ({"checkpoint": tmp_path / "old"}, PlanError, "is the checkpoint itself"),
        ({"resume_from": tmp_path / "nothing"}, StateError, "has no commit to continue from"),
    ]:
        wanted = {"checkpoint": tmp_path / "new", "resume_from": tmp_path / "old"} | options
        with pytest.raises(error, match=message):
            flow.write(sinks.parquet(tmp_path / "out"), **wanted)  # type: ignore[arg-type]
    renamed = stream(source, "others").enrich(cities, on="k", how="left")
    with pytest.raises(StateError, match="is the checkpoint of the flow 'orders', this flow is 'others'"):
        finished(renamed, tmp_path / "out", tmp_path / "new", resume_from=tmp_path / "old")
    finished(flow, tmp_path / "other", tmp_path / "used")
    with pytest.raises(StateError, match="is in use already"):
        finished(flow, tmp_path / "out", tmp_path / "used", resume_from=tmp_path / "old")
