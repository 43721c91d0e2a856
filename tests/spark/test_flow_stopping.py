"""Flows that are started from Python, as other processes see them: their lock, their journal, and requests to stop."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import dovetail as dt
from dovetail.storage.running import who_runs
from dovetail.storage.stop_request import ask_to_stop
from dovetail.testing.flows import Feed, commits_of, published_rows, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMMAND = [sys.executable, "-m", "dovetail.cli.main"]


def journal_of(checkpoint: Path) -> list[dict[str, Any]]:
    (file,) = (checkpoint / "dovetail" / "journal").iterdir()
    return [json.loads(line) for line in file.read_text().splitlines()[1:]]


@pytest.fixture
def flow(spark: "SparkSession", tmp_path: Path) -> dt.Flow:
    feed = Feed(tmp_path / "in")
    for number in range(2):
        feed.add(pa.table({"id": [1, 2, 9], "v": [number] * 3}))
    customers = dt.Relation.build(
        pa.table({"id": [1, 2], "name": ["a", "b"]}), tmp_path / "customers", on="id", shards=2
    )
    source = spark.readStream.schema("id bigint, v bigint").option("maxFilesPerTrigger", 1).parquet(str(feed.directory))
    return dt.stream(source, "stopping").enrich(customers, on="id", how="left", max_delay="1 hour")


def test_flow_from_python_is_seen_and_drained_by_the_command(
    flow: dt.Flow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dovetail.flow")
    checkpoint = tmp_path / "checkpoint"
    query = flow.write(dt.sinks.parquet(tmp_path / "out"), checkpoint=checkpoint, trigger="200 milliseconds")
    wait_until(lambda: query.progress is not None and query.progress.batch >= 1, "both files", 600)
    assert who_runs(checkpoint) is not None
    assert "micro-batch" in repr(query)
    assert "<td>1-enrich</td>" in query._repr_html_()
    assert repr(flow) == "Flow('stopping': source -> 1-enrich; columns id, v, name)"
    status = subprocess.run([*COMMAND, "status", checkpoint, "--json"], capture_output=True, check=True)
    assert json.loads(status.stdout)["running"]["pid"] == who_runs(checkpoint)["pid"]  # type: ignore[index]
    stopped = subprocess.run([*COMMAND, "stop", checkpoint, "--drain", "--json"], capture_output=True, check=True)
    document = json.loads(stopped.stdout)
    assert (document["state"], document["waiting"]) == ("stopped", 0)
    wait_until(lambda: not query.isActive, "the end")
    assert query.exception() is None
    assert query.was_asked_to_stop
    assert who_runs(checkpoint) is None
    assert len(published_rows(tmp_path / "out")) == 6
    # The journal against the commits, which are of another format and written by other code.
    journal, commits = journal_of(checkpoint), commits_of(checkpoint)
    kinds = [record["kind"] for record in journal if record["kind"] != "batch"]
    assert kinds == ["started", "stop requested", "stopped"]
    batches = [record for record in journal if record["kind"] == "batch"]
    assert [record["batch"] for record in batches] == list(range(batches[-1]["batch"] + 1))
    assert batches[-1]["batch"] == commits[-1]["batch"]
    assert sum(record["operators"][0]["in"] for record in batches) == 6
    assert sum(record["rows"] for record in batches) == 6
    lines = [record.getMessage() for record in caplog.records if record.name == "dovetail.flow"]
    assert sum(" batch=" in line for line in lines) == len(batches)
    (started,) = [record for record in journal if record["kind"] == "started"]
    assert [node["kind"] for node in started["picture"]["nodes"]] == ["source", "step", "relation", "sink"]
    assert started["budgets"] == {"1-enrich": 256_000_000}


def test_stop_now_leaves_waiting_rows_and_a_failure_is_recorded(flow: dt.Flow, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    sink = dt.sinks.foreach_batch(lambda _rows, _batch: 1 // 0)
    query = flow.write(sink, checkpoint=checkpoint, trigger="200 milliseconds")
    with pytest.raises(ZeroDivisionError):
        query.awaitTermination(600)
    failed = journal_of(checkpoint)[-1]
    assert (failed["kind"], failed["error"]["class"]) == ("failed", "ZeroDivisionError")
    again = flow.write(dt.sinks.foreach_batch(lambda _rows, _batch: None), checkpoint=checkpoint, trigger="1 hour")
    wait_until(lambda: again.progress is not None, "a micro-batch", 600)
    ask_to_stop(checkpoint, False, 60)
    wait_until(lambda: not again.isActive, "the end", 600)
    assert again.exception() is None
    assert again.progress is not None
    assert again.progress.pending > 0
    assert journal_of(checkpoint)[-1]["kind"] == "stopped"
