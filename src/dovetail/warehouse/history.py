"""Slowly changing dimensions, type 2: every version of a key's row, with its validity interval.

The versions of a key have no gaps: each is valid from its own time until the next one, the last one forever. A late
change is inserted between existing versions. A change equal to the version that was valid at its time adds no version.
A change with the same time as an existing version replaces it.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.core.metrics import OperatorMetrics
from dovetail.warehouse.kept_rows import KeptRows
from dovetail.warehouse.runs import Runs
from dovetail.warehouse.transformations import Memo, _Keyed

__all__ = ["FOREVER_US", "History"]

FOREVER_US = 253_402_214_400_000_000
"""9999-12-31 in microseconds since 1970: the end of a version that is still valid."""


@dataclass(frozen=True)
class History(_Keyed):
    """Keeps the versions of each key's row; emits the versions that were opened, closed or replaced."""

    time_column: str  # the stream's column with the time of a change
    hash_column: str  # the stream's column with the hash of the compared columns
    attributes: tuple[tuple[str, str], ...]  # (stream column, relation column)
    valid_from: str
    valid_to: str
    stored_hash: str
    schema: pa.Schema  # of the relation

    def columns_read(self) -> list[str] | None:
        """All: closing a version writes the whole row again."""
        return None

    def apply(
        self, batch: pa.RecordBatch, kept: KeptRows, memo: Memo, metrics: OperatorMetrics
    ) -> pa.RecordBatch | None:
        """Return the versions that this batch adds or changes. Rows with a NULL key or time are only counted."""
        times = batch.column(self.time_column)
        if times.null_count:
            metrics.stream_tuples_in += times.null_count
            metrics.null_key_tuples += times.null_count
            metrics.unmatched_tuples += times.null_count
            batch = batch.filter(times.is_valid())
        runs = self._runs(batch, metrics)
        metrics.unmatched_tuples += batch.num_rows - runs.rows.size
        metrics.matched_tuples += runs.rows.size
        queries, stored = kept.find(runs.codes, runs.keys)
        versions = _Versions.of(self, batch, runs, queries, stored)
        changed = np.flatnonzero(versions.is_changed)
        is_touched = np.zeros(runs.codes.size, np.bool_)
        is_touched[versions.run[changed]] = True
        touched = versions.take(np.flatnonzero(is_touched[versions.run]))
        kept.put(runs.codes[touched.run], self._rows(touched, batch, runs, stored))
        metrics.output_rows += changed.size
        if not changed.size:
            return None
        emitted = self._rows(versions.take(changed), batch, runs, stored)
        return emitted.select([name for name in self.schema.names if name != self.stored_hash])

    def _rows(self, versions: "_Versions", batch: pa.RecordBatch, runs: Runs, stored: pa.RecordBatch) -> pa.RecordBatch:
        """Convert versions to rows of the relation."""
        columns = self._key_columns(runs, versions.run)
        from_batch = pa.array(runs.rows)
        for ours, theirs in self.attributes:
            kind = self.schema.field(theirs).type
            both = [stored.column(theirs).cast(kind), batch.column(ours).take(from_batch).cast(kind)]
            columns[theirs] = pa.concat_arrays(both).take(pa.array(versions.origin))
        moment = self.schema.field(self.valid_from).type
        columns[self.valid_from] = pa.array(versions.begin).cast(moment)
        columns[self.valid_to] = pa.array(versions.end).cast(moment)
        columns[self.stored_hash] = pa.array(versions.hash)
        return pa.RecordBatch.from_arrays(
            [columns[name].cast(self.schema.field(name).type) for name in self.schema.names], schema=self.schema
        )


@dataclass(frozen=True)
class _Versions:
    """The versions of the keys of a batch, sorted by key and time."""

    run: Int64Array  # the number of the key's run
    begin: Int64Array
    end: Int64Array
    hash: Int64Array
    origin: Int64Array  # the row of its attributes: first the stored rows, then the keyed rows of the batch
    is_changed: np.ndarray  # whether it is new, or its interval or content changed

    def take(self, chosen: Int64Array) -> "_Versions":
        parts = (self.run, self.begin, self.end, self.hash, self.origin, self.is_changed)
        return _Versions(*(part[chosen] for part in parts))

    @classmethod
    def of(
        cls, history: History, batch: pa.RecordBatch, runs: Runs, queries: Int64Array, stored: pa.RecordBatch
    ) -> "_Versions":
        """Insert the changes of a batch into the existing versions."""
        run = np.concatenate([queries, runs.run_of])
        begin = np.concatenate(
            [_micros(stored.column(history.valid_from)), _micros(batch.column(history.time_column))[runs.rows]]
        )
        hashes = np.concatenate(
            [stored.column(history.stored_hash).to_numpy(), _integers(batch.column(history.hash_column))[runs.rows]]
        )
        old_end = np.concatenate([_micros(stored.column(history.valid_to)), np.full(runs.rows.size, -1, np.int64)])
        is_stored = np.arange(run.size) < queries.size
        # Stored versions come before changes of the same time; changes of the same time stay in batch order.
        order = np.lexsort((~is_stored, begin, run))
        run, begin, hashes, old_end = run[order], begin[order], hashes[order], old_end[order]
        is_stored = is_stored[order]
        is_first = np.ones(run.size, np.bool_)
        is_first[1:] = (run[1:] != run[:-1]) | (begin[1:] != begin[:-1])
        firsts = np.flatnonzero(is_first)
        lasts = np.append(firsts[1:], run.size) - 1
        was_there = is_stored[firsts]
        value = hashes[lasts]
        is_same_key = np.zeros(firsts.size, np.bool_)
        is_same_key[1:] = run[firsts][1:] == run[firsts][:-1]
        says_nothing_new = is_same_key & ~was_there
        says_nothing_new[1:] &= value[1:] == value[:-1]
        left = np.flatnonzero(~says_nothing_new)
        firsts, lasts, was_there, value = firsts[left], lasts[left], was_there[left], value[left]
        key, begins = run[firsts], begin[firsts]
        end = np.full(key.size, FOREVER_US, np.int64)
        has_next = np.zeros(key.size, np.bool_)
        has_next[:-1] = key[1:] == key[:-1]
        end[has_next] = begins[1:][has_next[:-1]]
        is_changed = ~was_there | (end != old_end[firsts]) | (value != hashes[firsts])
        return cls(key, begins, end, value, order[lasts], is_changed)


def _micros(column: pa.Array) -> Int64Array:
    return _integers(column.cast(pa.timestamp("us", tz=column.type.tz)))


def _integers(column: pa.Array) -> Int64Array:
    return np.asarray(column.cast(pa.int64()).to_numpy(zero_copy_only=False), np.int64)
