"""Following a table: changes of keys, ordered by a sequence, applied to a kept relation.

A change replaces the row of its key or deletes it. It is applied if its sequence is greater than that of the last
change applied to the key, and dropped as late otherwise; so a change that comes twice is applied once, and the result
does not depend on the order of arrival. The sequence of a row is a column of the relation. That of a deleted key is a
*tombstone*: until the deletion is folded it is among the changes, after that in a state of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.core.errors import StateError
from dovetail.core.metrics import OperatorMetrics
from dovetail.relation.change_set import DELETED_COLUMN
from dovetail.relation.format import CODE_COLUMN
from dovetail.warehouse.kept_rows import KeptRows, Level, merged_levels
from dovetail.warehouse.runs import Runs
from dovetail.warehouse.transformations import Memo, _Keyed

__all__ = ["DELETE", "PROBLEMS", "TIME_COLUMN", "UPSERT", "FollowChanges", "LastSequences", "tombstones_of"]

UPSERT, DELETE = 0, 1
PROBLEMS = {
    2: "a change whose key has a NULL",
    3: "a change without a sequence",
    4: "a change that cannot be read",
}
"""What is wrong with a change, by the number in its column of actions; see `dovetail.spark.steps.follow`."""

TIME_COLUMN = "__time"
_NEVER = np.iinfo(np.int64).min


class LastSequences:
    """The sequence of the last change of each key, from the relation, its changes and the tombstones."""

    def __init__(self, kept: KeptRows, tombstones: Sequence[Level], column: str) -> None:
        self.kept, self._tombstones, self._column = kept, tuple(tombstones), column

    def of(self, codes: Int64Array, keys: Sequence[pa.Array]) -> Int64Array:
        """Per key; the least integer for a key without any change."""
        last = np.full(codes.size, _NEVER, np.int64)
        queries, rows = self.kept.find(codes, keys)
        np.maximum.at(last, queries, _integers(rows.column(self._column)))
        for level in self._tombstones:
            queries, positions = level.find(codes, keys)
            if queries.size:
                np.maximum.at(last, queries, _integers(level.rows.column(self._column))[positions])
        return last


def _integers(column: pa.Array) -> Int64Array:
    # A row that was put into the relation by hand may have none.
    numbers: Int64Array = pc.fill_null(column, _NEVER).to_numpy(zero_copy_only=False)
    return numbers


@dataclass(frozen=True)
class FollowChanges(_Keyed):
    """Keeps the last row of each key by sequence; emits the changes that were applied."""

    action: str  # the stream's column with UPSERT, DELETE, or the number of a problem
    sequence: str  # the stream's column with the sequence
    problem: str | None  # the stream's column that says what is wrong, if its source does
    stored_sequence: str  # the relation's column with the sequence
    stored: tuple[tuple[str, str], ...]  # (stream column, relation column) stored besides the key

    def columns_read(self) -> list[str] | None:
        """The key and the sequence: a wide row is not read to be replaced."""
        return [*(theirs for _, theirs in self.key), self.stored_sequence]

    def follow(
        self, batch: pa.RecordBatch, last: LastSequences, memo: Memo, metrics: OperatorMetrics
    ) -> pa.RecordBatch | None:
        """Return the changes that are applied: of each key the last one, if it is not late."""
        actions = batch.column(self.action).to_numpy(zero_copy_only=False)
        self._require_sound(batch, actions)
        runs = self._runs(batch, metrics)
        if not runs.rows.size:
            return None
        sequences = batch.column(self.sequence).to_numpy(zero_copy_only=False)
        known = last.of(runs.codes, runs.keys)
        is_late = sequences[runs.rows] <= known[runs.run_of]
        newest = runs.rows[runs.ends]
        applied = np.flatnonzero(sequences[newest] > known)
        chosen = newest[applied]
        is_deleted = actions[chosen] == DELETE
        if applied.size:
            last.kept.put(runs.codes[applied], self._changes(batch, runs, applied, chosen, is_deleted))
        late, deleted = int(np.count_nonzero(is_late)), int(np.count_nonzero(is_deleted))
        for name, number in (
            ("late", late),
            ("deleted", deleted),
            ("written", applied.size - deleted),
            ("superseded", runs.rows.size - late - applied.size),
        ):
            memo[name] = int(memo.get(name, 0)) + int(number)
        metrics.matched_tuples += batch.num_rows - late
        metrics.unmatched_tuples += late
        metrics.output_rows += applied.size
        return batch.select(list(self.emitted)).take(pa.array(chosen))

    def _changes(
        self, batch: pa.RecordBatch, runs: Runs, applied: Int64Array, chosen: Int64Array, is_deleted: BoolArray
    ) -> pa.RecordBatch:
        # Of deleted rows nothing is taken, so that what they were is not in any buffer either.
        rows, written = pa.array(chosen), pa.array(chosen, mask=is_deleted)
        columns = self._key_columns(runs, applied)
        for ours, theirs in self.stored:
            columns[theirs] = batch.column(ours).take(written)
        columns[self.stored_sequence] = batch.column(self.sequence).take(rows)
        columns[DELETED_COLUMN] = pa.array(is_deleted)
        return pa.RecordBatch.from_pydict(columns)

    def _require_sound(self, batch: pa.RecordBatch, actions: Int64Array) -> None:
        wrong = np.flatnonzero(actions > DELETE)
        if not wrong.size:
            return
        number = int(wrong[0])
        what = PROBLEMS[int(actions[number])]
        if self.problem is not None and (said := batch.column(self.problem)[number].as_py()) is not None:
            what = said
        keys = ", ".join(f"{theirs}={batch.column(ours)[number].as_py()!r}" for ours, theirs in self.key)
        raise StateError(
            f"The source has {what} ({keys}; {wrong.size} such changes here). The micro-batch was not committed.",
            hint="Correct the source, or filter such rows before; then start the flow again.",
        )


def tombstones_of(
    changes: Sequence[Level], key: Sequence[str], is_hashed: bool, sequence: str, time_ms: int
) -> pa.Table:
    """The deleted keys among changes that are about to leave the state, oldest first, with the time."""
    merged = merged_levels(changes, key, is_hashed)
    gone = merged.filter(merged.column(DELETED_COLUMN)).select([CODE_COLUMN, *key, sequence])
    return gone.append_column(TIME_COLUMN, pa.array(np.full(gone.num_rows, time_ms, np.int64)))
