"""Streams joined on several attributes: a tree of joins, its steps committed as one, against Spark's own batch join."""

import random
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dovetail.core.errors import PlanError, StateError
from dovetail.joins.multiway.planner import MultiwayStatistics
from dovetail.spark import sinks
from dovetail.spark.flow.query import FlowQuery
from dovetail.spark.steps.multi_join import multi_join
from dovetail.spark.steps.stream import Flow
from dovetail.testing.flows import Feed, commits_of, unnamed_state_files
from dovetail.testing.rows import assert_same_rows

SEED = 33_301
START = datetime(2026, 1, 1, tzinfo=UTC)
# a and b share x, b and c share y (c calls it z), c and d share w; "x" of d is another attribute's name used twice.
COLUMNS = {
    "a": "x long, ta timestamp, va string",
    "b": "x int, y string, tb timestamp, vb long",
    "c": "z string, w long, tc timestamp, vc string",
    "d": "x long, td timestamp, vd string",
}
EQUALITIES = {"abc": [("a.x", "b.x"), ("b.y", "c.z")], "abcd": [("a.x", "b.x"), ("b.y", "c.z"), ("c.w", "d.x")]}


class Inputs:
    """Feeds of several inputs, the streams that read them, and what Spark makes of all of it at once."""

    def __init__(self, spark: SparkSession, root: Path, names: str) -> None:
        print("seed", SEED)
        self.spark, self.names = spark, names
        self.feeds = {name: Feed(root / name) for name in names}
        self.chance = random.Random(SEED)

    def add(self, first_second: int, rows: int = 60) -> None:
        for name, feed in self.feeds.items():
            feed.add(pa.Table.from_pylist([self._row(name, first_second, n) for n in range(rows)], self._schema(name)))

    def _schema(self, name: str) -> pa.Schema:
        kinds = {"long": pa.int64(), "int": pa.int32(), "string": pa.string(), "timestamp": pa.timestamp("us", "UTC")}
        return pa.schema([(c, kinds[k]) for c, k in (column.split() for column in COLUMNS[name].split(", "))])

    def _row(self, name: str, first_second: int, number: int) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for field in self._schema(name):
            if pa.types.is_timestamp(field.type):
                row[field.name] = START + timedelta(seconds=first_second, milliseconds=self.chance.randrange(8_000))
            elif field.name.startswith("v"):
                row[field.name] = first_second * 1000 + number if name == "b" else f"{name}{first_second}-{number}"
            else:
                key = self.chance.randrange(25)
                key_or_null = None if self.chance.random() < 0.05 else key
                is_text = pa.types.is_string(field.type)
                row[field.name] = f"k{key_or_null}" if is_text and key_or_null is not None else key_or_null
        return row

    def streams(self) -> dict[str, DataFrame]:
        return {
            name: self.spark.readStream.schema(COLUMNS[name])
            .option("maxFilesPerTrigger", 1)
            .parquet(str(feed.directory))
            for name, feed in self.feeds.items()
        }

    @property
    def times(self) -> dict[str, str]:
        return {name: f"t{name}" for name in self.names}

    def expected(self, seconds: float | None = None) -> list[dict[str, Any]]:
        """Spark's own join of everything that has arrived."""
        tables = {name: self.spark.read.parquet(str(feed.directory)) for name, feed in self.feeds.items()}
        joined = tables["a"].join(tables["b"].withColumn("x", F.col("x").cast("long")), "x")
        joined = joined.join(tables["c"].withColumnRenamed("z", "y"), "y")
        if "d" in tables:
            joined = joined.join(tables["d"].withColumnRenamed("x", "w"), "w")
        if seconds is not None:
            times = [F.col(column).cast("double") for column in self.times.values()]
            joined = joined.where(F.greatest(*times) - F.least(*times) <= seconds)
        # The join columns of all attributes, then each input's others.
        keys = ["x", "y", "w"] if "d" in tables else ["x", "y"]
        others = [c for name in self.names for c in self._schema(name).names if c[0] in "tv" or (c == "w" not in keys)]
        return joined.select(*keys, *others).toArrow().to_pylist()


def run(flow: Flow, root: Path) -> FlowQuery:
    query = flow.write(sinks.parquet(root / "out"), checkpoint=root / "checkpoint", trigger="available-now")
    assert query.awaitTermination(600), "the flow did not end"
    return query


def joined(spark: SparkSession, root: Path) -> list[dict[str, Any]]:
    return spark.read.parquet(str(root / "out")).toArrow().to_pylist()


