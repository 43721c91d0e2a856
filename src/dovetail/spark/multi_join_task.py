"""One shard of a multi-way join in one micro-batch.

The state after the last commit is a set of chunks that never change; those that this micro-batch did not merge or purge
are named again by the next commit, so what is written is in proportion to what arrived. Whether a row is late is judged
by the watermark in the intent, which all shards share, and which this micro-batch's own rows do not move.
"""

import tempfile
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dovetail.metrics import OperatorMetrics
from dovetail.operators.mjoin import MJoin, MJoinSpec
from dovetail.operators.protocol import Snapshot
from dovetail.spark.local_directory import local_directory
from dovetail.spark.shard_job import ShardResult, StateReader
from dovetail.state import ShardState

__all__ = ["MultiJoinTask"]

_MOST_ROWS_TOGETHER = 1 << 18
_DONE = "done"


@dataclass(frozen=True)
class _LiveJoin:
    """A join, and the directory that it spills to, which goes with it."""

    join: MJoin
    spill: "tempfile.TemporaryDirectory[str]"
    state_id: str = ""


_ALIVE: dict[tuple[str, int], _LiveJoin] = {}
"""Joins of this worker by step and shard, each with the one state that it may go on from."""


@dataclass(frozen=True)
class MultiJoinTask:
    """The multi-way join of one shard; see `dovetail.spark.shard_job.ShardTask`.

    Attributes
    ----------
    spec
        The join, with the budget of one shard.
    places
        For each input, the slot of each of its columns.
    output_names
        What the columns of the result are called on their way.
    owner
        Unique to the step of a running query: whose living joins these are.
    alive_bytes
        How much the joins may take that go on living in a worker; 0: none.
    """

    spec: MJoinSpec
    places: tuple[tuple[int, ...], ...]
    output_names: tuple[str, ...]
    owner: str
    alive_bytes: int

    def run(
        self,
        shard: int,
        state: ShardState | None,
        read: StateReader,
        batches: Iterator[pa.RecordBatch],
        intent: Mapping[str, Any],
    ) -> Generator[pa.RecordBatch, None, ShardResult]:
        """Join the shard's rows, and give out what the intent's time and watermark ask for."""
        live = self._continued(shard, state, read)
        join = live.join
        join.set_time(intent["time_ms"])
        if intent["watermark"] is not None:
            # First of all: what is late is so by this watermark, and what it purges makes room.
            yield from self._put_out(join.advance(intent["watermark"]))
        for name, batch in self._arrivals(batches):
            yield from self._put_out(join.offer(name, batch))
        yield from self._put_out(join.drain() if intent["drain"] else join.step())
        return self._result(shard, live, state, intent)

    # ================================================================ the join

    def _continued(self, shard: int, state: ShardState | None, read: StateReader) -> _LiveJoin:
        """The join as it was after the last commit, still alive or restored."""
        alive = _ALIVE.pop((self.owner, shard), None)
        if state is not None and alive is not None and alive.state_id == state.state_id:
            return alive
        del alive
        while _ALIVE and self._alive_bytes() + self.spec.budget.total_bytes > self.alive_bytes:
            del _ALIVE[next(iter(_ALIVE))]
        spill = tempfile.TemporaryDirectory(prefix="dovetail-spill-", dir=local_directory())
        join = MJoin(replace(self.spec, spill_directory=Path(spill.name)))
        if state is not None:
            saved = state.values
            tables = {file.table: read(file) for file in state.files}
            tables.setdefault(_DONE, pa.table({"chunk": pa.array([], pa.string()), "bits": pa.array([], pa.binary())}))
            join.restore(Snapshot(saved["kind"], saved["fingerprint"], tables, saved["values"]))
        return _LiveJoin(join, spill)

    @staticmethod
    def _alive_bytes() -> int:
        return sum(live.join.size() for live in _ALIVE.values())

    # ================================================================ rows

    def _arrivals(self, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The rows by input, which they are sorted by; many small batches of one input as one."""
        current, rows = -1, 0
        parts: list[pa.RecordBatch] = []
        for batch in batches:
            tags = batch.column(0).to_numpy(zero_copy_only=False)
            changes = (np.flatnonzero(np.diff(tags)) + 1).tolist()
            for start, stop in pairwise([0, *changes, len(tags)]):
                tag = int(tags[start])
                if parts and (tag != current or rows >= _MOST_ROWS_TOGETHER):
                    yield self.spec.names[current], _together(parts)
                    parts, rows = [], 0
                current = tag
                parts.append(self._input_batch(tag, batch.slice(start, stop - start)))
                rows += stop - start
        if parts:
            yield self.spec.names[current], _together(parts)

    def _input_batch(self, number: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        schema = self.spec.schemas[self.spec.names[number]]
        columns = [batch.column(1)]
        for field, slot in zip(schema, self.places[number], strict=True):
            column = batch.column(2 + slot)
            # The same moments may be told in the session's time zone.
            columns.append(column if column.type == field.type else column.cast(field.type))
        return pa.RecordBatch.from_arrays(columns, names=[self.spec.code_columns[0], *schema.names])

    def _put_out(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield pa.RecordBatch.from_arrays(batch.columns, names=list(self.output_names))

    # ================================================================ what is left behind

    def _result(self, shard: int, live: _LiveJoin, state: ShardState | None, intent: Mapping[str, Any]) -> ShardResult:
        join = live.join
        stored = {} if state is None else {file.table: file for file in state.files if file.table != _DONE}
        snapshot = join.snapshot(have=frozenset(stored))
        held = snapshot.values["chunks"]
        kept = tuple(file for table, file in stored.items() if table.removesuffix(".index") in held)
        tables = [(name, table) for name, table in snapshot.tables.items() if table.num_rows]
        values = {"kind": snapshot.kind, "fingerprint": dict(snapshot.fingerprint), "values": dict(snapshot.values)}
        metrics = join.metrics
        report = {
            "pending": join.pending,
            "oldest_ms": min(
                (d.pending_since for d in join.state.domains if d.pending_since is not None), default=None
            ),
            "memory": join.sizes(),
            "metrics": OperatorMetrics(
                stream_tuples_in=sum(metrics.tuples_in.values()), output_rows=metrics.output_rows
            ).as_dict(),
            "counters": metrics.as_dict(),
            "state_rows": join.state_rows(),
            "version": None,
            "watermark": intent["watermark"],
            "latest": join.scalars()["greatest_time"],
        }

        def keep(saved: ShardState) -> None:
            _ALIVE[self.owner, shard] = replace(live, state_id=saved.state_id)

        return ShardResult(tables, kept, values, report, keep if self.alive_bytes else None)


def _together(parts: list[pa.RecordBatch]) -> pa.RecordBatch:
    if len(parts) == 1:
        return parts[0]
    return pa.Table.from_batches(parts).combine_chunks().to_batches()[0]
