"""What a running flow tells about itself: a line in its journal and one in the log per micro-batch, start and end.

The log is Python's, under the name ``dovetail.flow``: at INFO, one line per micro-batch, with counts and times only. No
value of a row is in either.
"""

import logging
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dovetail.core.errors import DovetailError
from dovetail.core.metrics import OperatorMetrics
from dovetail.core.version import __version__
from dovetail.spark.flow.progress import FlowProgress, OperatorProgress, progress_of
from dovetail.storage.journal import Journal

__all__ = ["FlowRecorder", "batch_record"]

_LOG = logging.getLogger("dovetail.flow")
_MOST_TEXT = 2_000

Totals = Mapping[str, OperatorMetrics]
"""Counters since the flow began, by operator."""


class FlowRecorder:
    """Records one run of a flow."""

    def __init__(self, root: Path, flow: str) -> None:
        self._journal, self._flow = Journal(root), flow
        self._known: tuple[int, Totals] | None = None  # the last micro-batch, and its totals

    def started(self, about: Mapping[str, Any]) -> None:
        """The flow has started; ``about`` is JSON-serializable: its picture, budgets, trigger."""
        self._event(
            "started", pid=os.getpid(), host=socket.gethostname(), dovetail=__version__, flow=self._flow, **about
        )
        _LOG.info("flow=%s started", self._flow)

    def planned(self, text: str) -> None:
        """The plan that `explain` gave for this run."""
        self._event("plan", text=text)

    def batch(
        self, commit: Mapping[str, Any], previous: Mapping[str, Any] | None, took_ms: int, behind: int | None
    ) -> None:
        """A micro-batch was published."""
        try:
            record, totals = _record(commit, previous, took_ms, behind, self._totals_before(previous))
        except Exception as error:  # noqa: BLE001 -- the rows are published: a flow must not fail by its description
            _LOG.warning("flow=%s batch=%s cannot be described: %r", self._flow, commit.get("batch"), error)
            return
        self._known = (commit["batch"], totals)
        self._journal.append(record)
        if _LOG.isEnabledFor(logging.INFO):
            _LOG.info("%s", log_line(self._flow, record))

    def _totals_before(self, previous: Mapping[str, Any] | None) -> Totals:
        if previous is None:
            return {}
        if self._known is not None and self._known[0] == previous["batch"]:
            return self._known[1]
        return _totals(_progress(previous))

    def asked_to_stop(self, drain: bool) -> None:
        self._event("stop requested", drain=drain)
        _LOG.info("flow=%s asked to %s", self._flow, "drain and stop" if drain else "stop")

    def drain_failed(self, error: DovetailError) -> None:
        """It was asked to drain, did not in time, and runs on."""
        self._event("drain failed", error=error_document(error))
        _LOG.warning("flow=%s %s", self._flow, error.message)

    def ended(self, error: BaseException | None) -> None:
        """The run has ended, by itself, by `stop`, or with an error."""
        if error is None:
            self._event("stopped")
            _LOG.info("flow=%s stopped", self._flow)
        else:
            described = error_document(error)
            self._event("failed", error=described)
            _LOG.error("flow=%s failed: %s: %s", self._flow, described["class"], described["message"])

    def _event(self, kind: str, **about: Any) -> None:
        self._journal.append({"kind": kind, "at_ms": int(time.time() * 1000), **about})


def error_document(error: BaseException) -> dict[str, Any]:
    """An error's class, message and hint; of Spark's errors, whose text can be pages long, the part that says why."""
    if isinstance(error, DovetailError):
        return {"class": type(error).__name__, "message": error.message[:_MOST_TEXT], "hint": error.hint}
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    place = -1 if any(line.startswith("Traceback") for line in lines) else 0
    return {"class": type(error).__name__, "message": lines[place][:_MOST_TEXT], "hint": None}


def batch_record(
    commit: Mapping[str, Any], previous: Mapping[str, Any] | None, took_ms: int, behind: int | None
) -> dict[str, Any]:
    """One micro-batch as the journal has it; counts are of this micro-batch only."""
    return _record(commit, previous, took_ms, behind, {} if previous is None else _totals(_progress(previous)))[0]


def _record(
    commit: Mapping[str, Any], previous: Mapping[str, Any] | None, took_ms: int, behind: int | None, before: Totals
) -> tuple[dict[str, Any], Totals]:
    """The record, and the totals that the next one needs: adding up many shards takes milliseconds."""
    now = _progress(commit)
    record = {
        "kind": "batch",
        "batch": commit["batch"],
        "time_ms": commit["time_ms"],
        "wall_ms": commit.get("wall_ms", commit["time_ms"]),
        "elapsed_ms": None if previous is None else commit["time_ms"] - previous["time_ms"],
        "took_ms": took_ms,
        "drain": commit["drain"],
        "rows": commit["receipt"].get("rows"),
        "side": [0 if part["receipt"] is None else part["receipt"].get("rows") for part in commit.get("side", [])],
        "behind": behind,
        "operators": [_operator(one, before.get(one.name)) for one in now.operators],
    }
    return record, _totals(now)


def _operator(one: OperatorProgress, before: OperatorMetrics | None) -> dict[str, Any]:
    change = one.totals if before is None else one.totals - before
    return {
        "name": one.name,
        "in": change.stream_tuples_in,
        "out": change.output_rows,
        "hits": change.cache_hits,
        "absent": change.negative_hits,
        "unmatched": change.unmatched_tuples,
        "shed": change.shed_tuples,
        "pending": one.pending,
        "oldest_ms": one.oldest_wait_ms,
        "memory": sum(one.memory_bytes.values()),
        "state": one.state_bytes,
        "version": one.relation_version,
    }


def _progress(commit: Mapping[str, Any]) -> FlowProgress:
    return progress_of(commit, None, commit["time_ms"])


def _totals(progress: FlowProgress) -> Totals:
    return {operator.name: operator.totals for operator in progress.operators}


def log_line(flow: str, record: Mapping[str, Any]) -> str:
    """A micro-batch as one line of ``key=value``.

    >>> log_line("orders", {"batch": 3, "took_ms": 250, "rows": 9, "side": [1], "operators": [
    ...     {"name": "1-enrich", "in": 10, "out": 9, "pending": 0, "hits": 4, "absent": 0, "memory": 1000}]})
    'flow=orders batch=3 took_ms=250 rows=9 side_rows=1 waiting=0 1-enrich.in=10 1-enrich.out=9 1-enrich.hits=4'
    """
    operators = record["operators"]
    parts = [
        f"flow={flow}",
        f"batch={record['batch']}",
        f"took_ms={record['took_ms']}",
        f"rows={record['rows']}",
        f"side_rows={sum(rows or 0 for rows in record['side'])}",
        f"waiting={sum(operator['pending'] for operator in operators)}",
    ]
    for operator in operators:
        parts += [f"{operator['name']}.{name}={operator[name]}" for name in ("in", "out", "hits")]
    return " ".join(parts)
