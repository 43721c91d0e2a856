"""One shard of a join whose tuples wait for rows that the relation does not have yet, in one micro-batch.

A tuple that finds its row is emitted at once. Others wait in the shard's state and are tried again when the relation
has a new version; after the maximum wait they leave without a match. A tuple with a NULL in its key cannot match, and
does not wait.
"""

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray
from dovetail.core.memory import Budget
from dovetail.core.metrics import OperatorMetrics
from dovetail.joins import LookupJoin
from dovetail.joins.protocol import CODE_COLUMN
from dovetail.joins.spec import JoinType
from dovetail.relation.shard_reader import ShardReader
from dovetail.runtime.join_recipe import JoinRecipe
from dovetail.runtime.local_directory import local_directory
from dovetail.runtime.merged_batches import merged_batches
from dovetail.runtime.shard_job import ShardInput, ShardResult
from dovetail.warehouse.kept_rows import on_disk

__all__ = ["EXPIRED_TABLE", "Fate", "WaitingTask"]

EXPIRED_TABLE = "expired"
"""The state table with the rows for the side output; it holds those of one micro-batch only."""

Fate = Literal["out", "aside", "dropped"]
"""What to do with a tuple that has waited in vain: emit it with NULLs, move it to `EXPIRED_TABLE`, or drop it."""

_WAITING_TABLE = "waiting"
_SINCE, _ROW = "__since_ms", "__row"
_MOST_FILES = 12
_BATCH_ROWS = 65_536
_SHARE = 8  # one eighth of the budget each for a batch of rows and for waiting rows in memory


