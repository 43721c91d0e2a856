"""The transformations of a flow with a kept relation: one class each, a function on Arrow data.

A transformation receives a batch of one shard, sorted by code, key and any further order, and the shard's current rows.
It returns the rows to emit, and writes changes with `KeptRows.put`. It uses no clock and no random numbers: the same
batch and current rows give the same result.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.arrays import Int64Array
from dovetail.core.metrics import OperatorMetrics
from dovetail.warehouse.kept_rows import KeptRows
from dovetail.warehouse.runs import Runs, runs_of

__all__ = ["CHANGES", "Change", "ChangeDetection", "Deduplication", "SurrogateKeys", "Transformation"]

Memo = MutableMapping[str, Any]
"""State of a shard besides its rows; JSON-serializable."""

Change = Literal["inserted", "changed", "unchanged"]
CHANGES: tuple[Change, ...] = ("inserted", "changed", "unchanged")


class Transformation(Protocol):
    """Processes a batch. Picklable."""

    def begin(self, shard: int, shards: int, intent: Mapping[str, Any]) -> Memo:
        """Return the state of a shard before its first micro-batch."""

    def columns_read(self) -> list[str] | None:
        """The relation's columns to read of current rows; None: all."""

    def apply(
        self, batch: pa.RecordBatch, kept: KeptRows, memo: Memo, metrics: OperatorMetrics
    ) -> pa.RecordBatch | None:
        """Return the rows to emit, and put changes into ``kept``."""


@dataclass(frozen=True)
class _Keyed:
    """Base of all transformations."""

    key: tuple[tuple[str, str], ...]  # (stream column, relation column)
    is_hashed: bool  # whether codes are hashes of the key
    emitted: tuple[str, ...]  # the stream's columns to emit

    def begin(self, shard: int, shards: int, intent: Mapping[str, Any]) -> Memo:
        """No state besides rows."""
        return {}

    def columns_read(self) -> list[str] | None:
        """Only the key: it is enough to know whether a key exists."""
        return [theirs for _, theirs in self.key]

    def _runs(self, batch: pa.RecordBatch, metrics: OperatorMetrics) -> Runs:
        runs = runs_of(batch, [ours for ours, _ in self.key], self.is_hashed)
        metrics.stream_tuples_in += batch.num_rows
        metrics.null_key_tuples += batch.num_rows - runs.rows.size
        metrics.lookups += runs.codes.size
        return runs

    def _key_columns(self, runs: Runs, chosen: Int64Array) -> dict[str, pa.Array]:
        """The key columns of these runs, by the relation's names."""
        numbers = pa.array(chosen)
        return {theirs: column.take(numbers) for (_, theirs), column in zip(self.key, runs.keys, strict=True)}


@dataclass(frozen=True)
class SurrogateKeys(_Keyed):
    """Each key gets a permanent, unique number: ``counter * shards + shard``, so that shards need no coordination."""

    column: str  # the relation's column with the number

    def begin(self, shard: int, shards: int, intent: Mapping[str, Any]) -> Memo:
        """The first counter is above all numbers in the relation when the flow started."""
        return {"next": int(intent["first_counter"]), "shard": shard, "shards": shards}

    def columns_read(self) -> list[str] | None:
        """The key and its number."""
        return [*(theirs for _, theirs in self.key), self.column]

    def apply(
        self, batch: pa.RecordBatch, kept: KeptRows, memo: Memo, metrics: OperatorMetrics
    ) -> pa.RecordBatch | None:
        """Return the rows with their numbers. New keys get the next numbers. A key with a NULL has no number."""
        runs = self._runs(batch, metrics)
        queries, rows = kept.find(runs.codes, runs.keys)
        numbers = np.full(runs.codes.size, -1, np.int64)
        numbers[queries] = rows.column(self.column).to_numpy()
        is_new = np.ones(runs.codes.size, np.bool_)
        is_new[queries] = False
        new = np.flatnonzero(is_new)
        if new.size:
            counters = memo["next"] + np.arange(new.size, dtype=np.int64)
            numbers[new] = counters * memo["shards"] + memo["shard"]
            memo["next"] = int(memo["next"] + new.size)
            columns = {**self._key_columns(runs, new), self.column: pa.array(numbers[new])}
            kept.put(runs.codes[new], pa.RecordBatch.from_pydict(columns))
        of_row, is_null = np.zeros(batch.num_rows, np.int64), np.ones(batch.num_rows, np.bool_)
        of_row[runs.rows], is_null[runs.rows] = numbers[runs.run_of], False
        unseen = int(np.count_nonzero(is_new[runs.run_of])) if runs.rows.size else 0
        metrics.unmatched_tuples += unseen + batch.num_rows - runs.rows.size
        metrics.matched_tuples += runs.rows.size - unseen
        metrics.output_rows += batch.num_rows
        return batch.select(list(self.emitted)).append_column("__number", pa.array(of_row, mask=is_null))


