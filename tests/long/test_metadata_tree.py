"""Promises in a tree of joins on Spark: exact across restarts, groups closed once, rows put aside once."""

import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from dovetail.joins.promises import Punctuation
from dovetail.spark import sinks
from dovetail.spark.flow.query import FlowQuery
from dovetail.spark.steps.multi_join import multi_join
from dovetail.spark.steps.stream import Flow
from dovetail.testing.flows import Feed, published_rows
from dovetail.testing.multiway_oracle import multiway_oracle
from dovetail.testing.rows import assert_same_rows

SEED = 61_409
START = datetime(2026, 1, 1, tzinfo=UTC)
PER_BATCH = 12


class Inputs:
    """Streams whose join values come in one micro-batch and the next, and are over after it."""

    def __init__(self, spark: SparkSession, root: Path, names: str, timed: bool = False) -> None:
        print("seed", SEED)
        self.spark, self.names, self.timed = spark, names, timed
        self.chance = random.Random(SEED)
        self.feeds = {name: Feed(root / name) for name in (*names, "ends")}

    def columns(self, name: str) -> str:
        if name == "ends":
            return f"k long, t{self.names[-1]} timestamp"
        time = f", t{name} timestamp" if self.timed else ""
        return f"k long{time}, v{name} string, over boolean".replace("over", f"over_{name}")

    def streams(self) -> dict[str, Any]:
        return {
            name: self.spark.readStream.schema(self.columns(name))
            .option("maxFilesPerTrigger", 1)
            .parquet(str(feed.directory))
            for name, feed in self.feeds.items()
        }

    def moments(self, batch: int, count: int) -> pa.Array:
        found = [START + timedelta(seconds=60 * batch + self.chance.randrange(50)) for _ in range(count)]
        return pa.array(found, pa.timestamp("us", "UTC"))

    def add(self, name: str, batch: int, keys: list[int], over: list[int]) -> None:
        """Rows of keys, and one that only ends its value for each of those that are over."""
        rows = len(keys) + len(over)
        columns = {"k": keys + over}
        if self.timed:
            columns[f"t{name}"] = self.moments(batch, rows)
        columns[f"v{name}"] = [f"{name}{batch}-{n}" for n in range(len(keys))] + [None] * len(over)  # type: ignore[list-item]
        columns[f"over_{name}"] = [False] * len(keys) + [True] * len(over)
        self.feeds[name].add(pa.table(columns).take(self.chance.sample(range(rows), rows)))

    def data(self, name: str) -> list[dict[str, Any]]:
        return [row for row in self.feeds[name].rows() if not row[f"over_{name}"]]

    def expected(self, names: str) -> list[dict[str, Any]]:
        first, *others = names
        rows = {name: self.data(name) for name in names}
        return multiway_oracle(rows, [((first, "k"), (name, "k")) for name in others])


def run(flow: Flow, root: Path) -> FlowQuery:
    query = flow.write(sinks.parquet(root / "out"), checkpoint=root / "checkpoint", trigger="available-now")
    assert query.awaitTermination(600), "the flow did not end"
    return query