@dataclass(frozen=True)
class WaitingTask:
    """The join of one shard; see `dovetail.runtime.shard_job.ShardTask`."""

    recipe: JoinRecipe  # of a left join
    stream_schema: pa.Schema  # of the routed rows
    fate: Fate  # of tuples that have waited in vain
    budget_bytes: int = 64 << 20  # per shard: half for lookups, the rest for rows in flight

    def run(self, given: ShardInput) -> Generator[pa.RecordBatch, None, ShardResult]:
        """Join the tuples that match, and keep the others waiting."""
        shard, state, intent = given.shard, given.state, given.intent
        relation = self.recipe.open(intent["version"])
        reader = relation.shard(shard, columns=list(self.recipe.relation_columns))
        joins = _Joins(self.recipe, reader, Budget(self.budget_bytes // 2))
        totals = OperatorMetrics() if state is None else OperatorMetrics.from_dict(state.values["metrics"])
        files = () if state is None else tuple(file for file in state.files if file.table == _WAITING_TABLE)
        most_bytes = self.budget_bytes // _SHARE
        expired = _Pile(most_bytes)
        waiting = [given.read(file) for file in files]
        is_unchanged = True
        if state is not None and waiting and state.values["version"] != intent["version"]:
            is_unchanged = False
            left = _Pile(most_bytes)
            for batch in _batches(waiting, most_bytes):
                left.add((yield from self._matched(joins, batch, totals)))
            waiting = left.tables()
        if any(_is_due(table, intent["due_ms"]).any() for table in waiting):
            is_unchanged = False
            left = _Pile(most_bytes)
            for batch in _batches(waiting, most_bytes):
                is_due = _is_due(batch, intent["due_ms"])
                yield from self._unmatched(joins, batch.filter(pa.array(is_due)), totals, expired)
                left.add(batch.filter(pa.array(~is_due)))
            waiting = left.tables()
        arrived = _Pile(most_bytes)
        for batch in merged_batches(given.batches, _BATCH_ROWS, most_bytes):
            totals.stream_tuples_in += batch.num_rows
            typed = batch if batch.schema.equals(self.stream_schema) else batch.cast(self.stream_schema)
            since = pa.array(np.full(typed.num_rows, intent["time_ms"], np.int64))
            missing = yield from self._matched(joins, typed.append_column(_SINCE, since), totals)
            hopeless = joins.has_null_key(missing)
            totals.null_key_tuples += int(np.count_nonzero(hopeless))
            yield from self._unmatched(joins, missing.filter(pa.array(hopeless)), totals, expired)
            arrived.add(missing.filter(pa.array(~hopeless)))
        new = [pa.concat_tables(arrived.tables())] if arrived.tables() else []
        if not is_unchanged or len(files) >= _MOST_FILES:
            new = [pa.concat_tables([*waiting, *new])] if waiting or new else []
            files = ()
        return self._result([table for table in new if table.num_rows], waiting, files, expired, totals, intent)

    def _matched(
        self, joins: "_Joins", batch: pa.RecordBatch, totals: OperatorMetrics
    ) -> Generator[pa.RecordBatch, None, pa.RecordBatch]:
        """Emit the results of a batch; returns the tuples without a match."""
        for result in joins.inner(batch):
            totals.output_rows += result.num_rows
            yield self.recipe.output_batch(result)
        missing = batch.take(pa.array(joins.missing(batch)))
        totals.matched_tuples += batch.num_rows - missing.num_rows
        return missing

    def _unmatched(
        self, joins: "_Joins", batch: pa.RecordBatch, totals: OperatorMetrics, expired: "_Pile"
    ) -> Iterator[pa.RecordBatch]:
        """Release tuples without a match."""
        totals.unmatched_tuples += batch.num_rows
        if self.fate == "dropped" or not batch.num_rows:
            return
        for result in joins.left(batch):
            if self.fate == "aside":
                expired.add(self.recipe.output_batch(result))
            else:
                totals.output_rows += result.num_rows
                yield self.recipe.output_batch(result)

    def _result(
        self,
        new: list[pa.Table],
        waiting: list[pa.Table],
        files: tuple[Any, ...],
        expired: "_Pile",
        totals: OperatorMetrics,
        intent: Mapping[str, Any],
    ) -> ShardResult:
        held = [*new, *(waiting if files else ())]
        pending = sum(table.num_rows for table in held)
        oldest = min((int(table.column(_SINCE).to_numpy().min()) for table in held if table.num_rows), default=None)
        report = {
            "pending": pending,
            "oldest_ms": oldest,
            "memory": {"waiting": sum(table.nbytes for table in held)},
            "metrics": totals.as_dict(),
            "version": intent["version"],
        }
        values = {"version": intent["version"], "metrics": totals.as_dict()}
        tables = [(_WAITING_TABLE, table) for table in new]
        if expired.tables():
            tables.append((EXPIRED_TABLE, pa.concat_tables(expired.tables())))
        return ShardResult(tables, files, values, report)


class _Pile:
    """Rows to be written at the end: up to a number of bytes in memory, the others in mapped files."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._in_files: list[pa.Table] = []
        self._in_memory: list[pa.RecordBatch] = []
        self._bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Copy rows into the pile."""
        if not batch.num_rows:
            return
        self._in_memory.append(batch)
        self._bytes += int(batch.nbytes)
        if self._bytes > self._most_bytes:
            self._in_files.append(on_disk(pa.Table.from_batches(self._in_memory), local_directory()))
            self._in_memory, self._bytes = [], 0

    def tables(self) -> list[pa.Table]:
        """All rows, in order."""
        return [*self._in_files, *([pa.Table.from_batches(self._in_memory)] if self._in_memory else [])]


class _Joins:
    """The same join in three forms."""

    def __init__(self, recipe: JoinRecipe, shard: ShardReader, budget: Budget) -> None:
        self._recipe, self._shard, self._budget = recipe, shard, budget
        self._forms: dict[JoinType, LookupJoin] = {}

    def inner(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        yield from self._results("inner", self._coded(batch))

    def left(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        yield from self._results("left", self._coded(batch))

    def missing(self, batch: pa.RecordBatch) -> np.ndarray:
        """The ascending numbers of the tuples without a match."""
        numbers = pa.array(np.arange(batch.num_rows))
        found = [result.column(_ROW).to_numpy() for result in self._results("anti", self._coded(batch, numbers))]
        return np.sort(np.concatenate([np.empty(0, np.int64), *found]))

    def has_null_key(self, batch: pa.RecordBatch) -> np.ndarray:
        """Which tuples can never match."""
        return np.asarray(self._coded(batch).column(CODE_COLUMN).is_null().to_numpy(zero_copy_only=False), np.bool_)

    def _coded(self, batch: pa.RecordBatch, numbers: pa.Array | None = None) -> pa.RecordBatch:
        rows = batch.drop_columns([_SINCE])
        return self._recipe.stream_batch(rows if numbers is None else rows.append_column(_ROW, numbers))

    def _results(self, how: JoinType, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        if how not in self._forms:
            recipe = replace(self._recipe, how=how, select=() if how == "anti" else self._recipe.select)
            self._forms[how] = LookupJoin(recipe.spec(self._shard, batch.schema, self._budget))
        yield from self._forms[how].offer(batch)


def _batches(tables: list[pa.Table], most_bytes: int) -> Iterator[pa.RecordBatch]:
    """The rows of tables in batches of bounded size."""
    for table in tables:
        row_bytes = max(1, table.nbytes // max(1, table.num_rows))
        rows = max(1, min(_BATCH_ROWS, most_bytes // row_bytes))
        yield from (batch for batch in table.to_batches(max_chunksize=rows) if batch.num_rows)


def _is_due(rows: pa.Table | pa.RecordBatch, due_ms: int) -> BoolArray:
    return np.asarray(rows.column(_SINCE).to_numpy() <= due_ms, np.bool_)
