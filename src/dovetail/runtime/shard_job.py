"""Runs one shard of one step on an executor.

A task is a pure function of the shard's state after the last commit, the shard's sorted rows, and the step's part of
the intent. It returns output batches, then its new state, and last a trailer: one row that names the new state files
with their digests and carries the report. See `dovetail.spark.flow.trailers` for the other end.
"""

import base64
import json
import uuid
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from dovetail.core.errors import DovetailError, InternalError
from dovetail.core.faultpoints import fault_point
from dovetail.relation.format import SHARD_COLUMN
from dovetail.storage.state_files import ShardState, StateFile, read_table, write_tables

__all__ = [
    "TRAILER_COLUMN",
    "ShardInput",
    "ShardJob",
    "ShardResult",
    "ShardTask",
    "pack_trailer",
    "rows_of_one_shard",
    "unpack_trailer",
]

TRAILER_COLUMN = "__trailer"
"""The column with the trailer's text in the last row of a shard's output, NULL in all others."""


@dataclass(frozen=True)
class ShardInput:
    """Everything that a shard's task may depend on."""

    shard: int
    state: ShardState | None  # after the last committed micro-batch; None before the first
    state_root: Path  # the directory of state files
    # The rows as `Step.route` made them, sorted if the step needs it. The shard column is replaced by the tags, if the
    # step uses tags.
    batches: Iterator[pa.RecordBatch]
    intent: Mapping[str, Any]  # what `Step.decide` returned for this micro-batch

    def read(self, file: StateFile) -> pa.Table:
        """Map and verify a table that a commit names."""
        return read_table(self.state_root, file)

    def file_bytes(self, name: str) -> int:
        """The size of a state file, including tables that no commit names any more."""
        return (self.state_root / name).stat().st_size


@dataclass(frozen=True)
class ShardResult:
    """What a shard's task leaves behind besides its output."""

    # New state by name, written to new files; a name may hold several tables.
    tables: Sequence[tuple[str, pa.Table]] = ()
    kept: tuple[StateFile, ...] = ()  # files of the last state that still hold part of this one
    values: Mapping[str, Any] = field(default_factory=dict)  # the rest of the state, JSON-able
    # Counters and waiting rows for the driver, JSON-able; never read by a task.
    report: Mapping[str, Any] = field(default_factory=dict)
    # Called with the new state once it is durable; used to keep operators alive.
    on_saved: Callable[[ShardState], None] | None = None


class ShardTask(Protocol):
    """The part of a step that runs on an executor; picklable."""

    def run(self, given: ShardInput) -> Generator[pa.RecordBatch, None, ShardResult]: ...


@dataclass(frozen=True)
class ShardJob:
    """What runs in every task of one step in one micro-batch; picklable."""

    state_root: str
    operator: str
    batch: int
    task: ShardTask
    states: tuple[ShardState, ...]  # of the shards after the last commit; empty before the first
    intent: Mapping[str, Any]
    mapped_schema: pa.Schema  # the columns that the step emits, for a task without output rows
    shards: int
    has_tags: bool = False  # whether row numbers carry tags, see `rows_of_one_shard`

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        shard, rows = rows_of_one_shard(batches, self.shards, self.has_tags)
        if shard is None:
            return
        schema, count = self.mapped_schema, 0
        try:
            state = self.states[shard] if self.states else None
            work = self.task.run(ShardInput(shard, state, Path(self.state_root), rows, self.intent))
            while True:
                try:
                    batch = next(work)
                except StopIteration as end:
                    result: ShardResult = end.value
                    break
                schema, count = batch.schema, count + batch.num_rows
                fault_point("flow.task.output")
                nothing = pa.nulls(batch.num_rows, pa.string())
                yield pa.RecordBatch.from_arrays([*batch.columns, nothing], names=[*batch.schema.names, TRAILER_COLUMN])
            fault_point("flow.task.before_state")
            saved = self._save(shard, result)
            trailer = {"shard": shard, "rows": count, "state": saved.as_dict(), "report": dict(result.report)}
        except DovetailError as error:
            # Reported to the driver as data: Spark would bury an exception in its own messages.
            trailer = {"shard": shard, "error": error.as_dict()}
            for _ in rows:
                pass  # read to the end, so that the worker can be reused
        fault_point("flow.task.trailer")
        columns = [*(pa.nulls(1, field.type) for field in schema), pa.array([pack_trailer(trailer)], pa.string())]
        yield pa.RecordBatch.from_arrays(columns, names=[*schema.names, TRAILER_COLUMN])

    def _save(self, shard: int, result: ShardResult) -> ShardState:
        root = Path(self.state_root)
        filled = [(name, table) for name, table in result.tables if table.num_rows]
        written = write_tables(root, self.operator, shard, self.batch, filled)
        state = ShardState(uuid.uuid4().hex, (*result.kept, *written), result.values)
        if result.on_saved is not None:
            result.on_saved(state)
        return state


def pack_trailer(trailer: Mapping[str, Any]) -> str:
    """The text of a trailer: compressed JSON.

    Py4J answers above 8 KB wait for a delayed acknowledgement (44 ms here). A trailer is about 8 KB of JSON, and a
    fifth of that compressed.

    Examples
    --------
    >>> unpack_trailer(pack_trailer({"shard": 3}))
    {'shard': 3}
    """
    return base64.b64encode(zlib.compress(json.dumps(trailer).encode(), 1)).decode()


def unpack_trailer(text: str) -> dict[str, Any]:
    """The inverse of `pack_trailer`."""
    trailer: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return trailer


def rows_of_one_shard(
    batches: Iterator[pa.RecordBatch], shards: int, has_tags: bool = False
) -> tuple[int | None, Iterator[pa.RecordBatch]]:
    """The shard given to a task, and its rows without the tick; None if it was given no row.

    A row's number is ``tag * shards + shard``. The tags, 0 if a step uses none, replace the numbers or are left out.
    The tick of shard n has the number -1 - n; see `dovetail.spark.flow.routing`. A task without any row is a partition
    that Spark added beyond the last shard.
    """
    filled = (batch for batch in batches if batch.num_rows)
    first = next(filled, None)
    if first is None:
        return None, iter(())
    number = int(first.column(SHARD_COLUMN)[0].as_py())
    shard = number % shards if number >= 0 else -1 - number
    return shard, _rows(shard, shards, has_tags, chain([first], filled))


def _rows(shard: int, shards: int, has_tags: bool, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    ticks = 0
    for batch in batches:
        numbers = batch.column(SHARD_COLUMN).to_numpy(zero_copy_only=False)
        tags, shard_of_row = np.divmod(numbers, np.int32(shards))
        is_row = numbers >= 0
        ticks += len(batch) - int(is_row.sum())
        if ticks > 1 or np.any(np.where(is_row, shard_of_row, -1 - numbers) != shard):
            raise InternalError(f"rows of several shards reached the task of shard {shard}.")
        place = batch.schema.get_field_index(SHARD_COLUMN)
        rows = batch.set_column(place, SHARD_COLUMN, pa.array(tags)) if has_tags else batch.remove_column(place)
        # A batch of wide rows is large: it is sliced around the tick, not copied.
        edges = [-1, *np.flatnonzero(~is_row).tolist(), len(batch)]
        for before, tick in pairwise(edges):
            if tick - before > 1:
                yield rows.slice(before + 1, tick - before - 1)
    if ticks == 0:
        raise InternalError(f"the task of shard {shard} was given no tick: its rows are not as they were routed.")
