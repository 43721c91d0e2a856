"""One shard of a multi-way join in one micro-batch.

The state after the last commit is a set of immutable tables. Tables that this micro-batch did not merge or purge are
referenced by the next commit, so the amount written is proportional to what arrived. Once the new state is durable,
spilled tuples are read from it: the spill directory only holds what one micro-batch spilled.

The watermark in the intent decides whether a row is late. All shards share it, and this micro-batch's own rows do not
move it.
"""

import tempfile
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from dovetail.core.errors import SpillError
from dovetail.core.metrics import OperatorMetrics
from dovetail.joins.multiway import MJoin, MJoinSpec
from dovetail.joins.multiway.snapshots import named_tables
from dovetail.joins.protocol import Snapshot
from dovetail.runtime.late_rows import LateWriter
from dovetail.runtime.live_operators import LIVE
from dovetail.runtime.local_directory import local_directory
from dovetail.runtime.shard_job import ShardInput, ShardResult
from dovetail.storage.state_files import ShardState, StateFile, read_table

__all__ = ["MultiJoinTask"]

_MOST_ROWS_TOGETHER = 1 << 19
_BUDGET_SHARE_TOGETHER = 16
"""Rows are collected in this fraction of the budget before they are offered: what the join takes at once."""
_DONE, _INDEX = "done", ".index"
_LEAST_LIVE_SHARE = 0.5
"""A state file of which a smaller share is still needed is rewritten."""


@dataclass(frozen=True)
class _LiveJoin:
    """A join with its spill directory, which is deleted with it."""

    join: MJoin
    spill: "tempfile.TemporaryDirectory[str]"

    def size(self) -> int:
        return self.join.size()


