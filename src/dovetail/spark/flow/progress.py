"""The progress that a running flow reports."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dovetail.core.metrics import OperatorMetrics
from dovetail.storage.state_files import StateFile

__all__ = ["FlowProgress", "OperatorProgress", "progress_of"]


@dataclass(frozen=True)
class OperatorProgress:
    """One operator of a flow in its last micro-batch, all shards together.

    Attributes
    ----------
    name
        The operator.
    tuples_per_second, rows_per_second
        Stream tuples in and rows out, per second since the previous micro-batch.
    hit_ratio, negative_ratio
        The fraction of this micro-batch's tuples that the cache answered with rows, and with "no match".
    pending
        Waiting tuples.
    oldest_wait_ms
        How long the oldest of them has waited, in batch time; None if none waits.
    memory_bytes
        Bytes held, by component.
    relation_version
        The version that arriving tuples are joined with; None without a relation.
    state_rows
        Tuples held, by input, of an operator that joins several.
    state_bytes, written_bytes
        Bytes of its durable state, and how many of them this micro-batch wrote.
    totals
        All counters since the flow began.
    details
        Counters of this kind of operator only, since the flow began; those of inputs as ``counter.input``.
    """

    name: str
    tuples_per_second: float
    rows_per_second: float
    hit_ratio: float
    negative_ratio: float
    pending: int
    oldest_wait_ms: int | None
    memory_bytes: Mapping[str, int]
    relation_version: int | None
    state_rows: Mapping[str, int]
    state_bytes: int
    written_bytes: int
    totals: OperatorMetrics
    details: Mapping[str, int]


@dataclass(frozen=True)
class FlowProgress:
    """A flow after its last micro-batch.

    Attributes
    ----------
    batch, time_ms
        The last published micro-batch, and when it began.
    staleness_ms
        How long ago that was: a reader of the sink sees the stream as of then.
    pending, oldest_wait_ms
        Waiting tuples of all operators, and how long the oldest has waited.
    operators
        Each stateful operator, in order.
    """

    batch: int
    time_ms: int
    staleness_ms: int
    pending: int
    oldest_wait_ms: int | None
    operators: tuple[OperatorProgress, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-serializable."""
        operators = [{**vars(operator), "totals": operator.totals.as_dict()} for operator in self.operators]
        return {**vars(self), "operators": operators}


def progress_of(commit: Mapping[str, Any], previous: Mapping[str, Any] | None, now_ms: int) -> FlowProgress:
    """The progress between two successive commits."""
    elapsed_s = 0.0 if previous is None else (commit["time_ms"] - previous["time_ms"]) / 1000
    operators = tuple(
        _operator(name, commit, None if previous is None else previous["operators"].get(name), elapsed_s)
        for name in commit["operators"]
    )
    waits = [operator.oldest_wait_ms for operator in operators if operator.oldest_wait_ms is not None]
    return FlowProgress(
        batch=commit["batch"],
        time_ms=commit["time_ms"],
        staleness_ms=max(0, now_ms - commit["time_ms"]),
        pending=sum(operator.pending for operator in operators),
        oldest_wait_ms=max(waits, default=None),
        operators=operators,
    )


def _operator(
    name: str, commit: Mapping[str, Any], before: list[dict[str, Any]] | None, elapsed_s: float
) -> OperatorProgress:
    shards = commit["operators"][name]
    files = [StateFile.from_dict(file) for shard in shards for file in shard["files"]]
    reports = [shard["report"] for shard in shards]
    totals = _totals(shards)
    change = totals if before is None else totals - _totals(before)
    taken = max(1, change.stream_tuples_in)
    oldest = min((report["oldest_ms"] for report in reports if report["oldest_ms"] is not None), default=None)
    return OperatorProgress(
        name=name,
        tuples_per_second=change.stream_tuples_in / elapsed_s if elapsed_s else 0.0,
        rows_per_second=change.output_rows / elapsed_s if elapsed_s else 0.0,
        hit_ratio=change.cache_hits / taken,
        negative_ratio=change.negative_hits / taken,
        pending=sum(report["pending"] for report in reports),
        oldest_wait_ms=None if oldest is None else commit["time_ms"] - oldest,
        memory_bytes=_sums(report["memory"] for report in reports),
        relation_version=max((report["version"] for report in reports if report["version"] is not None), default=None),
        state_rows=_sums(report.get("state_rows", {}) for report in reports),
        state_bytes=sum(file.bytes for file in files),
        written_bytes=sum(file.bytes for file in files if file.batch == commit["batch"]),
        totals=totals,
        details=_sums(report.get("counters", {}) for report in reports),
    )


def _totals(shards: list[dict[str, Any]]) -> OperatorMetrics:
    return OperatorMetrics.total(OperatorMetrics.from_dict(shard["report"]["metrics"]) for shard in shards)


def _sums(parts: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The sums over all shards by name; nested counters of an input as ``counter.input``."""
    sums: dict[str, int] = {}
    for part in parts:
        for name, value in part.items():
            inner = (
                {f"{name}.{key}": number for key, number in value.items()}
                if isinstance(value, Mapping)
                else {name: value}
            )
            for key, number in inner.items():
                sums[key] = sums.get(key, 0) + number
    return sums
