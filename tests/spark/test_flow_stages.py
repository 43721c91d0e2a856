"""Stages of a flow one after the other: who is called how often, and what happens to columns in between."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from dovetail import Relation
from dovetail.spark import sinks
from dovetail.spark.flow.noop import NoopSink
from dovetail.spark.flow.sink import Receipt
from dovetail.spark.steps.stream import Flow, stream
from dovetail.testing.flows import Feed, published_rows

KINDS = [{"k": key, "kind": f"t{key % 5}"} for key in range(40)]
NAMES = [{"kind": f"t{number}", "name": f"n{number}"} for number in range(5)]


class PlanReader(NoopSink):
    """Keeps the plans of each micro-batch."""

    def __init__(self) -> None:
        self.executed: list[str] = []
        self.analysed: list[str] = []

    def stage(self, df: DataFrame, batch: int) -> Receipt:
        receipt = super().stage(df, batch)
        execution = df._jdf.queryExecution()
        self.executed.append(execution.executedPlan().toString())
        self.analysed.append(execution.analyzed().toString())
        return receipt


@pytest.fixture
def feed(tmp_path: Path) -> Feed:
    found = Feed(tmp_path / "feed")
    for number in range(2):
        found.add(pa.table({"n": list(range(50 * number, 50 * number + 50)), "k": [n % 45 for n in range(50)]}))
    return found


@pytest.fixture
def flow(spark: SparkSession, feed: Feed) -> Flow:
    reader = spark.readStream.schema("n long, k long").option("maxFilesPerTrigger", 1)
    return stream(reader.parquet(str(feed.directory)), "stages")


@pytest.fixture
def relations(tmp_path: Path) -> dict[str, Relation]:
    return {
        "kinds": Relation.build(pa.Table.from_pylist(KINDS), tmp_path / "kinds", on="k", shards=2),
        "names": Relation.build(pa.Table.from_pylist(NAMES), tmp_path / "names", on="kind", shards=2),
    }


def finished(flow: Flow, root: Path, sink: Any) -> None:
    query = flow.write(sink, checkpoint=root / "checkpoint", trigger="available-now")
    assert query.awaitTermination(120), "the flow did not end"


@pytest.mark.parametrize("later", [0, 1, 2, 3])
def test_function_of_transform_runs_once_when_described_and_once_per_micro_batch(
    flow: Flow, feed: Feed, relations: dict[str, Relation], tmp_path: Path, later: int
) -> None:
    calls: list[bool] = []

    def double(rows: DataFrame) -> DataFrame:
        calls.append(rows.isStreaming)
        return rows.withColumn("double", F.col("n") * 2)

    flow = flow.transform(double)
    stages = [
        lambda f: f.enrich(relations["kinds"], on="k", how="left"),
        lambda f: f.transform(lambda rows: rows.where("n >= 0")),
        lambda f: f.surrogate_key("number", tmp_path / "keys", on="n"),
    ]
    for stage in stages[:later]:
        flow = stage(flow)
    assert len(calls) == 1
    finished(flow, tmp_path, sinks.parquet(tmp_path / "out"))
    assert len(calls) == 1 + len(feed.files())
    rows = published_rows(tmp_path / "out")
    assert sorted((row["n"], row["double"]) for row in rows) == [(n, 2 * n) for n in range(100)]


DECODING = "make_ym_interval"
ENCODING = "extractansiintervalyears"


def with_interval(rows: DataFrame) -> DataFrame:
    """Intervals travel as numbers, so that each decoding and encoding is an expression in the plan."""
    return rows.withColumn("span", F.make_ym_interval(F.lit(1), F.col("n").cast("int") % 12))


def with_months(rows: DataFrame) -> DataFrame:
    """What no sink can hold, as a number."""
    return rows.withColumn("span", F.expr("extract(YEAR FROM span) * 12 + extract(MONTH FROM span)"))


@pytest.mark.parametrize("way", ["in place", "shards", "kept", "mixed"])
def test_columns_are_encoded_once_before_the_first_step_and_decoded_once_behind_the_last(
    flow: Flow, relations: dict[str, Relation], tmp_path: Path, way: str
) -> None:
    def described(time: str) -> Flow:
        found = flow.transform(with_interval)
        if way == "kept":
            return found.surrogate_key("a", tmp_path / f"a {time}", on="n").deduplicate(tmp_path / f"b {time}", on="n")
        options = {"strategy": "balanced"} if way == "shards" else {}
        found = found.enrich(relations["kinds"], on="k", **options)
        if way == "mixed":
            found = found.surrogate_key("a", tmp_path / f"a {time}", on="n")
        return found.enrich(relations["names"], on="kind", **options)

    reader = PlanReader()
    finished(described("first"), tmp_path / "plans", reader)
    # Once by the transformation, once at the end.
    assert reader.executed[1].count(DECODING) == 2, reader.executed[1]
    assert reader.executed[1].count(ENCODING) == 1, reader.executed[1]
    steps = 3 if way == "mixed" else 2
    assert reader.executed[1].count("MapInArrow") == steps
    finished(described("again").transform(with_months), tmp_path / "rows", memory := sinks.memory())
    found = sorted((row["n"], row["span"]) for row in memory.rows())
    assert found == [(n, 12 + n % 12) for n in range(100) if way == "kept" or n % 50 < 40 or n % 50 >= 45]


def test_transformation_between_steps_sees_the_users_columns(
    flow: Flow, relations: dict[str, Relation], tmp_path: Path
) -> None:
    seen: list[str] = []

    def look(rows: DataFrame) -> DataFrame:
        seen.append(rows.schema.simpleString())
        return rows

    found = flow.transform(with_interval).enrich(relations["kinds"], on="k").transform(look)
    reader = PlanReader()
    finished(found.enrich(relations["names"], on="kind"), tmp_path, reader)
    assert set(seen) == {"struct<k:bigint,n:bigint,span:interval year to month,kind:string>"}
    assert reader.executed[1].count(DECODING) == 3