@dataclass(frozen=True)
class MultiJoinTask:
    """The multi-way join of one shard; see `dovetail.runtime.shard_job.ShardTask`."""

    spec: MJoinSpec  # with the budget of one shard
    numbers: tuple[int, ...]  # per input, the tag of its rows
    codes: int  # number of code columns
    places: tuple[tuple[int, ...], ...]  # per input, the slot of each column; -1 - n if code number n gives the column
    output_names: tuple[str, ...]  # internal names of the result columns
    owner: str  # unique to the step of a running query: the key of its live joins
    alive_bytes: int  # the most that live joins may take in a worker; 0: none are kept

    def run(self, given: ShardInput) -> Generator[pa.RecordBatch, None, ShardResult]:
        """Join the shard's rows, and emit what the intent's time and watermark require."""
        intent = given.intent
        live = self._continued(given)
        join = live.join
        late = LateWriter(Path(live.spill.name))
        join.on_late = late.add
        join.set_time(intent["time_ms"])
        join.late_before = intent.get("late_before")
        if intent["watermark"] is not None:
            # First: this watermark decides what is late, and its purge makes room.
            yield from self._emit(join.advance(intent["watermark"]))
        for name, batch in self._arrivals(given.batches):
            yield from self._emit(join.offer(name, batch))
        yield from self._emit(join.drain() if intent["drain"] else join.step())
        return self._result(given, live, late)

    # ================================================================ the join

    def _continued(self, given: ShardInput) -> _LiveJoin:
        """The join as of the last commit, live or restored."""
        state = given.state
        alive: _LiveJoin | None = LIVE.take(self.owner, given.shard, "" if state is None else state.state_id)
        if alive is not None:
            return alive
        LIVE.make_room(self.spec.budget.total_bytes, self.alive_bytes)
        spill = _new_directory(self.spec.spill_directory or local_directory())
        join = self.new_join(replace(self.spec, spill_directory=Path(spill.name)))
        if state is not None:
            saved = state.values
            tables = {} if _DONE in saved["values"] else _all_done_bits(given, state)
            stored = Snapshot(saved["kind"], saved["fingerprint"], tables, saved["values"])
            join.restore(stored, _StoredTables(given.state_root, state.files))
        return _LiveJoin(join, spill)

    def new_join(self, spec: MJoinSpec) -> MJoin:
        return MJoin(spec)

    # ================================================================ rows

    def _arrivals(self, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The rows by input, with consecutive small batches of one input merged."""
        most_bytes = self.spec.budget.total_bytes // _BUDGET_SHARE_TOGETHER
        parts: dict[int, list[pa.RecordBatch]] = {}
        rows = size = 0
        for batch in batches:
            tags = batch.column(0).to_numpy(zero_copy_only=False)
            changes = (np.flatnonzero(np.diff(tags)) + 1).tolist()
            for start, stop in pairwise([0, *changes, len(tags)]):
                i = self.numbers.index(int(tags[start]))
                part = self._input_batch(i, batch.slice(start, stop - start))
                parts.setdefault(i, []).append(part)
                rows, size = rows + part.num_rows, size + part.nbytes
            if rows >= _MOST_ROWS_TOGETHER or size >= most_bytes:
                yield from self._together(parts)
                parts, rows, size = {}, 0, 0
        yield from self._together(parts)

    def _together(self, parts: dict[int, list[pa.RecordBatch]]) -> Iterator[tuple[str, pa.RecordBatch]]:
        for i in sorted(parts):
            yield self.spec.names[i], pa.concat_batches(parts[i]) if len(parts[i]) > 1 else parts[i][0]

    def _input_batch(self, i: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        schema = self.spec.schemas[self.spec.names[i]]
        attributes = self.spec.input_attributes[i]
        columns = [batch.column(1 + place) for place in range(len(attributes))]
        for field, slot in zip(schema, self.places[i], strict=True):
            column = batch.column(1 + self.codes + slot if slot >= 0 else -slot)
            # Timestamps may have the session's time zone, and a code is wider than its column.
            columns.append(column if column.type == field.type else column.cast(field.type))
        names = [self.spec.code_columns[k] for k in attributes]
        return pa.RecordBatch.from_arrays(columns, names=[*names, *schema.names])

    def _emit(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if batch.num_rows:
                yield pa.RecordBatch.from_arrays(batch.columns, names=list(self.output_names))

    # ================================================================ the result

    def _result(self, given: ShardInput, live: _LiveJoin, late: LateWriter) -> ShardResult:
        join = live.join
        last = () if given.state is None else given.state.files
        kept, rewritten = _worth_keeping(given, last, join)
        stored = frozenset(file.table for file in kept)
        snapshot = join.snapshot(have=stored | frozenset(rewritten))
        held = named_tables(snapshot.values)
        kept = [file for file in kept if _chunk_of(file) in held]
        tables = [(name, table) for name, table in snapshot.tables.items() if table.num_rows]
        tables += [(name, table) for name, table in rewritten.items() if name.removesuffix(_INDEX) in held]
        tables += late.tables()
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
            "watermark": given.intent["watermark"],
            "seen": given.intent.get("seen"),
            "completed": join.completed_time,
            "latest": join.scalars()["greatest_time"],
            "pending_low": min((d.pending_low for d in join.state.domains if d.pending_low is not None), default=None),
        }

        def keep(saved: ShardState) -> None:
            join.on_late = None
            join.refer_to_stored(snapshot, _StoredTables(given.state_root, saved.files))
            LIVE.keep(self.owner, given.shard, saved.state_id, live)

        return ShardResult(tables, tuple(kept), values, report, keep if self.alive_bytes else None)


def _all_done_bits(given: ShardInput, state: ShardState) -> dict[str, pa.Table]:
    """The done bits of a state that an earlier version wrote: one table, which was left out if it was empty."""
    nothing = pa.table({"chunk": pa.array([], pa.string()), "bits": pa.array([], pa.binary())})
    return {_DONE: next((given.read(file) for file in state.files if file.table == _DONE), nothing)}


def _new_directory(parent: Path | None) -> "tempfile.TemporaryDirectory[str]":
    try:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="dovetail-spill-", dir=parent)
    except OSError as error:
        raise SpillError(
            f"The spill directory {str(parent)!r} failed: {error}. No tuple was lost.",
            hint="Free space there, and start the flow again with the same checkpoint.",
        ) from error


class _StoredTables:
    """Tables of a state by name, mapped on first use."""

    def __init__(self, state_root: Path, files: tuple[StateFile, ...]) -> None:
        self._root = state_root
        self._files = {file.table: file for file in files}

    def __call__(self, name: str) -> pa.Table:
        return read_table(self._root, self._files[name])


def _chunk_of(file: StateFile) -> str:
    return file.table.removesuffix(_INDEX)


def _worth_keeping(
    given: ShardInput, last: Sequence[StateFile], join: MJoin
) -> tuple[list[StateFile], dict[str, pa.Table]]:
    """Tables of the last state that stay, and those to rewrite because most of their file is no longer needed."""
    held = join.table_names()
    needed = [file for file in last if _chunk_of(file) in held]
    live_bytes: dict[str, int] = {}
    for file in needed:
        live_bytes[file.name] = live_bytes.get(file.name, 0) + file.bytes
    sparse = {name for name, size in live_bytes.items() if size < _LEAST_LIVE_SHARE * given.file_bytes(name)}
    kept = [file for file in needed if file.name not in sparse]
    return kept, {file.table: given.read(file) for file in needed if file.name in sparse}