@pytest.mark.parametrize("plan", ["binary", [["a", "b"], "c"]], ids=["binary", "nested"])
def test_marked_rows_of_every_input_close_values_in_every_join_across_restarts(
    spark: SparkSession, tmp_path: Path, plan: Any
) -> None:
    inputs = Inputs(spark, tmp_path, "abc")
    told: list[int] = []
    for batch in range(3):
        first = batch * PER_BATCH
        for name in "abc":
            fresh = [first + inputs.chance.randrange(PER_BATCH) for _ in range(PER_BATCH)]
            old = [first - 1 - inputs.chance.randrange(PER_BATCH) for _ in range(PER_BATCH // 2)] if batch else []
            over = list(range(first - PER_BATCH, first)) if batch else []
            inputs.add(name, batch, fresh + old, over)
        streams = inputs.streams()
        del streams["ends"]
        flow = multi_join(
            streams,
            on="k",
            plan=plan,
            punctuations={name: Punctuation.where(f"over_{name}", data=False) for name in "abc"},
            notices="notice",
            shards=2,
            budget="4MB",
        )
        query = run(flow, tmp_path)
        rows = published_rows(tmp_path / "out")
        assert set(rows[0]) == {"k", "notice", *(f"v{n}" for n in "abc"), *(f"over_{n}" for n in "abc")}
        joined = [row for row in rows if row["notice"] is None]
        expected = [{**row, "notice": None} for row in inputs.expected("abc")]
        assert_same_rows(joined, expected, f"batch {batch}")
        told = sorted(row["k"] for row in rows if row["notice"] == "closed")
        # Each value is told once, with the micro-batch that gave its last result.
        assert told == list(range(first))
    assert query.progress is not None
    lower, upper = query.progress.operators
    # What is left are values of the last micro-batch only: those before it are over in both joins.
    kept = {row["k"] for row in inputs.data("a") if row["k"] >= first}
    assert kept
    assert upper.details["closed_rows"] + upper.details["dropped_on_arrival"] > 0
    assert upper.details["punctuations_in"] >= 2 * first
    open_rows = Counter(row["k"] for name in "abc" for row in inputs.data(name) if row["k"] >= first)
    of_inputs = {n: c for o in (lower, upper) for n, c in o.state_rows.items() if not n.startswith("~")}
    assert sum(of_inputs.values()) <= sum(open_rows.values())


def test_every_source_of_promises_in_one_tree_with_rows_put_aside_and_groups(
    spark: SparkSession, tmp_path: Path
) -> None:
    """a is unique; b ends values by a condition; c by a function; d by a stream of its own, by event time."""
    inputs = Inputs(spark, tmp_path, "abcd", timed=True)

    over = -1

    def given(clock: Any) -> list[Punctuation]:
        return [Punctuation.between("k", None, over)]

    def flow() -> Flow:
        streams = inputs.streams()
        ends = streams.pop("ends")
        return multi_join(
            streams,
            on="k",
            plan=[["a", "b"], ["c", "d"]],
            window="1 hour",
            time={name: f"t{name}" for name in "abcd"},
            lateness="10 seconds",
            keys=["a"],
            punctuations={"b": Punctuation.where("over_b", data=False), "c": given, "d": ends},
            on_broken_promise="quarantine",
            quarantine_path=tmp_path / "aside",
            notices="notice",
            shards=2,
        ).aggregate_closed({"rows": "count"})

    aside: list[tuple[str, int]] = []
    for batch in range(3):
        first = batch * PER_BATCH
        keys = list(range(first, first + PER_BATCH))
        over = keys[-1]
        # In a, a value comes twice; in b and c come values that were over after the micro-batch before.
        old = [first - 1] if batch else []
        inputs.add("a", batch, [*keys, first], [])
        inputs.add("b", batch, keys * 2 + old, keys)
        inputs.add("c", batch, keys + old, [])
        inputs.add("d", batch, keys, [])
        inputs.feeds["ends"].add(pa.table({"k": keys, "td": inputs.moments(batch, len(keys))}))
        aside += [("a", first), *((name, key) for name in "bc" for key in old)]
        run(flow(), tmp_path)
    groups = {row["k"]: row["rows"] for row in published_rows(tmp_path / "out")}
    assert len(groups) == len(published_rows(tmp_path / "out"))
    # Two rows of b with one of each other input. The watermark has passed the ends of the first micro-batch in d, and
    # none of those of the last one.
    assert set(groups.values()) == {2}
    assert set(range(PER_BATCH)) <= set(groups) <= set(range(2 * PER_BATCH))
    found = sorted((name, row["k"]) for name in "abcd" for row in published_rows(tmp_path / "aside" / name))
    assert found == sorted(aside)
    reasons = {row["__reason"][:24] for name in "abc" for row in published_rows(tmp_path / "aside" / name)}
    assert reasons == {"it is a second row of a ", "it matches an earlier pu"}
    assert list(published_rows(tmp_path / "aside" / "a")[0]) == ["k", "ta", "va", "over_a", "__reason"]


def test_seven_streams_of_one_key_use_their_promises(spark: SparkSession, tmp_path: Path) -> None:
    names = "abcdefg"
    inputs = Inputs(spark, tmp_path, names)
    for batch in range(2):
        keys = list(range(batch * PER_BATCH, (batch + 1) * PER_BATCH))
        for name in names:
            inputs.add(name, batch, inputs.chance.sample(keys, PER_BATCH - 1), keys if name == "a" else [])
    streams = inputs.streams()
    del streams["ends"]
    flow = multi_join(
        streams, on="k", keys=list(names[1:]), punctuations={"a": Punctuation.where("over_a", data=False)}, shards=2
    )
    query = run(flow, tmp_path)
    rows = published_rows(tmp_path / "out")
    assert_same_rows(rows, inputs.expected(names), "seven")
    assert query.progress is not None
    (operator,) = query.progress.operators
    assert operator.details["closed_rows"] + operator.details["dropped_on_arrival"] > 0
