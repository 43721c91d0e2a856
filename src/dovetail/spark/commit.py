"""The commit protocol of a flow: intent, job, commit, publish.

A flow runs in ``foreachBatch``, and the driver owns the commit. Micro-batch b, in four steps:

1. *Intent.* If commit b exists, go to step 4 with it. If intent b exists, use it as it is. Else create it: batch time,
   relation versions, how far each disk phase goes. It is durable before any task runs.
2. *Job.* One Spark job routes and sorts the rows, runs the steps from the exact state files of commit b-1, and stages
   the sink's output. Each task writes its new state to new files and ends its output with a trailer that names them.
3. *Commit.* One trailer of every shard of every step, or the micro-batch fails. ``commits/<b>.json`` is created
   exclusively: state files, receipt, reports.
4. *Publish.* The sink makes the staged output visible, idempotently. Then Spark commits b.

A crash anywhere replays b from its intent and commit b-1.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

import dovetail
from dovetail.errors import StateError
from dovetail.faultpoints import fault_point
from dovetail.spark.determinism import require_deterministic
from dovetail.spark.diverting import Diversion
from dovetail.spark.job_settings import job_settings, set_for_a_while
from dovetail.spark.routing import Router
from dovetail.spark.shard_job import ShardJob
from dovetail.spark.sinks.base import Receipt, Sink
from dovetail.spark.steps import BatchClock, Step, StepRecord
from dovetail.spark.ticks import with_ticks, without_ticks
from dovetail.spark.trailers import Trailers, with_trailer
from dovetail.state import FlowStore, ShardState

__all__ = ["CommitProtocol", "Stage", "Transform"]

Transform = Callable[[DataFrame], DataFrame]
Stage = Step | Transform | Diversion
Commit = dict[str, Any]

_CLEAN_EVERY = 8


class CommitProtocol:
    """Runs one flow's micro-batches.

    Parameters
    ----------
    stages
        Steps and transformations, in order.
    store, sink
        Where state and output go.
    drains_always
        Whether nothing may wait at the end of any micro-batch.
    keep_commits
        How many commits, and what they name, are kept.
    """

    def __init__(
        self, stages: Sequence[Stage], store: FlowStore, sink: Sink, *, drains_always: bool, keep_commits: int
    ) -> None:
        self._stages, self._store, self._sink = tuple(stages), store, sink
        self._drains_always, self._keep_commits = drains_always, keep_commits
        self._steps = [stage for stage in stages if isinstance(stage, Step)]
        self._side_sinks = side_sinks(stages)
        self._routers: dict[str, Router] = {}
        self._last_commit: Commit | None = None
        self._runs_since_cleanup = _CLEAN_EVERY
        self.drain_requested = False
        self.on_commit: Callable[[Commit, Commit | None, bool], None] | None = None

    def input_of(self, df: DataFrame) -> DataFrame:
        """The streaming DataFrame whose micro-batches `run` takes.

        What the first step does in the JVM is planned here, once, and not anew in every micro-batch.
        """
        rows = without_ticks(with_ticks(df))
        first = self._stages[0] if self._stages else None
        return first.route([rows]) if isinstance(first, Step) and first.takes is None else rows

    def run(self, df: DataFrame, batch: int) -> None:
        """Process one micro-batch; called by Spark, again after a crash."""
        fault_point("flow.batch.before")
        commit = self._store.commit(batch)
        previous = self._previous(batch)
        query_id = self._query_id()
        for document in (commit, previous):
            self._require_same_query(document, query_id)
        if previous is not None:
            # Spark has moved on, so the micro-batch before this one is never published again.
            for sink, receipt in self._receipts(previous):
                sink.forget(receipt)
        is_new = commit is None
        if commit is None:
            intent = self._store.intent(batch) or self._create_intent(batch, previous, query_id)
            commit = self._run_job(df, batch, intent, previous)
        fault_point("flow.publish.before")
        for sink, receipt in self._receipts(commit):
            sink.publish(receipt)
        for step in self._steps:
            step.publish(_record(commit, step), self._store.state_root, batch)
        fault_point("flow.publish.after")
        self._last_commit = commit
        if self.on_commit is not None:
            self.on_commit(commit, previous, is_new)
        self._runs_since_cleanup += 1
        if self._runs_since_cleanup >= _CLEAN_EVERY:
            self.clean()

    def clean(self) -> None:
        """Remove commits beyond those kept, and files of committed micro-batches that none of these names."""
        self._runs_since_cleanup = 0
        self._store.clean(self._keep_commits)

    # ================================================================ 1. intent

    def _previous(self, batch: int) -> Commit | None:
        if batch == 0:
            return None
        if self._last_commit is not None and self._last_commit["batch"] == batch - 1:
            return self._last_commit
        previous = self._store.commit(batch - 1)
        if previous is None:
            newest = self._store.last_batch()
            raise StateError(
                f"Spark's checkpoint goes on with micro-batch {batch}, but {self._store.root} has no commit of "
                f"{batch - 1}: {'it has none' if newest is None else f'the newest is {newest}'}.",
                hint="Restore the whole checkpoint directory from a copy, or start the flow with a new one.",
            )
        return previous

    def _create_intent(self, batch: int, previous: Commit | None, query_id: str) -> dict[str, Any]:
        previous_ms = None if previous is None else int(previous["time_ms"])
        clock = BatchClock(
            time_ms=max(int(time.time() * 1000), previous_ms or 0),
            previous_ms=previous_ms,
            is_draining=self._drains_always or self.drain_requested,
        )
        records = None if previous is None else {step.name: _record(previous, step) for step in self._steps}
        body = {
            "batch": batch,
            "query": query_id,
            "time_ms": clock.time_ms,
            "drain": clock.is_draining,
            "dovetail": dovetail.__version__,
            "operators": {step.name: step.decide(records, clock) for step in self._steps},
        }
        return self._store.create_intent(batch, body)

    def _query_id(self) -> str:
        """Spark's own name of the query that this checkpoint belongs to."""
        try:
            return str(json.loads((self._store.checkpoint / "metadata").read_text())["id"])
        except (OSError, ValueError, KeyError) as error:
            raise StateError(
                f"{self._store.checkpoint} has lost Spark's part of the checkpoint ({error}).",
                hint="Restore the whole checkpoint directory from a copy, or start the flow with a new one.",
            ) from None

    def _require_same_query(self, document: Mapping[str, Any] | None, query_id: str) -> None:
        if document is not None and document["query"] != query_id:
            raise StateError(
                f"{self._store.root} belongs to the query {document['query']}, Spark's part of the checkpoint to "
                f"{query_id}: they were not made together.",
                hint="Restore the whole checkpoint directory from a copy, or start the flow with a new one.",
            )

    # ================================================================ 2. job, 3. commit

    def _run_job(self, df: DataFrame, batch: int, intent: Mapping[str, Any], previous: Commit | None) -> Commit:
        rows = df
        given: dict[str, DataFrame] = {}
        collectors: dict[str, Trailers] = {}
        side: list[dict[str, Any]] = []
        for position, stage in enumerate(self._stages):
            if isinstance(stage, Step):
                is_last = position == len(self._stages) - 1
                collectors[stage.name] = Trailers(stage.name, stage.shards, is_last)
                if stage.takes is not None:
                    placed = stage.route([df, *(given[name] for name in stage.takes)])
                else:
                    placed = rows if position == 0 else stage.route([rows])
                rows = self._apply(stage, placed, batch, intent, previous, collectors[stage.name], is_last)
                given[stage.name] = rows
            elif isinstance(stage, Diversion):
                # Before the first operator: what leaves is a function of the micro-batch's rows alone.
                side.append({"sink": stage.sink.kind, "receipt": dict(stage.sink.stage(stage.leaving(rows), batch))})
                rows = stage.staying(rows)
            else:
                rows = stage(rows)
                require_deterministic(rows, "a transformation")
        fault_point("flow.job.before")
        settings: dict[str, str] = {}
        if len(self._steps) == len(self._stages):
            # Not otherwise: whoever transforms rows may join and aggregate, and have Spark plan that as it goes.
            schemas = [router.schema for router in self._routers.values()]
            settings = job_settings(df.sparkSession, schemas, self._sink.stages_in_jvm)
        with set_for_a_while(df.sparkSession, settings):
            receipt = self._sink.stage(rows, batch)
        fault_point("flow.job.after")
        found = {name: collector.collect() for name, collector in collectors.items()}
        side += self._side_outputs(df.sparkSession, batch, {name: record for name, (record, _) in found.items()})
        body = {
            "batch": batch,
            "query": intent["query"],
            "time_ms": intent["time_ms"],
            "drain": intent["drain"],
            "sink": self._sink.kind,
            "receipt": dict(receipt),
            "side": side,
            "rows": {name: rows_out for name, (_, rows_out) in found.items()},
            "operators": {name: _as_dicts(record) for name, (record, _) in found.items()},
        }
        return self._store.create_commit(batch, body)

    def _side_outputs(self, spark: SparkSession, batch: int, records: Mapping[str, StepRecord]) -> list[dict[str, Any]]:
        """Stage what steps give to sinks of their own; most often there is nothing, and no job."""
        staged = []
        for step in self._steps:
            if step.side_sink is not None:
                rows = step.side_rows(records[step.name], spark)
                receipt = None if rows is None else dict(step.side_sink.stage(rows, batch))
                staged.append({"sink": step.side_sink.kind, "receipt": receipt})
                fault_point("flow.side.staged")
        return staged

    def _apply(
        self,
        step: Step,
        placed: DataFrame,
        batch: int,
        intent: Mapping[str, Any],
        previous: Commit | None,
        trailers: Trailers,
        is_last: bool,
    ) -> DataFrame:
        if step.name not in self._routers:
            self._routers[step.name] = Router(
                placed.schema, step.shards, step.sort_by if step.needs_order(is_last) else None, step.sort_first
            )
        record = None if previous is None else _record(previous, step)
        job = ShardJob(
            state_root=str(self._store.state_root),
            operator=step.name,
            batch=batch,
            task=step.task(is_last),
            states=() if record is None else record.states,
            intent=intent["operators"][step.name],
            mapped_schema=to_arrow_schema(step.mapped_schema, timezone="UTC"),
            shards=step.shards,
            has_tags=step.has_tags,
        )
        mapped = self._routers[step.name].route(placed).mapInArrow(job, with_trailer(step.mapped_schema))
        return step.finish(trailers.watch(mapped))

    # ================================================================ 4. publish

    def _receipts(self, commit: Commit) -> list[tuple[Sink, Receipt]]:
        """What a commit has staged, with the sink that publishes it."""
        side = commit.get("side", [])
        if [part["sink"] for part in side] != [sink.kind for sink in self._side_sinks]:
            raise StateError(
                f"Micro-batch {commit['batch']} was staged with {len(side)} side sinks, this flow has "
                f"{len(self._side_sinks)}.",
                hint="Start the flow as it was, until one more micro-batch is through, or with a new checkpoint.",
            )
        pairs = zip(self._side_sinks, side, strict=True)
        beside = [(sink, part["receipt"]) for sink, part in pairs if part["receipt"] is not None]
        return [*beside, (self._publisher(commit), commit["receipt"])]

    def _publisher(self, commit: Commit) -> Sink:
        if commit["sink"] != self._sink.kind:
            raise StateError(
                f"Micro-batch {commit['batch']} was staged for a {commit['sink']} sink, which may still have to "
                f"publish it; this flow writes to {self._sink.kind}.",
                hint=f"Start the flow with the {commit['sink']} sink, or with a new checkpoint.",
            )
        return self._sink


def side_sinks(stages: Sequence[Stage]) -> list[Sink]:
    """The sinks besides the flow's own, in the order in which a commit names their receipts."""
    before = [stage.sink for stage in stages if isinstance(stage, Diversion)]
    return before + [stage.side_sink for stage in stages if isinstance(stage, Step) and stage.side_sink is not None]


def _record(commit: Commit, step: Step) -> StepRecord:
    shards = commit["operators"][step.name]
    return StepRecord(tuple(map(ShardState.from_dict, shards)), tuple(shard["report"] for shard in shards))


def _as_dicts(record: StepRecord) -> list[dict[str, Any]]:
    pairs = zip(record.states, record.reports, strict=True)
    return [{**state.as_dict(), "report": dict(report)} for state, report in pairs]
