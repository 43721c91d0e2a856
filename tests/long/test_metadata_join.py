"""Streams joined with promises: exact across restarts, little state, groups closed once, and what is refused."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from dovetail.core.errors import DovetailError, PlanError
from dovetail.joins.promises import Punctuation
from dovetail.spark import sinks
from dovetail.spark.flow.query import FlowQuery
from dovetail.spark.steps.multi_join import multi_join
from dovetail.spark.steps.stream import Flow
from dovetail.testing.flows import Feed, published_rows
from dovetail.testing.multiway_oracle import multiway_oracle
from dovetail.testing.rows import assert_same_rows
from dovetail_lab.workloads.news import NewsWorkload

START = datetime(2026, 1, 1, tzinfo=UTC)
WORK = NewsWorkload(items=60, accesses_per_item=5, order="random", seed=11)


def stream(spark: SparkSession, feed: Feed, columns: str) -> DataFrame:
    return spark.readStream.schema(columns).option("maxFilesPerTrigger", 1).parquet(str(feed.directory))


def run(flow: Flow, tmp_path: Path) -> FlowQuery:
    query = flow.write(sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint", trigger="available-now")
    assert query.awaitTermination(600), "the flow did not end"
    return query


def details(query: FlowQuery) -> Any:
    progress = query.progress
    assert progress is not None
    return progress.operators[0]


def test_marked_rows_close_groups_once_across_restarts_and_leave_no_state(spark: SparkSession, tmp_path: Path) -> None:
    news_feed, access_feed = Feed(tmp_path / "news"), Feed(tmp_path / "access")
    news = WORK.news(0, WORK.items)
    for part, start in enumerate(range(0, WORK.items, 20)):
        news_feed.add(pa.Table.from_batches([news.slice(start, 20)]))
        records, closed = WORK.accesses(start, start + 20)
        data = pa.Table.from_batches([records]).append_column("over", pa.array([False] * records.num_rows))
        ends = pa.table({"sno": closed, "ipaddr": pa.nulls(len(closed), pa.string()), "over": [True] * len(closed)})
        access_feed.add(pa.concat_tables([ends, data]))
        flow = multi_join(
            {
                "news": stream(spark, news_feed, "sno long, title string, keyword string"),
                "access": stream(spark, access_feed, "sno long, ipaddr string, over boolean"),
            },
            on="sno",
            keys=["news"],
            # The rows that end a number come first in their file: within a micro-batch there is no order.
            punctuations={"access": Punctuation.where("over", data=False)},
            notices="notice",
            budget="4MB",
            shards=2,
        )
        query = run(flow, tmp_path)
        expected = [
            {**row, "notice": None}
            for row in multiway_oracle(
                {"news": news_feed.rows(), "access": [r for r in access_feed.rows() if not r["over"]]},
                [(("news", "sno"), ("access", "sno"))],
            )
        ]
        rows = published_rows(tmp_path / "out")
        assert_same_rows([r for r in rows if r["notice"] is None], expected, f"part {part}")
        told = [row["sno"] for row in rows if row["notice"] == "closed"]
        assert len(told) == len(set(told))
        # No result comes after its group was closed: what is told now was complete before.
        promised = {r["sno"] for r in access_feed.rows() if r["over"]}
        assert set(told) <= promised
    assert sorted(told) == list(range(WORK.items))
    operator = details(query)
    assert dict(operator.state_rows) == {"news": 0, "access": 0}
    assert operator.details["dropped_on_arrival"] + operator.details["closed_rows"] == WORK.items * 6
    assert operator.details["punctuations_in"] == WORK.items
    assert operator.details["punctuations_out"] > 0
    # Closed numbers that are neighbours within a shard are one range; what no neighbour joins is one each.
    assert 0 < operator.details["punctuations_held"] <= WORK.items
    assert operator.details["purge_lag"] == 0
    assert operator.details["saved_bytes"] > 0


def moments(*seconds: int) -> pa.Array:
    return pa.array([START + timedelta(seconds=s) for s in seconds], pa.timestamp("us", "UTC"))


def test_stream_of_punctuations_a_function_and_quarantine(spark: SparkSession, tmp_path: Path) -> None:
    feeds = {name: Feed(tmp_path / name) for name in ("a", "b", "ends")}
    kinds = {
        "a": "k string, ta timestamp, va long",
        "b": "k string, tb timestamp, vb long",
        "ends": "k string, tb timestamp",
    }

    def given(clock: Any) -> list[Punctuation]:
        return [Punctuation.one_of("k", ["w"])]

    def flow() -> Flow:
        streams = {name: stream(spark, feed, kinds[name]) for name, feed in feeds.items()}
        return multi_join(
            {"a": streams["a"], "b": streams["b"]},
            on="k",
            window="1 hour",
            time={"a": "ta", "b": "tb"},
            lateness="10 seconds",
            keys=["a"],
            punctuations={"b": streams["ends"], "a": given},
            on_broken_promise="quarantine",
            notices="notice",
            shards=2,
        )

    feeds["a"].add(pa.table({"k": ["x", "y", "w"], "ta": moments(0, 0, 0), "va": [1, 2, 3]}))
    # The punctuation is there before the data that it speaks of.
    feeds["ends"].add(pa.table({"k": ["x"], "tb": moments(30)}))
    feeds["b"].add(pa.table({"k": ["x"], "tb": moments(5), "vb": [10]}))
    run(flow(), tmp_path)
    feeds["a"].add(pa.table({"k": ["v", "w"], "ta": moments(100, 100), "va": [4, 5]}))
    feeds["b"].add(pa.table({"k": ["x", "y"], "tb": moments(25, 100), "vb": [11, 12]}))
    run(flow(), tmp_path)
    # The watermark is at 90 seconds now: x is closed, and w was by the function, after the first micro-batch.
    feeds["b"].add(pa.table({"k": ["x", "y"], "tb": moments(101, 101), "vb": [13, 14]}))
    query = run(flow(), tmp_path)
    rows = published_rows(tmp_path / "out")
    joined = sorted((row["k"], row["va"], row["vb"]) for row in rows if row["notice"] is None)
    assert joined == [("x", 1, 10), ("x", 1, 11), ("y", 2, 12), ("y", 2, 14)]
    aside = {(row["k"], row["va"], row["vb"]): row["notice"] for row in rows if row["notice"] not in (None, "closed")}
    assert aside == {
        ("w", 5, None): "it matches an earlier punctuation of its input",
        ("x", None, 13): "it matches an earlier punctuation of its input",
    }
    assert details(query).details["broken_promises.punctuation"] == 2
    assert details(query).state_rows["a"] == 3


def test_stream_that_names_a_part_of_the_key_closes_it_in_every_shard(spark: SparkSession, tmp_path: Path) -> None:
    feeds = {name: Feed(tmp_path / name) for name in ("a", "b", "ends")}
    kinds = {
        "a": "k string, j long, ta timestamp, va long",
        "b": "k string, j long, tb timestamp, vb long",
        "ends": "k string, tb timestamp",
    }

    def query() -> FlowQuery:
        streams = {name: stream(spark, feed, kinds[name]) for name, feed in feeds.items()}
        flow = multi_join(
            {"a": streams["a"], "b": streams["b"]},
            on=["k", "j"],
            window="1 hour",
            time={"a": "ta", "b": "tb"},
            lateness="10 seconds",
            keys=["a"],
            punctuations={"b": streams["ends"]},
            on_broken_promise="count",
            shards=3,
        )
        return run(flow, tmp_path)

    numbers = list(range(12))
    feeds["a"].add(pa.table({"k": ["x", "y"] * 6, "j": numbers, "ta": moments(*[0] * 12), "va": numbers}))
    feeds["b"].add(pa.table({"k": ["x"], "j": [0], "tb": moments(5), "vb": [0]}))
    feeds["ends"].add(pa.table({"k": ["x", None], "tb": moments(30, 30)}))
    first = query()
    assert details(first).state_rows["a"] == 12
    feeds["a"].add(pa.table({"k": ["z"], "j": [0], "ta": moments(100), "va": [99]}))
    feeds["b"].add(pa.table({"k": ["x"], "j": [2], "tb": moments(100), "vb": [2]}))
    query()
    # The watermark is at 90 seconds now: all values with x are closed, in whichever shard they are.
    feeds["b"].add(pa.table({"k": ["x", "y"], "j": [4, 5], "tb": moments(101, 101), "vb": [4, 5]}))
    last = query()
    joined = sorted((row["k"], row["j"], row["vb"]) for row in published_rows(tmp_path / "out"))
    assert joined == [("x", 0, 0), ("x", 2, 2), ("y", 5, 5)]
    assert details(last).details["broken_promises.punctuation"] == 1
    # The row whose k is NULL closed nothing; each shard was told of x.
    assert details(last).details["punctuations_in"] == 3
    assert details(last).state_rows["a"] == 7


def test_quarantined_rows_reach_a_side_output_once_across_restarts(spark: SparkSession, tmp_path: Path) -> None:
    feeds = {name: Feed(tmp_path / name) for name in ("a", "b")}
    kinds = {"a": "k long, va string", "b": "k long, vb string, is_last boolean"}

    def query() -> FlowQuery:
        flow = multi_join(
            {name: stream(spark, feed, kinds[name]) for name, feed in feeds.items()},
            on="k",
            keys=["a"],
            punctuations={"b": "is_last"},
            on_broken_promise="quarantine",
            quarantine_path=tmp_path / "aside",
            shards=2,
        )
        return run(flow, tmp_path)

    def aside() -> list[tuple[Any, ...]]:
        rows = [tuple(row.values()) for name in feeds for row in published_rows(tmp_path / "aside" / name)]
        return sorted(rows, key=str)

    feeds["a"].add(pa.table({"k": [1, 2, 3], "va": ["a1", "a2", "a3"]}))
    feeds["b"].add(pa.table({"k": [1, 2], "vb": ["b1", "b2"], "is_last": [True, False]}))
    query()
    assert aside() == []
    feeds["a"].add(pa.table({"k": [3, 4], "va": ["again", "a4"]}))
    feeds["b"].add(pa.table({"k": [1, 2], "vb": ["too late", "b3"], "is_last": [False, False]}))
    query()
    reasons = {
        "1": "it matches an earlier punctuation of its input",
        "3": "it is a second row of a join value that is unique in its input",
    }
    expected = [(1, "too late", False, reasons["1"]), (3, "again", reasons["3"])]
    assert aside() == expected
    # A commit that was not published is: again, with the same rows. Then nothing is new, and nothing comes twice.
    files = sorted((tmp_path / "aside").glob("*/*.parquet"))
    files[0].unlink()
    newest = max((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    newest.unlink()
    (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)
    last = query()
    assert aside() == expected
    rows = published_rows(tmp_path / "out")
    assert sorted((row["k"], row["va"], row["vb"]) for row in rows) == [
        (1, "a1", "b1"),
        (2, "a2", "b2"),
        (2, "a2", "b3"),
    ]
    assert set(rows[0]) == {"k", "va", "vb", "is_last"}
    counted = details(last).details
    assert (counted["broken_promises.punctuation"], counted["broken_promises.unique"]) == (1, 1)


def test_group_count_emits_each_group_once_when_it_closes_across_restarts(spark: SparkSession, tmp_path: Path) -> None:
    news_feed, access_feed = Feed(tmp_path / "news"), Feed(tmp_path / "access")
    news, told = WORK.news(0, WORK.items), []
    for start in range(0, WORK.items, 30):
        news_feed.add(pa.Table.from_batches([news.slice(start, 30)]))
        records, closed = WORK.accesses(start, start + 30)
        data = pa.Table.from_batches([records]).append_column("over", pa.array([False] * records.num_rows))
        ends = pa.table({"sno": closed, "ipaddr": pa.nulls(len(closed), pa.string()), "over": [True] * len(closed)})
        access_feed.add(pa.concat_tables([ends, data]))
        flow = multi_join(
            {
                "news": stream(spark, news_feed, "sno long, title string, keyword string"),
                "access": stream(spark, access_feed, "sno long, ipaddr string, over boolean"),
            },
            on="sno",
            keys=["news"],
            punctuations={"access": Punctuation.where("over", data=False)},
            notices="notice",
            # As if the first run had been on a host with one more core.
            shards=spark.sparkContext.defaultParallelism + 1 if start == 0 else None,
        )
        counted = flow.aggregate_closed({"accesses": "count", "first": ("min", "sno")})
        join, groups = counted.explanation().as_dict()["steps"]
        assert (join["algorithm"], join["keys"], groups["kind"]) == ("1-NP", ["news"], "aggregate_closed")
        assert join["punctuations"] == ["access: over, which are not data"]
        query = run(counted, tmp_path)
        told = [(row["sno"], row["accesses"], row["first"]) for row in published_rows(tmp_path / "out")]
        assert len(told) == len({sno for sno, _, _ in told})
    expected = Counter(row["sno"] for row in access_feed.rows() if not row["over"])
    # Every item is told, also one that nobody read; the least of no rows is NULL.
    assert sorted(told) == [(sno, expected[sno], sno if expected[sno] else None) for sno in range(WORK.items)]
    progress = query.progress
    assert progress is not None
    assert dict(progress.operators[1].state_rows) == {"open": 0}
    assert dict(progress.operators[0].state_rows) == {"news": 0, "access": 0}


def test_row_that_breaks_a_promise_ends_the_flow_with_its_name(spark: SparkSession, tmp_path: Path) -> None:
    feeds = {name: Feed(tmp_path / name) for name in ("a", "b")}
    feeds["a"].add(pa.table({"k": [1, 1], "va": [1, 2]}))
    feeds["b"].add(pa.table({"k": [1], "vb": [1]}))
    streams = {name: stream(spark, feed, f"k long, v{name} long") for name, feed in feeds.items()}
    with pytest.raises(DovetailError, match=r"Input 'a' broke its promise with a row of k=1: it is a second row"):
        run(multi_join(streams, on="k", keys=["a"]), tmp_path)


def test_promises_that_cannot_be_are_refused_before_data_moves(spark: SparkSession, tmp_path: Path) -> None:
    feeds = {name: Feed(tmp_path / name) for name in ("a", "b", "c")}
    a, b, c = (stream(spark, feed, f"k long, j long, v{name} long") for name, feed in feeds.items())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"keys": ["z"]}, "keys= names 'z'"),
        ({"punctuations": {"z": "true"}}, "punctuations= names 'z'"),
        ({"punctuations": {"a": 5}}, "Give a condition, a streaming DataFrame, or a function"),
        ({"punctuations": {"a": b}}, "takes effect by event time"),
        ({"keys": ["a"], "on_broken_promise": "quarantine"}, "needs a place for the rows"),
        ({"keys": ["a"], "notices": "va"}, "name of an input's column"),
        ({"notices": "notice"}, "nothing is promised"),
        ({"quarantine_path": "/tmp/q"}, "nothing is promised"),
        ({"keys": ["a"], "quarantine_path": "/tmp/q"}, "do not go together"),
        ({"ordered": {"a": "sideways"}}, "ascending or descending"),
    ]
    for options, message in wrong:
        with pytest.raises(PlanError, match=message):
            multi_join({"a": a, "b": b.drop("j")}, on="k", **options)
    told = multi_join({"a": a, "b": b.drop("j")}, on="k", keys=["a"], notices="notice")
    groups: list[tuple[Flow, Any, str]] = [
        (told, {}, "names no aggregate"),
        (told, {"n": "average"}, 'Write "count", or a pair'),
        (told, {"n": ("sum", "nothing")}, "no column 'nothing' here"),
        (told, {"n": ("sum", "notice")}, "sum of 'notice', which is string"),
        (told, {"k": "count"}, "'k' is a join column"),
        (told.transform(lambda rows: rows.drop("notice")), {"n": "count"}, "no column 'notice' here"),
        (
            multi_join({"a": a, "b": b.drop("j")}, on="k", keys=["a"]),
            {"n": "count"},
            "tells which join values are closed",
        ),
    ]
    for flow, aggregates, message in groups:
        with pytest.raises(PlanError, match=message):
            flow.aggregate_closed(aggregates)
    with pytest.raises(PlanError, match="one join attribute that all inputs share"):
        multi_join({"a": a.drop("j"), "b": b, "c": c.drop("k")}, on=[("a.k", "b.k"), ("b.j", "c.j")], keys=["a"])
