"""The job of a micro-batch: its rows through all stages of a flow, as one Spark plan.

Between two steps rows travel as tasks emit them: encoded, with internal names. They become the user's columns where the
user sees them: in a transformation, and in the sink. A step in place adds a Python call to the current Spark stage;
every other step adds a shuffle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from dovetail.runtime.in_place import InPlaceJob
from dovetail.runtime.shard_job import ShardJob
from dovetail.spark.flow.routing import Router
from dovetail.spark.flow.sink import Receipt
from dovetail.spark.flow.stages import Diversion, Stage
from dovetail.spark.flow.step import Step, StepRecord
from dovetail.spark.flow.trailers import Collector, PartitionTrailers, ShardTrailers, with_trailer
from dovetail.spark.plan.determinism import require_deterministic
from dovetail.spark.plan.micro_batch import current_run

__all__ = ["JobPlanner", "MicroBatch", "PlannedJob"]


@dataclass(frozen=True)
class MicroBatch:
    """The inputs of a micro-batch's job: each step's part of the intent, and the last commit's records of the steps, if
    any.
    """

    number: int
    intents: Mapping[str, Mapping[str, Any]]
    records: Mapping[str, StepRecord] | None

    def record(self, step: Step) -> StepRecord | None:
        return None if self.records is None else self.records.get(step.name)


@dataclass(frozen=True)
class PlannedJob:
    """A job that has not run yet."""

    rows: DataFrame  # for the sink
    collectors: Mapping[str, Collector]  # per step; they have its results once the job has run
    diverted: tuple[Receipt, ...]  # of the side sinks of diversions, in order


@dataclass(frozen=True)
class _StepOutput:
    """The output of a step's tasks."""

    step: Step
    rows: DataFrame

    @cached_property
    def decoded(self) -> DataFrame:
        """The user's columns."""
        return self.step.finish(self.rows)


class JobPlanner:
    """Plans the jobs of one flow's micro-batches."""

    def __init__(self, stages: Sequence[Stage], state_root: Path) -> None:
        self._stages, self._state_root = tuple(stages), state_root
        self._routers: dict[tuple[str, bool], Router] = {}
        self._schemas: dict[str, T.StructType] = {}

    @property
    def schemas(self) -> list[T.StructType]:
        """The columns of the rows that go to Python, for each step planned so far."""
        return list(self._schemas.values())

    def input_of(self, df: DataFrame) -> DataFrame:
        """The streaming DataFrame whose micro-batches `plan` takes.

        The JVM's part of the first step is planned here, once, not in every micro-batch.
        """
        first = self._stages[0] if self._stages else None
        if not isinstance(first, Step) or first.takes is not None:
            return df
        return first.prepare(df) if first.may_work_in_place else first.route([df])

    def plan(self, df: DataFrame, batch: MicroBatch) -> PlannedJob:
        """The job of a micro-batch; diverted rows are staged at once."""
        before: DataFrame | _StepOutput = df
        given: dict[str, _StepOutput] = {}
        collectors: dict[str, Collector] = {}
        diverted: list[Receipt] = []
        for position, stage in enumerate(self._stages):
            if isinstance(stage, Step):
                if stage.is_in_place(batch.intents[stage.name]):
                    prepared = df if position == 0 else _prepared(stage, before)
                    mapped, collector = self._in_place(stage, prepared, batch)
                else:
                    if stage.takes is not None:
                        placed = stage.route([df, *(given[name].decoded for name in stage.takes)])
                    elif position == 0:
                        placed = stage.place(df) if stage.may_work_in_place else df
                    else:
                        placed = _routed(stage, before)
                    mapped, collector = self._on_shards(stage, placed, batch, self._is_last(position, batch))
                collectors[stage.name] = collector
                before = given[stage.name] = _StepOutput(stage, collector.watch(mapped))
                continue
            rows = _decoded(before)
            if isinstance(stage, Diversion):
                # Before the first operator, so it depends only on the micro-batch's rows.
                diverted.append(stage.sink.stage(stage.leaving(rows), batch.number))
                before = stage.staying(rows)
            else:
                before = stage.function(rows)
                require_deterministic(before, "a transformation")
        return PlannedJob(_decoded(before), collectors, tuple(diverted))

    def _is_last(self, position: int, batch: MicroBatch) -> bool:
        """Whether no shuffle follows: a transformation may have one."""
        later = self._stages[position + 1 :]
        return all(isinstance(stage, Step) and stage.is_in_place(batch.intents[stage.name]) for stage in later)

    def _in_place(self, step: Step, prepared: DataFrame, batch: MicroBatch) -> tuple[DataFrame, Collector]:
        if step.name not in self._schemas:
            self._schemas[step.name] = prepared.schema
        intent = batch.intents[step.name]
        mapped_schema = to_arrow_schema(step.mapped_schema, timezone="UTC")
        job = InPlaceJob(step.task_in_place(intent), mapped_schema, current_run)
        mapped = prepared.mapInArrow(job, with_trailer(step.mapped_schema))
        return mapped, PartitionTrailers(step.name, batch.record(step), intent["version"])

    def _on_shards(
        self, step: Step, placed: DataFrame, batch: MicroBatch, is_last: bool
    ) -> tuple[DataFrame, Collector]:
        needs_order = step.needs_order(is_last)
        if (step.name, needs_order) not in self._routers:
            self._schemas[step.name] = placed.schema
            self._routers[step.name, needs_order] = Router(
                placed.schema, step.shards, step.sort_by if needs_order else None, step.sort_first
            )
        record = batch.record(step)
        job = ShardJob(
            state_root=str(self._state_root),
            operator=step.name,
            batch=batch.number,
            task=step.task(is_last),
            states=() if record is None else step.states(record),
            intent=batch.intents[step.name],
            mapped_schema=to_arrow_schema(step.mapped_schema, timezone="UTC"),
            shards=step.shards,
            has_tags=step.has_tags,
        )
        routed = self._routers[step.name, needs_order].route(placed)
        mapped = routed.mapInArrow(job, with_trailer(step.mapped_schema))
        return mapped, ShardTrailers(step.name, step.shards, is_last)


def _decoded(before: DataFrame | _StepOutput) -> DataFrame:
    return before.decoded if isinstance(before, _StepOutput) else before


def _prepared(step: Step, before: DataFrame | _StepOutput) -> DataFrame:
    if isinstance(before, _StepOutput) and before.step.carried is not None and step.takes_carried:
        return step.prepare_carried(before.rows, before.step.carried)
    return step.prepare(_decoded(before))


def _routed(step: Step, before: DataFrame | _StepOutput) -> DataFrame:
    if isinstance(before, _StepOutput) and before.step.carried is not None and step.takes_carried:
        return step.route_carried(before.rows, before.step.carried)
    return step.route([_decoded(before)])
