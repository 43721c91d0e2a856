"""Runs of rows with the same key. They are contiguous, because tasks receive rows sorted by code and key."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.relation.format import CODE_COLUMN
from dovetail.relation.keys import keys_equal

__all__ = ["Runs", "runs_of"]


@dataclass(frozen=True)
class Runs:
    """The keyed rows of a batch, grouped by key."""

    rows: Int64Array  # numbers of the rows whose key has no NULL
    starts: Int64Array  # index into `rows` of the start of each run
    run_of: Int64Array  # the run of each of `rows`
    codes: Int64Array  # per run
    keys: list[pa.Array]  # per run

    @property
    def ends(self) -> Int64Array:
        """Index into `rows` of the last row of each run."""
        return np.append(self.starts[1:], self.rows.size) - 1


def runs_of(batch: pa.RecordBatch, key: Sequence[str], is_hashed: bool) -> Runs:
    """Group the rows of a batch sorted by ``__code`` and key. If ``is_hashed``, equal codes may be different keys.

    >>> batch = pa.record_batch({"__code": pa.array([None, 4, 4, 7]), "k": pa.array([None, 4, 4, 7])})
    >>> runs = runs_of(batch, ["k"], False)
    >>> runs.rows.tolist(), runs.starts.tolist(), runs.run_of.tolist(), runs.codes.tolist()
    ([1, 2, 3], [0, 2], [0, 0, 1], [4, 7])
    """
    column = batch.column(CODE_COLUMN)
    codes = column.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    if column.null_count:
        rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
        codes = codes[rows]
    else:
        rows = np.arange(codes.size)
    is_start = np.ones(rows.size, np.bool_)
    is_start[1:] = codes[1:] != codes[:-1]
    if is_hashed and rows.size > 1:
        columns = [batch.column(name).take(pa.array(rows)) for name in key]
        before = [column.slice(0, rows.size - 1) for column in columns]
        is_start[1:] |= ~keys_equal(before, [column.slice(1) for column in columns])
    starts = np.flatnonzero(is_start)
    keys = [batch.column(name).take(pa.array(rows[starts])) for name in key]
    return Runs(rows, starts, np.cumsum(is_start) - 1, codes[starts], keys)
