"""Rows of a shard in runs: all rows of a key follow one another, because tasks get them sorted by code and key."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.relation.format import CODE_COLUMN
from dovetail.relation.keys import keys_equal

__all__ = ["Runs", "runs_of"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Runs:
    """The keyed rows of a batch, grouped by key.

    Attributes
    ----------
    rows
        Numbers of the rows whose key has no NULL, in order.
    starts
        Where, among `rows`, each run begins.
    run_of
        The number of the run of each of `rows`.
    codes, keys
        Code and key columns of each run.
    """

    rows: Int64Array
    starts: Int64Array
    run_of: Int64Array
    codes: Int64Array
    keys: list[pa.Array]

    @property
    def ends(self) -> Int64Array:
        """Where, among `rows`, the last row of each run is."""
        return np.append(self.starts[1:], self.rows.size) - 1


def runs_of(batch: pa.RecordBatch, key: Sequence[str], is_hashed: bool) -> Runs:
    """Group the rows of a batch that is sorted by code and key.

    Parameters
    ----------
    batch
        With a column ``__code``.
    key
        The names of the key columns in it.
    is_hashed
        Whether equal codes may stand for different keys.

    Examples
    --------
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
