"""One shard of a join whose tuples wait for rows that the relation does not have yet, in one micro-batch.

A tuple that finds its row leaves at once. One that does not waits in the shard's state, and is tried again when the
relation has another version; when it has waited long enough, it leaves without. A tuple whose key has a NULL can find
nothing, and does not wait.
"""

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from dovetail.memory import Budget
from dovetail.metrics import OperatorMetrics
from dovetail.operators.protocol import CODE_COLUMN
from dovetail.relation.shard_reader import ShardReader
from dovetail.spark.join_recipe import JoinRecipe
from dovetail.spark.lookup_join import LookupJoin
from dovetail.spark.shard_job import ShardInput, ShardResult

__all__ = ["EXPIRED_TABLE", "Fate", "WaitingTask"]

EXPIRED_TABLE = "expired"
"""The table of a shard's state with the rows that leave to the side; it is of one micro-batch only."""

Fate = Literal["out", "aside", "dropped"]
"""What becomes of a tuple that has waited in vain: put out with NULLs, put aside in `EXPIRED_TABLE`, or dropped."""

_WAITING_TABLE = "waiting"
_SINCE, _ROW = "__since_ms", "__row"
_MOST_FILES = 12


@dataclass(frozen=True)
class WaitingTask:
    """The join of one shard; see `dovetail.spark.shard_job.ShardTask`.

    Attributes
    ----------
    recipe
        The join, ``left``.
    stream_schema
        The columns of the routed rows.
    fate
        What becomes of tuples that have waited in vain.
    """

    recipe: JoinRecipe
    stream_schema: pa.Schema
    fate: Fate

    def run(self, given: ShardInput) -> Generator[pa.RecordBatch, None, ShardResult]:
        """Join what can be joined, and let the rest wait."""
        shard, state, intent = given.shard, given.state, given.intent
        relation = self.recipe.open(intent["version"])
        reader = relation.shard(shard, columns=list(self.recipe.relation_columns))
        joins = _Joins(self.recipe, reader, relation.stats.max_multiplicity)
        totals = OperatorMetrics() if state is None else OperatorMetrics.from_dict(state.values["metrics"])
        files = () if state is None else tuple(file for file in state.files if file.table == _WAITING_TABLE)
        expired: list[pa.RecordBatch] = []
        waiting = [given.read(file) for file in files]
        is_unchanged = True
        if state is not None and waiting and state.values["version"] != intent["version"]:
            is_unchanged = False
            left: list[pa.Table] = []
            for batch in _batches(waiting):
                missing = yield from self._matched(joins, batch, totals)
                left.append(pa.Table.from_batches([missing]))
            waiting = left
        due = [table.filter(_is_due(table, intent["due_ms"])) for table in waiting]
        if any(table.num_rows for table in due):
            is_unchanged = False
            waiting = [table.filter(pa.array(~_is_due(table, intent["due_ms"]).to_numpy(False))) for table in waiting]
            for batch in _batches(due):
                yield from self._unmatched(joins, batch, totals, expired)
        arrived: list[pa.RecordBatch] = []
        for batch in given.batches:
            totals.stream_tuples_in += batch.num_rows
            typed = batch if batch.schema.equals(self.stream_schema) else batch.cast(self.stream_schema)
            since = pa.array(np.full(typed.num_rows, intent["time_ms"], np.int64))
            missing = yield from self._matched(joins, typed.append_column(_SINCE, since), totals)
            hopeless = joins.has_null_key(missing)
            totals.null_key_tuples += int(np.count_nonzero(hopeless))
            yield from self._unmatched(joins, missing.filter(pa.array(hopeless)), totals, expired)
            arrived.append(missing.filter(pa.array(~hopeless)))
        new = [pa.Table.from_batches(arrived)] if arrived else []
        if not is_unchanged or len(files) >= _MOST_FILES:
            new = [pa.concat_tables([*waiting, *new])] if waiting or new else []
            files = ()
        return self._result([table for table in new if table.num_rows], waiting, files, expired, totals, intent)

    def _matched(
        self, joins: "_Joins", batch: pa.RecordBatch, totals: OperatorMetrics
    ) -> Generator[pa.RecordBatch, None, pa.RecordBatch]:
        """Put out the results of a batch; gives the tuples that have none."""
        for result in joins.inner(batch):
            totals.output_rows += result.num_rows
            yield self.recipe.output_batch(result)
        missing = batch.take(pa.array(joins.missing(batch)))
        totals.matched_tuples += batch.num_rows - missing.num_rows
        return missing

    def _unmatched(
        self, joins: "_Joins", batch: pa.RecordBatch, totals: OperatorMetrics, expired: list[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """Let tuples go that have no match."""
        totals.unmatched_tuples += batch.num_rows
        if self.fate == "dropped" or not batch.num_rows:
            return
        for result in joins.left(batch):
            if self.fate == "aside":
                expired.append(self.recipe.output_batch(result))
            else:
                totals.output_rows += result.num_rows
                yield self.recipe.output_batch(result)

    def _result(
        self,
        new: list[pa.Table],
        waiting: list[pa.Table],
        files: tuple[Any, ...],
        expired: list[pa.RecordBatch],
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
        if expired:
            tables.append((EXPIRED_TABLE, pa.Table.from_batches(expired)))
        return ShardResult(tables, files, values, report)


class _Joins:
    """The same join in its three forms."""

    def __init__(self, recipe: JoinRecipe, shard: ShardReader, max_multiplicity: int) -> None:
        self._recipe, self._shard, self._most = recipe, shard, max_multiplicity
        self._forms: dict[str, LookupJoin] = {}

    def inner(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The matches."""
        yield from self._form("inner", batch).join(self._coded(batch))

    def left(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The matches, and the tuples that have none."""
        yield from self._form("left", batch).join(self._coded(batch))

    def missing(self, batch: pa.RecordBatch) -> np.ndarray:
        """The numbers of the tuples that have no match, ascending."""
        numbers = pa.array(np.arange(batch.num_rows))
        found = [
            result.column(_ROW).to_numpy() for result in self._form("anti", batch).join(self._coded(batch, numbers))
        ]
        return np.sort(np.concatenate([np.empty(0, np.int64), *found]))

    def has_null_key(self, batch: pa.RecordBatch) -> np.ndarray:
        """Which tuples can have no match, ever."""
        return np.asarray(self._coded(batch).column(CODE_COLUMN).is_null().to_numpy(zero_copy_only=False), np.bool_)

    def _coded(self, batch: pa.RecordBatch, numbers: pa.Array | None = None) -> pa.RecordBatch:
        rows = batch.drop_columns([_SINCE])
        return self._recipe.stream_batch(rows if numbers is None else rows.append_column(_ROW, numbers))

    def _form(self, how: str, batch: pa.RecordBatch) -> LookupJoin:
        if how not in self._forms:
            numbers = pa.array(np.arange(batch.num_rows)) if how == "anti" else None
            recipe = replace(self._recipe, how=how, select=() if how == "anti" else self._recipe.select)  # type: ignore[arg-type]
            spec = recipe.spec(self._shard, self._coded(batch, numbers).schema, Budget(1 << 20))
            self._forms[how] = LookupJoin(spec, self._shard, self._most)
        return self._forms[how]


def _batches(tables: list[pa.Table]) -> Iterator[pa.RecordBatch]:
    for table in tables:
        yield from (batch for batch in table.to_batches(max_chunksize=65_536) if batch.num_rows)


def _is_due(table: pa.Table, due_ms: int) -> pa.Array:
    return pa.array(table.column(_SINCE).to_numpy() <= due_ms)
