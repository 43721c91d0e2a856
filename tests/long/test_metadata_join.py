"""Streams joined with promises: exact across restarts, little state, groups closed once, and what is refused."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from dovetail.errors import DovetailError, PlanError
from dovetail.operators.metadata import Punctuation
from dovetail.spark import sinks
from dovetail.spark.flow import Flow
from dovetail.spark.flow_query import FlowQuery
from dovetail.spark.multi_join import multi_join
from dovetail.testing.flows import Feed, published_rows
from dovetail.testing.multiway_oracle import multiway_oracle
from dovetail.testing.rows import assert_same_rows
from dovetail.workloads.news import NewsWorkload

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
        ({"keys": ["a"], "on_broken_promise": "quarantine"}, "needs a column that says why"),
        ({"keys": ["a"], "notices": "va"}, "name of an input's column"),
        ({"notices": "notice"}, "nothing is promised"),
        ({"ordered": {"a": "sideways"}}, "ascending or descending"),
    ]
    for options, message in wrong:
        with pytest.raises(PlanError, match=message):
            multi_join({"a": a, "b": b.drop("j")}, on="k", **options)
    with pytest.raises(PlanError, match="one join attribute that all inputs share"):
        multi_join({"a": a.drop("j"), "b": b, "c": c.drop("k")}, on=[("a.k", "b.k"), ("b.j", "c.j")], keys=["a"])
