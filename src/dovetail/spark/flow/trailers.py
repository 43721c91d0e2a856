"""Trailers: the last row of every task's output, which tells the driver what the task left behind.

The output of a step has one more column, a text that is NULL in every row but the last: there it names the shard's new
state files with their digests, and has the report. ``DataFrame.observe`` collects these texts in the job that stages
the output, so that state and output come from the same run of the same tasks.

It also collects those of tasks that ran more than once, which happens upstream of a shuffle. So nothing here is a sum
over all collected trailers: of each shard, or of each partition, one run counts.
"""

import time
import uuid
from typing import Any, Protocol

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.core.errors import DovetailError, InternalError, StateError
from dovetail.core.metrics import OperatorMetrics
from dovetail.runtime.shard_job import TRAILER_COLUMN, unpack_trailer
from dovetail.spark.flow.step import StepRecord
from dovetail.storage.state_files import ShardState

__all__ = ["Collector", "PartitionTrailers", "ShardTrailers", "with_trailer"]

_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.002
_VERSION = "relation_version"


class Collector(Protocol):
    """Collects the trailers of one step in one micro-batch."""

    def watch(self, mapped: DataFrame) -> DataFrame:
        """The output of tasks without trailers, which are collected as it is computed; their column stays."""

    def collect(self) -> tuple[StepRecord, int]:
        """The step's record and the number of rows it emitted, after the job; raises a task's `DovetailError`."""


class ShardTrailers:
    """Collects the trailers of a step on shards; ``is_last``: its output reaches the sink without another shuffle."""

    def __init__(self, operator: str, shards: int, is_last: bool) -> None:
        self._operator, self._shards, self._is_last = operator, shards, is_last
        self._texts = _ObservedTexts(operator)

    def watch(self, mapped: DataFrame) -> DataFrame:
        return self._texts.watch(mapped)

    def collect(self) -> tuple[StepRecord, int]:
        """An `InternalError` if a shard has no trailer, or has two."""
        found, _ = self._texts.collect()
        by_shard = {trailer["shard"]: trailer for trailer in found}
        # A task upstream of a shuffle may run twice; being pure, both runs emit the same rows.
        has_surplus = len(found) != len(by_shard) and self._is_last
        if has_surplus or sorted(by_shard) != list(range(self._shards)):
            shards = sorted(trailer["shard"] for trailer in found)
            raise InternalError(
                f"{self._operator}: {self._shards} shards must give one trailer each, but trailers came from {shards}. "
                "The micro-batch was not committed."
            )
        ordered = [by_shard[shard] for shard in range(self._shards)]
        record = StepRecord(
            tuple(ShardState.from_dict(trailer["state"]) for trailer in ordered),
            tuple(trailer["report"] for trailer in ordered),
        )
        return record, sum(trailer["rows"] for trailer in ordered)


class PartitionTrailers:
    """Collects the trailers of a step in place.

    Only Spark knows the number of partitions. A missing one is noticed by the rows: each row that Spark has counted
    must be in some trailer. Of a partition that was computed several times, the last run counts, with all its trailers:
    after a ``coalesce``, one task computes several partitions under one number.
    """

    def __init__(self, operator: str, before: StepRecord | None, version: int) -> None:
        self._operator, self._before, self._version = operator, before, version
        self._texts = _ObservedTexts(operator)

    def watch(self, mapped: DataFrame) -> DataFrame:
        return self._texts.watch(mapped)

    def collect(self) -> tuple[StepRecord, int]:
        """An `InternalError` if a task was not computed to its end."""
        found, computed = self._texts.collect()
        reported = sum(trailer["rows"] for trailer in found) + len(found)
        if reported != computed:
            raise InternalError(
                f"{self._operator}: {computed} rows were computed, but trailers came for {reported}: some task was not "
                "computed to its end. The micro-batch was not committed."
            )
        counting = last_runs(found)
        totals = OperatorMetrics()
        for report in () if self._before is None else self._before.reports:
            totals.merge(OperatorMetrics.from_dict(report["metrics"]))
        for trailer in counting:
            counters = {name: number for name, number in trailer["counters"].items() if name != _VERSION}
            totals.merge(OperatorMetrics.from_dict(counters))
        report = {
            "pending": 0,
            "oldest_ms": None,
            "memory": {},
            "metrics": totals.as_dict(),
            "version": self._version,
        }
        # An empty state, should the step continue on shards.
        values = {"carried": totals.as_dict(), "values": {"metrics": {}}, "version": self._version}
        record = StepRecord((ShardState(uuid.uuid4().hex, (), values),), (report,))
        return record, sum(trailer["rows"] for trailer in counting)


def last_runs(trailers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The trailers that count: of each partition, all of its last run.

    >>> first, again = {"partition": 0, "attempt": 7}, {"partition": 0, "attempt": 9}
    >>> last_runs([first, {"partition": 1, "attempt": 8}, again, again])
    [{'partition': 1, 'attempt': 8}, {'partition': 0, 'attempt': 9}, {'partition': 0, 'attempt': 9}]
    """
    last: dict[int, int] = {}
    for trailer in trailers:
        last[trailer["partition"]] = max(trailer["attempt"], last.get(trailer["partition"], -1))
    return [trailer for trailer in trailers if trailer["attempt"] == last[trailer["partition"]]]


class _ObservedTexts:
    """The texts of a step's trailers, collected by Spark."""

    def __init__(self, operator: str) -> None:
        self._operator = operator
        self._observation = Observation(f"dovetail {operator} {uuid.uuid4().hex}")

    def watch(self, mapped: DataFrame) -> DataFrame:
        # SQL: nested functions would take several JVM calls each, in every micro-batch.
        texts, rows = F.expr(f"collect_list({TRAILER_COLUMN}) AS trailers"), F.expr("count(1) AS rows")
        return mapped.observe(self._observation, texts, rows).where(f"{TRAILER_COLUMN} IS NULL")

    def collect(self) -> tuple[list[dict[str, Any]], int]:
        """All trailers, including those of repeated tasks; and the number of rows, including trailers."""
        future = self._observation._jo.future()
        give_up_at = time.monotonic() + _WAIT_SECONDS
        # Observation.get would wait for ever if the job never ran.
        while not future.isCompleted():
            if time.monotonic() > give_up_at:
                raise StateError(
                    f"{self._operator}: its output was staged, but its trailers did not arrive within "
                    f"{_WAIT_SECONDS:.0f} s. The micro-batch was not committed.",
                    hint="Start the flow again with the same checkpoint; a sink's stage must compute all rows.",
                )
            time.sleep(_POLL_SECONDS)
        # One text at a time, for the reason given in `pack_trailer`; Observation.get returns all at once. By index,
        # because a JVM iterator ends with an exception, which is slow.
        row = self._observation._jo.getRow()
        texts = row.getList(0)
        found = [unpack_trailer(str(texts.get(place))) for place in range(texts.size())]
        failures = [trailer["error"] for trailer in found if "error" in trailer]
        if failures:
            raise DovetailError.from_dict(failures[0])
        return found, int(row.getLong(1))


def with_trailer(mapped_schema: T.StructType) -> T.StructType:
    """The schema of what tasks emit: every column is nullable, as it is NULL in the trailer."""
    fields = [T.StructField(field.name, field.dataType, True) for field in mapped_schema]
    return T.StructType([*fields, T.StructField(TRAILER_COLUMN, T.StringType(), True)])
