"""Runs a flow's micro-batches on Spark: the jobs behind the order that `dovetail.spark.flow.protocol` defines.

A flow runs in ``foreachBatch``, and the driver owns the commit. One Spark job routes and sorts the rows, runs the steps
from the exact state files of the last commit, and stages the sink's output. Each task writes its new state to new files
and ends its output with a trailer that names them. A step in place has neither shards nor state; its tasks also end
with a trailer, for their counters. The micro-batch fails unless there is one trailer per shard of every step and per
task in place, and the row counts agree.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from dovetail.core.faultpoints import fault_point
from dovetail.spark.flow.counting import require_counts, require_state_files
from dovetail.spark.flow.job import JobPlanner, MicroBatch
from dovetail.spark.flow.job_settings import job_settings, set_for_a_while
from dovetail.spark.flow.protocol import BatchProtocol, Commit, RunBatch
from dovetail.spark.flow.sink import Sink
from dovetail.spark.flow.stages import Diversion, Stage
from dovetail.spark.flow.step import BatchClock, Step, StepRecord
from dovetail.spark.flow.store import FlowStore
from dovetail.spark.flow.ticks import with_ticks, without_ticks
from dovetail.storage.state_files import ShardState

__all__ = ["CommitProtocol"]

_CLEAN_EVERY = 8


class CommitProtocol:
    """Runs one flow's micro-batches."""

    def __init__(
        self, stages: Sequence[Stage], store: FlowStore, sink: Sink, *, drains_always: bool, keep_commits: int
    ) -> None:
        self._stages, self._store, self._sink = tuple(stages), store, sink
        self._drains_always, self._keep_commits = drains_always, keep_commits
        self._steps = [stage for stage in stages if isinstance(stage, Step)]
        self._protocol = BatchProtocol(store, sink, side_sinks(stages))
        self._planner = JobPlanner(stages, store.state_root)
        self._runs_since_cleanup = _CLEAN_EVERY
        self.drain_requested = False
        self.on_commit: Callable[[Commit, Commit | None, bool], None] | None = None

    @property
    def checkpoint(self) -> Path:
        return self._store.checkpoint

    def start(self) -> None:
        """Check the checkpoint and claim the sinks, before the query starts."""
        self._protocol.start()

    def input_of(self, df: DataFrame) -> DataFrame:
        """The streaming DataFrame whose micro-batches `run` takes."""
        return self._planner.input_of(without_ticks(with_ticks(df)))

    def run(self, df: DataFrame, batch: int) -> None:
        """Process one micro-batch; called by Spark, again after a crash."""
        is_draining = self._drains_always or self.drain_requested

        def decide(previous: Commit | None, time_ms: int, previous_ms: int | None) -> dict[str, Any]:
            clock, records = BatchClock(time_ms, previous_ms, is_draining), self._records(previous)
            return {step.name: step.decide(_known(records, step), clock) for step in self._steps}

        def job(intent: Mapping[str, Any], previous: Commit | None) -> dict[str, Any]:
            return self._run_job(df, batch, intent, previous)

        commit, previous, is_new = self._protocol.run(batch, RunBatch(decide, job, is_draining))
        for step in self._steps:
            record = _record(commit, step)
            for files in step.side_files:
                files.publish(record, self._store.state_root, batch)
            step.published(record, batch)
        fault_point("flow.steps.published")
        if self.on_commit is not None:
            self.on_commit(commit, previous, is_new)
        self._runs_since_cleanup += 1
        if self._runs_since_cleanup >= _CLEAN_EVERY:
            self.clean()

    def settle(self) -> None:
        """Make everything committed visible, and remove files that no commit names."""
        commit = self._store.newest_commit()
        if commit is not None:
            self._store.require_newest(commit["batch"])
            for step in self._steps:
                if step.name in commit["operators"]:
                    step.settle(_record(commit, step), commit["batch"])
        self.clean()

    def clean(self) -> None:
        """Remove old commits, and files of committed micro-batches that no kept commit names."""
        self._runs_since_cleanup = 0
        self._store.clean(self._keep_commits)

    def _records(self, commit: Commit | None) -> dict[str, StepRecord] | None:
        """A commit's record of each step; a step that was added since has none."""
        if commit is None:
            return None
        return {step.name: _record(commit, step) for step in self._steps if step.name in commit["operators"]}

    def _run_job(self, df: DataFrame, batch: int, intent: Mapping[str, Any], previous: Commit | None) -> dict[str, Any]:
        records = self._records(previous)
        job = self._planner.plan(df, MicroBatch(batch, intent["operators"], records))
        sinks = [stage.sink for stage in self._stages if isinstance(stage, Diversion)]
        side = [
            {"sink": sink.kind, "receipt": dict(receipt)} for sink, receipt in zip(sinks, job.diverted, strict=True)
        ]
        fault_point("flow.job.before")
        settings: dict[str, str] = {}
        if len(self._steps) == len(self._stages):
            # Not otherwise: a transformation may join and aggregate, and rely on Spark's adaptive planning.
            settings = job_settings(df.sparkSession, self._planner.schemas, self._sink.stages_in_jvm)
        with set_for_a_while(df.sparkSession, settings):
            receipt = self._sink.stage(job.rows, batch)
        fault_point("flow.job.after")
        found = {name: collector.collect() for name, collector in job.collectors.items()}
        after = {name: record for name, (record, _) in found.items()}
        emitted = {name: rows_out for name, (_, rows_out) in found.items()}
        require_state_files(self._store.state_root, batch, after)
        require_counts(self._stages, records, after, emitted, receipt.get("rows"))
        side += self._side_outputs(df.sparkSession, batch, after)
        return {
            "sink": self._sink.kind,
            "receipt": dict(receipt),
            "side": side,
            "rows": emitted,
            "operators": {name: _as_dicts(record) for name, record in after.items()},
        }

    def _side_outputs(self, spark: SparkSession, batch: int, records: Mapping[str, StepRecord]) -> list[dict[str, Any]]:
        """Stage the rows of steps' side sinks; usually there are none, and no job runs."""
        staged = []
        for step in self._steps:
            if step.side_sink is not None:
                rows = step.side_rows(records[step.name], spark)
                receipt = None if rows is None else dict(step.side_sink.stage(rows, batch))
                staged.append({"sink": step.side_sink.kind, "receipt": receipt})
                fault_point("flow.side.staged")
        return staged


def side_sinks(stages: Sequence[Stage]) -> list[Sink]:
    """The side sinks, in the order in which a commit names their receipts."""
    before = [stage.sink for stage in stages if isinstance(stage, Diversion)]
    return before + [stage.side_sink for stage in stages if isinstance(stage, Step) and stage.side_sink is not None]


def _known(records: Mapping[str, StepRecord] | None, step: Step) -> Mapping[str, StepRecord] | None:
    return records if records is not None and step.name in records else None


def _record(commit: Commit, step: Step) -> StepRecord:
    shards = commit["operators"][step.name]
    return StepRecord(tuple(map(ShardState.from_dict, shards)), tuple(shard["report"] for shard in shards))


def _as_dicts(record: StepRecord) -> list[dict[str, Any]]:
    pairs = zip(record.states, record.reports, strict=True)
    return [{**state.as_dict(), "report": dict(report)} for state, report in pairs]
