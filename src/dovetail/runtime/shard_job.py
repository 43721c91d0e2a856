"""What runs on an executor for one shard of one step: no Spark is needed to import it.

A task is a pure function of the shard's state after the last commit, the shard's sorted rows, and the step's part of
the intent. What it gives is output batches, then its new state, and last a trailer: one row that names the new state
files with their digests and carries the report. See `dovetail.spark.trailers` for the other end.
"""

import base64
import json
import uuid
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from dovetail.errors import DovetailError, InternalError
from dovetail.faultpoints import fault_point
from dovetail.relation.format import SHARD_COLUMN
from dovetail.state import ShardState, StateFile, read_table, write_tables

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
"""The text of a trailer in the last row of a shard's output, NULL in all others."""


@dataclass(frozen=True)
class ShardInput:
    """All that a shard's task may go by.

    Attributes
    ----------
    shard
        The shard's number.
    state
        Its state after the last committed micro-batch; None before the first.
    state_root
        Where the files of states lie.
    batches
        The shard's rows as `Step.route` made them; sorted where the step needs it. In place of the column of the shard
        they have that of their tags, if the step uses tags, or none.
    intent
        What `Step.decide` gave for this micro-batch.
    """

    shard: int
    state: ShardState | None
    state_root: Path
    batches: Iterator[pa.RecordBatch]
    intent: Mapping[str, Any]

    def read(self, file: StateFile) -> pa.Table:
        """Map a table that a commit names, checked."""
        return read_table(self.state_root, file)

    def file_bytes(self, name: str) -> int:
        """How large a state file is, with the tables in it that no commit names any more."""
        return (self.state_root / name).stat().st_size


@dataclass(frozen=True)
class ShardResult:
    """What a shard's task leaves behind, besides its output.

    Attributes
    ----------
    tables
        New state, by name; written to new files. A name may hold several tables.
    kept
        Files of the last state that still hold part of this one.
    values
        The rest of the state, ready for JSON.
    report
        What the driver wants to know: counters, what waits; ready for JSON, never read by a task.
    on_saved
        Called with the new state once it is durable, for a task that keeps its operator alive.
    """

    tables: Sequence[tuple[str, pa.Table]] = ()
    kept: tuple[StateFile, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    on_saved: Callable[[ShardState], None] | None = None


class ShardTask(Protocol):
    """The part of a step that runs on an executor; picklable."""

    def run(self, given: ShardInput) -> Generator[pa.RecordBatch, None, ShardResult]:
        """Join, and give the new state."""


@dataclass(frozen=True)
class ShardJob:
    """What runs in every task of one step in one micro-batch; picklable.

    Attributes
    ----------
    state_root, operator, batch
        Where new state files go, and what they are called.
    task
        The step's own work.
    states
        The shards' states after the last commit; none before the first.
    intent
        The step's part of the intent.
    mapped_schema
        The columns that the step puts out, for a task that has no output row to tell.
    shards, has_tags
        How many shards the step has, and whether the rows' numbers tell more than that; see `rows_of_one_shard`.
    """

    state_root: str
    operator: str
    batch: int
    task: ShardTask
    states: tuple[ShardState, ...]
    intent: Mapping[str, Any]
    mapped_schema: pa.Schema
    shards: int
    has_tags: bool = False

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
            # Told to the driver as data: an exception would reach the user inside pages of Spark's own.
            trailer = {"shard": shard, "error": {"class": type(error).__name__, "message": str(error)}}
            for _ in rows:
                pass  # what is left is read to its end, so that the worker can be used again
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
    """The text of a trailer: JSON, compressed.

    What the JVM hands to Python in answers of more than 8 KB waits for an acknowledgement that the other end delays:
    44 ms here. A trailer is about 8 KB of JSON, and a fifth of that compressed.

    Examples
    --------
    >>> unpack_trailer(pack_trailer({"shard": 3}))
    {'shard': 3}
    """
    return base64.b64encode(zlib.compress(json.dumps(trailer).encode(), 1)).decode()


def unpack_trailer(text: str) -> dict[str, Any]:
    """What `pack_trailer` was given."""
    trailer: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return trailer


def rows_of_one_shard(
    batches: Iterator[pa.RecordBatch], shards: int, has_tags: bool = False
) -> tuple[int | None, Iterator[pa.RecordBatch]]:
    """The shard that a task was given, and its rows without tick; None if it was given none.

    A row's number is ``tag * shards + shard``: one column tells both. The tags, 0 where a step uses none, take the
    numbers' place or are left out. The tick of shard n has the number -1 - n; see `dovetail.spark.routing`. A task that
    has no row at all is one that Spark added: a partition beyond the last shard.
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
        if not is_row.all():
            rows = rows.filter(pa.array(is_row))
        if rows.num_rows:
            yield rows
    if ticks == 0:
        raise InternalError(f"the task of shard {shard} was given no tick: its rows are not as they were routed.")
