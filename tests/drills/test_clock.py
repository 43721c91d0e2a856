"""The clock of the driver's host jumps a year ahead and back again, as it does while a host learns the time."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import dovetail as dt
from dovetail.spark.flow import protocol
from dovetail.testing.flows import Feed, commits_of, published_rows, wait_until

YEAR_S = 365 * 24 * 3600


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The clock on the wall, as the protocol sees it; ``ahead_s`` may be changed at any time."""
    clock = SimpleNamespace(ahead_s=0)
    monkeypatch.setattr(protocol, "time", SimpleNamespace(time=lambda: time.time() + clock.ahead_s))
    return clock


def test_rows_that_wait_survive_a_clock_that_jumps_a_year_ahead_and_back(
    spark: SparkSession, tmp_path: Path, clock: Any
) -> None:
    dt.Relation.build(pa.table({"k": [0], "city": ["here"]}), tmp_path / "cities", on="k", shards=2)
    Feed(tmp_path / "feed").add(pa.table({"k": [1, 2]}))

    def started() -> Any:
        source = spark.readStream.schema("k long").parquet(str(tmp_path / "feed"))
        flow = dt.stream(source, "clock").wait_for(tmp_path / "cities", on="k", deadline="1 hour", how="inner")
        return flow.write(
            dt.sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint", trigger="50 milliseconds",
            keep_commits=1_000,
        )  # fmt: skip

    def pass_batches(query: Any, number: int = 2) -> None:
        until = commits_of(tmp_path / "checkpoint")[-1]["batch"] + number
        wait_until(lambda: query.progress is not None and query.progress.batch >= until, "micro-batches")

    query = started()
    wait_until(lambda: query.progress is not None and query.progress.pending == 2, "the rows to arrive")
    clock.ahead_s = YEAR_S
    pass_batches(query)
    assert query.progress.pending == 2, "a jump is no time that has passed"
    clock.ahead_s = 0
    pass_batches(query)
    clock.ahead_s = YEAR_S
    pass_batches(query)
    query.stop()
    # A process that starts after the jump back: time goes on from where it was, and does not stand still for a year.
    clock.ahead_s = 0
    query = started()
    pass_batches(query, 4)
    dt.Relation.open(tmp_path / "cities").upsert(pa.table({"k": [1, 2], "city": ["one", "two"]}))
    wait_until(lambda: query.progress.pending == 0, "the rows to find what they waited for")
    query.stop()
    assert sorted(row["city"] for row in published_rows(tmp_path / "out")) == ["one", "two"]
    times = [commit["time_ms"] for commit in commits_of(tmp_path / "checkpoint")]
    assert times == sorted(times)
    assert times[-1] - times[0] < 3_600_000
    assert len(set(times[-3:])) == 3, f"time stands still: {times}"