def test_three_streams_on_two_attributes_across_restarts_and_spilling(spark: SparkSession, tmp_path: Path) -> None:
    inputs = Inputs(spark, tmp_path, "abc")
    for second in (0, 4):
        inputs.add(second)
        flow = multi_join(
            inputs.streams(),
            on=EQUALITIES["abc"],
            window="3 seconds",
            time=inputs.times,
            lateness="1 hour",
            budget="120kB",
            shards=2,
        )
        query = run(flow, tmp_path)
        assert_same_rows(joined(spark, tmp_path), inputs.expected(seconds=3), f"after second {second}")
    assert query.progress is not None
    first, last = query.progress.operators
    assert (first.name, last.name) == ("1-multi_join", "2-multi_join")
    assert first.totals.output_rows > 0
    assert last.details["flushed_rows"] > 0
    # One commit names the state of both joins, and nothing else is left.
    assert set(commits_of(tmp_path / "checkpoint")[-1]["operators"]) == {"1-multi_join", "2-multi_join"}
    assert unnamed_state_files(tmp_path / "checkpoint") == set()


def test_forced_tree_of_four_streams_with_state_purged_and_results_that_wait(
    spark: SparkSession, tmp_path: Path
) -> None:
    inputs = Inputs(spark, tmp_path, "abcd")
    for second in (0, 10, 20, 30):
        inputs.add(second, rows=40)
    flow = multi_join(
        inputs.streams(),
        on=EQUALITIES["abcd"],
        window="4 seconds",
        time=inputs.times,
        lateness="8 seconds",
        max_delay="1 hour",
        plan=[["a", "b"], ["c", "d"]],
        budget="300kB",
        shards=2,
    )
    query = flow.write(sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint")
    offered = sum(len(feed.rows()) for feed in inputs.feeds.values())

    def taken() -> int:
        if query.progress is None:
            return 0
        counters = [operator.details for operator in query.progress.operators]
        return sum(
            count for c in counters for name, count in c.items() if name.startswith("tuples_in.") and "~" not in name
        )

    while query.isActive and taken() < offered:
        query.awaitTermination(0.2)
    query.stop(drain=True)
    assert query.exception() is None
    assert_same_rows(joined(spark, tmp_path), inputs.expected(seconds=4), "four streams")
    assert query.progress is not None
    assert [operator.name for operator in query.progress.operators] == [f"{n}-multi_join" for n in (1, 2, 3)]
    assert sum(operator.details["late_tuples"] for operator in query.progress.operators) == 0
    assert sum(operator.details["purged_rows"] for operator in query.progress.operators) > 0


def test_plan_is_chosen_by_the_statistics_and_belongs_to_the_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    inputs = Inputs(spark, tmp_path, "abc")
    inputs.add(0, rows=20)

    def flow(**options: Any) -> Flow:
        return multi_join(inputs.streams(), on=EQUALITIES["abc"], **options)

    fast_a = MultiwayStatistics({"a": 1000.0, "b": 10.0, "c": 10.0})
    fast_c = MultiwayStatistics({"a": 10.0, "b": 10.0, "c": 1000.0})
    assert [step.spec.names for step in flow(statistics=fast_a).steps] == [("b", "c"), ("a", "~join 0")]
    assert [step.spec.names for step in flow(statistics=fast_c).steps] == [("a", "b"), ("~join 0", "c")]
    query = run(flow(statistics=fast_a), tmp_path)
    assert_same_rows(joined(spark, tmp_path), inputs.expected(), "without a window")
    assert query.progress is not None
    with pytest.raises(StateError, match="1-multi_join"):
        run(flow(statistics=fast_c), tmp_path)


def test_plans_that_cannot_run_are_refused(spark: SparkSession, tmp_path: Path) -> None:
    inputs = Inputs(spark, tmp_path, "abcd")
    streams = inputs.streams()
    for wrong, told in [
        ({"plan": "single"}, "no join attribute in common"),
        ({"plan": [["a", "c"], ["b", "d"]]}, "no join attribute in common"),
        ({"plan": ["a", "b", "c"]}, "does not name each of"),
        ({"plan": "quickest"}, "none of auto, single, binary"),
        ({"how": "left"}, "join columns that all inputs share"),
        (
            {"inputs": {**streams, "d": streams["d"].withColumn("td", F.col("td").cast("timestamp_ntz"))}},
            "event time of 'a' is timestamp, that of 'd' timestamp_ntz",
        ),
    ]:
        options: dict[str, Any] = {"inputs": streams, "on": EQUALITIES["abcd"], **wrong}
        if "inputs" in wrong:
            options |= {"window": "1 second", "time": inputs.times}
        with pytest.raises(PlanError, match=told):
            multi_join(options.pop("inputs"), **options)
