"""Records of micro-batches, against differences that are computed by hand."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from dovetail.core.errors import StateError
from dovetail.core.metrics import OperatorMetrics
from dovetail.spark.flow.recording import FlowRecorder, error_document


def commit(batch: int, *taken: int, rows: int | None = 5) -> dict[str, Any]:
    """A commit whose shards have taken so many tuples since the flow began."""
    shards = [
        {
            "files": [],
            "report": {
                "pending": 1,
                "oldest_ms": 900,
                "memory": {"window": 10},
                "metrics": OperatorMetrics(stream_tuples_in=number, shed={"oldest": number // 2}).as_dict(),
                "version": 3,
            },
        }
        for number in taken
    ]
    side = [{"sink": "parquet", "receipt": None}, {"sink": "parquet", "receipt": {"rows": 2}}]
    body = {"batch": batch, "time_ms": 1000 * (batch + 1), "drain": False, "receipt": {"rows": rows}, "side": side}
    return {**body, "operators": {"1-enrich": shards}}


def records(root: Path) -> list[dict[str, Any]]:
    (file,) = (root / "journal").iterdir()
    return [json.loads(line) for line in file.read_text().splitlines()[1:]]


def test_counts_are_of_one_micro_batch_also_after_a_restart(tmp_path: Path) -> None:
    commits = [commit(0, 10, 20), commit(1, 14, 26), commit(2, 14, 26), commit(3, 20, 40)]
    recorder = FlowRecorder(tmp_path, "orders")
    recorder.batch(commits[0], None, 7, None)
    recorder.batch(commits[1], commits[0], 8, 44)
    recorder.batch(commits[2], commits[1], 9, None)
    FlowRecorder(tmp_path, "orders").batch(commits[3], commits[2], 10, None)
    found = records(tmp_path)
    assert [record["operators"][0]["in"] for record in found] == [30, 10, 0, 20]
    assert [record["operators"][0]["shed"] for record in found] == [15, 5, 0, 10]
    assert [(record["elapsed_ms"], record["took_ms"]) for record in found] == [
        (None, 7),
        (1000, 8),
        (1000, 9),
        (1000, 10),
    ]
    assert [record["behind"] for record in found] == [None, 44, None, None]
    assert found[0]["side"] == [0, 2]
    assert found[0]["operators"][0]["memory"] == 20
    assert found[0]["operators"][0]["pending"] == 2


def test_log_has_a_line_per_micro_batch_at_info_and_nothing_below(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = FlowRecorder(tmp_path, "orders")
    caplog.set_level(logging.WARNING, "dovetail.flow")
    recorder.batch(commit(0, 10), None, 7, None)
    assert caplog.records == []
    caplog.set_level(logging.INFO, "dovetail.flow")
    recorder.batch(commit(1, 12), commit(0, 10), 7, None)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("flow=orders batch=1 took_ms=7 rows=5 side_rows=2 waiting=1 1-enrich.in=2 ")


def test_errors_are_recorded_with_class_message_and_hint_and_never_at_length() -> None:
    assert error_document(StateError("No.", hint="Try.")) == {"class": "StateError", "message": "No.", "hint": "Try."}
    traceback = "Traceback (most recent call last):\n  File x\nValueError: bad\n"
    assert error_document(RuntimeError(traceback))["message"] == "ValueError: bad"
    assert len(error_document(RuntimeError("x" * 99_999))["message"]) == 2_000


def test_commit_that_cannot_be_described_does_not_fail_the_flow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = FlowRecorder(tmp_path, "orders")
    recorder.batch(commit(1, 3), commit(0, 10), 7, None)  # counters that have shrunk
    recorder.batch({"batch": 2}, None, 7, None)
    recorder.batch(commit(3, 12), commit(2, 10), 7, None)
    assert [record["batch"] for record in records(tmp_path)] == [3]
    assert len(caplog.records) == 2
