"""A multi-way join as a step of the commit protocol."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.memory import Budget
from dovetail.operators.mjoin import MJoin, MJoinSpec, TimeWindow
from dovetail.relation.format import CODE_COLUMN, SHARD_COLUMN
from dovetail.spark.codes import shard_column
from dovetail.spark.multi_join_task import MultiJoinTask
from dovetail.spark.payload import decode, encoded_schema
from dovetail.spark.routing import is_sortable
from dovetail.spark.steps import BatchClock, Step, StepRecord
from dovetail.spark.tagged_inputs import INPUT_COLUMN, SlotLayout

__all__ = ["MultiJoinStep"]


class MultiJoinStep(Step):
    """A join of several streams that share one join attribute.

    Parameters
    ----------
    name
        The step's name.
    spec
        The join, with the budget of all shards together.
    schemas
        The inputs' columns as Spark has them.
    layout
        How the inputs travel as one.
    shards
        How many slices the state has.
    parallelism
        How many tasks run at once.
    """

    def __init__(
        self,
        name: str,
        spec: MJoinSpec,
        schemas: Mapping[str, T.StructType],
        layout: SlotLayout,
        shards: int,
        parallelism: int,
    ) -> None:
        self.name, self.spec, self.shards = name, spec, shards
        self.layout, self._parallelism = layout, parallelism
        shard_budget = Budget(spec.budget.total_bytes // shards)
        self._shard_spec = replace(spec, budget=shard_budget)
        # Refused here, before any data moves, if the budget is too small.
        result = MJoin(self._shard_spec).output_schema
        self.output = T.StructType([_spark_field(spec, schemas, f.name, f.nullable) for f in result])
        self._carried = T.StructType(
            [T.StructField(f"c{n}", f.dataType, f.nullable, f.metadata) for n, f in enumerate(self.output)]
        )
        self.mapped_schema = encoded_schema(self._carried)
        slots = zip(layout.names, layout.types, strict=True)
        self.sort_by = [INPUT_COLUMN, CODE_COLUMN, *(name for name, kind in slots if is_sortable(kind))]
        self._owner = uuid.uuid4().hex

    def fingerprint(self) -> dict[str, Any]:
        """What its state depends on."""
        about = self.spec.fingerprint()
        return {
            "name": self.name,
            "kind": "multi_join",
            "shards": self.shards,
            "hash": "pmod(xxhash64(code, 42), shards)",
            "input": [f"{name}: {columns}" for name, columns in about["schemas"].items()],
            "output": [f"{field.name} {field.dataType.simpleString()}" for field in self.output],
            "on": [f"{a['name']}: {a['columns']}" for a in about["graph"]["attributes"]],
            "how": self.spec.how,
            "window": about["window"],
            "partitions": self.spec.partitions,
        }

    def route(self, inputs: Sequence[DataFrame]) -> DataFrame:
        """The tagged rows of all inputs, each with its shard."""
        (rows,) = inputs
        shard = shard_column(F.col(CODE_COLUMN), self.shards).alias(SHARD_COLUMN)
        return rows.select(shard, INPUT_COLUMN, CODE_COLUMN, *self.layout.names)

    def decide(self, previous: StepRecord | None, clock: BatchClock) -> dict[str, Any]:
        """The time, the watermark that all shards judge by, and whether anything may wait."""
        return {
            "time_ms": clock.time_ms,
            "drain": clock.is_draining or self.spec.max_delay is None,
            "watermark": None if previous is None else self._watermark(previous),
        }

    def _watermark(self, previous: StepRecord) -> int | None:
        """How far event time had come after the last micro-batch: the slowest input counts, and it never goes back."""
        window = self.spec.window
        if not isinstance(window, TimeWindow):
            return None
        before = previous.reports[0]["watermark"]
        latest = [
            max((report["latest"][name] for report in previous.reports if name in report["latest"]), default=None)
            for name in self.spec.names
        ]
        reached = None if None in latest else min(time for time in latest if time is not None) - window.lateness
        known = [watermark for watermark in (before, reached) if watermark is not None]
        return max(known, default=None)

    def task(self, is_last: bool) -> MultiJoinTask:
        """The join of one shard."""
        budget_bytes = self._shard_spec.budget.total_bytes
        # Together, the workers keep no more alive than the budget.
        alive_bytes = max(budget_bytes, self.spec.budget.total_bytes // self._parallelism)
        return MultiJoinTask(
            spec=self._shard_spec,
            places=self.layout.places,
            output_names=tuple(self.mapped_schema.names),
            owner=self._owner,
            alive_bytes=alive_bytes,
        )

    def finish(self, mapped: DataFrame) -> DataFrame:
        """The join columns once, then each input's others."""
        return decode(mapped, self._carried).toDF(*self.output.names)


def _spark_field(spec: MJoinSpec, schemas: Mapping[str, T.StructType], column: str, is_nullable: bool) -> T.StructField:
    """A column of the result as Spark knows it: a join column is the first input's."""
    owners = [a.inputs[0] for a in spec.attributes if column in a.columns[a.inputs[0]]]
    key_columns = {(n, c) for a in spec.attributes for n, columns in a.columns.items() for c in columns}
    owners += [name for name in spec.names if column in schemas[name].names and (name, column) not in key_columns]
    field = schemas[owners[0]][column]
    return T.StructField(column, field.dataType, is_nullable, field.metadata)