@dataclass(frozen=True)
class Deduplication(_Keyed):
    """The first row of each key passes; every later one is a duplicate."""

    is_marking: bool  # emit duplicates too, with a mark

    def apply(
        self, batch: pa.RecordBatch, kept: KeptRows, memo: Memo, metrics: OperatorMetrics
    ) -> pa.RecordBatch | None:
        """Return the rows that are not duplicates, or all rows with a mark. Rows with a NULL in the key pass."""
        runs = self._runs(batch, metrics)
        queries, _ = kept.find(runs.codes, runs.keys)
        is_new = np.ones(runs.codes.size, np.bool_)
        is_new[queries] = False
        new = np.flatnonzero(is_new)
        if new.size:
            kept.put(runs.codes[new], pa.RecordBatch.from_pydict(self._key_columns(runs, new)))
        is_duplicate = np.zeros(batch.num_rows, np.bool_)
        is_duplicate[runs.rows] = True
        is_duplicate[runs.rows[runs.starts[new]]] = False
        duplicates = int(np.count_nonzero(is_duplicate))
        metrics.matched_tuples += duplicates
        metrics.unmatched_tuples += batch.num_rows - duplicates
        rows = batch.select(list(self.emitted))
        if self.is_marking:
            metrics.output_rows += batch.num_rows
            return rows.append_column("__duplicate", pa.array(is_duplicate))
        metrics.output_rows += batch.num_rows - duplicates
        return rows.filter(pa.array(~is_duplicate)) if duplicates else rows


@dataclass(frozen=True)
class ChangeDetection(_Keyed):
    """Classifies each row as inserted, changed or unchanged by its key and compared columns: type 1 history."""

    hash_column: str  # the stream's column with the hash of the compared columns
    stored_hash: str  # the relation's column with the hash
    stored: tuple[tuple[str, str], ...]  # (stream column, relation column) stored besides the key
    wanted: tuple[str, ...]  # the `CHANGES` to emit

    def columns_read(self) -> list[str] | None:
        """The key and the hash: a wide row is compared without reading it."""
        return [*(theirs for _, theirs in self.key), self.stored_hash]

    def apply(
        self, batch: pa.RecordBatch, kept: KeptRows, memo: Memo, metrics: OperatorMetrics
    ) -> pa.RecordBatch | None:
        """Return the rows with their change, and keep the last row of each key. A key with a NULL is always new."""
        runs = self._runs(batch, metrics)
        queries, rows = kept.find(runs.codes, runs.keys)
        hashes = batch.column(self.hash_column).to_numpy(zero_copy_only=False)[runs.rows]
        before = np.empty(hashes.size, np.int64)
        before[1:] = hashes[:-1]
        known = np.zeros(runs.codes.size, np.int64)
        known[queries] = rows.column(self.stored_hash).to_numpy()
        is_known = np.zeros(runs.codes.size, np.bool_)
        is_known[queries] = True
        before[runs.starts] = known
        change = np.where(hashes == before, 2, 1)
        change[runs.starts[~is_known]] = 0
        ends = runs.ends
        latest = hashes[ends]
        touched = np.flatnonzero(~is_known | (latest != known))
        if touched.size:
            last_rows = pa.array(runs.rows[ends[touched]])
            columns = self._key_columns(runs, touched)
            columns |= {theirs: batch.column(ours).take(last_rows) for ours, theirs in self.stored}
            kept.put(
                runs.codes[touched],
                pa.RecordBatch.from_pydict({**columns, self.stored_hash: pa.array(latest[touched])}),
            )
        of_row = np.zeros(batch.num_rows, np.int8)
        of_row[runs.rows] = change
        inserted = int(np.count_nonzero(of_row == 0))
        metrics.unmatched_tuples += inserted
        metrics.matched_tuples += batch.num_rows - inserted
        words = pa.array(CHANGES).take(pa.array(of_row))
        result = batch.select(list(self.emitted)).append_column("__change", words)
        if len(self.wanted) < len(CHANGES):
            result = result.filter(pc.is_in(words, pa.array(self.wanted)))
        metrics.output_rows += result.num_rows
        return result
