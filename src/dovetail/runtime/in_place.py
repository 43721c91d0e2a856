"""Runs one partition of an in-place step on an executor: no shard, no state.

A task is a function of its partition's rows and of the intent, such as a relation's version. Like the task of a shard
it ends with a trailer, which reports the rows emitted and the counters. The partitions are not known in advance,
several tasks may compute one partition, and one task several, so a trailer says which run of which task it belongs to.
See `dovetail.spark.flow.trailers` for the other end.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from dovetail.core.errors import DovetailError, RelationNotFound
from dovetail.core.faultpoints import fault_point
from dovetail.runtime.metrics_row import METRICS_COLUMN
from dovetail.runtime.shard_job import TRAILER_COLUMN, pack_trailer

__all__ = ["InPlaceJob", "InPlaceTask"]


class InPlaceTask(Protocol):
    """The part of a step that runs in place; picklable.

    It emits rows that end with the column of `dovetail.runtime.metrics_row` and, if there were any rows, the metrics
    row last.
    """

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]: ...


@dataclass(frozen=True)
class InPlaceJob:
    """What runs in every task of one step in one micro-batch; picklable."""

    task: InPlaceTask
    mapped_schema: pa.Schema  # the columns that the step emits
    run: Callable[[], tuple[int, int]]  # returns the numbers of the partition and of this run of the task

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema, count = self.mapped_schema, 0
        partition, attempt = self.run()
        trailer: dict[str, Any] = {"partition": partition, "attempt": attempt}
        try:
            for batch in self.task(batches):
                reported = batch.column(METRICS_COLUMN)
                if reported.null_count < len(reported):
                    trailer["counters"] = reported[0].as_py()
                    continue
                schema, count = batch.schema.remove(batch.num_columns - 1), count + batch.num_rows
                fault_point("flow.task.output")
                nothing = pa.nulls(batch.num_rows, pa.string())
                yield pa.RecordBatch.from_arrays([*batch.columns[:-1], nothing], names=[*schema.names, TRAILER_COLUMN])
        except DovetailError as error:
            # Reported to the driver as data: Spark would bury an exception in its own messages.
            if isinstance(error, RelationNotFound):
                hint = "Nothing was lost: put the relation back, and start the flow again."
                error = RelationNotFound(error.message, hint=hint)
            trailer["error"] = error.as_dict()
            for _ in batches:
                pass  # read to the end, so that the worker can be reused
        if "counters" not in trailer and "error" not in trailer:
            return  # there was no row
        fault_point("flow.task.trailer")
        trailer["rows"] = count
        columns = [*(pa.nulls(1, field.type) for field in schema), pa.array([pack_trailer(trailer)], pa.string())]
        yield pa.RecordBatch.from_arrays(columns, names=[*schema.names, TRAILER_COLUMN])
