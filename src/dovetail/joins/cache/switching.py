"""Which join values go into the cache, and bringing them there (SSBJ, algorithm 1): candidates, decisions, buffer s_B.

A value is a *candidate* if many of its tuples wait. Over a cycle, all relation rows of the candidates are counted.
Then it is decided, once for all of them, which are worth their place; over another cycle the rows of those are
collected, and in the end they enter the cache together. So never part of a value is in the cache.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.errors import InternalError
from dovetail.kernels.value_table import MAX_COUNT, ValueTable
from dovetail.operators.cache import LASTING_ROWS_POOL, bytes_of_rows
from dovetail.operators.protocol import RelationBlock

__all__ = ["CANDIDATE_LOAD", "ENTRY_BYTES", "Candidates", "Decision", "SwitchingBuffer"]

Int64Array = npt.NDArray[np.int64]
ENTRY_BYTES = ValueTable.nbytes_of(1 << 20) / (1 << 20)
"""What a join value takes in the cache besides its rows."""
CANDIDATE_LOAD = 0.65  # every relation row is looked for, and few are there
_SMALL_BATCH_ROWS = 1024
_PADDED_BYTES = 1024  # what Arrow adds to the buffers of a few small batches


@dataclass(frozen=True)
class Decision:
    """Values that are to enter the cache, the most worthwhile first.

    Attributes
    ----------
    codes, row_counts
        The values, and how many rows each has.
    frequencies
        Their tuples per cycle, as far as known.
    nbytes
        What they will take in the cache.
    """

    codes: Int64Array
    row_counts: Int64Array
    frequencies: npt.NDArray[np.float64]
    nbytes: int

    def __len__(self) -> int:
        return int(self.codes.size)

    @property
    def held_bytes(self) -> int:
        """Bytes that the decision itself takes."""
        return self.codes.nbytes + self.row_counts.nbytes + self.frequencies.nbytes


class Candidates:
    """Join values whose relation rows are being counted.

    Parameters
    ----------
    codes, waiting
        The values, and how many of their tuples wait.
    scale
        What to multiply these numbers with to have tuples per cycle.

    Examples
    --------
    >>> candidates = Candidates(np.array([7, 8]), np.array([6, 1]), scale=1.0)
    >>> candidates.table.count_rows(np.array([7, 7, 9]))
    >>> decision = candidates.decide(np.array([6, 1]), 1.0, tuple_bytes=20, row_bytes=20, factor=1.0,
    ...                              max_rows=10, max_bytes=1000)
    >>> decision.codes.tolist(), decision.row_counts.tolist(), decision.frequencies.tolist()
    ([7], [2], [6.0])
    """

    def __init__(self, codes: Int64Array, waiting: Int64Array, scale: float) -> None:
        self.table = ValueTable(max(1, codes.size), CANDIDATE_LOAD)
        self.table.put(codes, rows=waiting)
        self._scale = scale

    def __len__(self) -> int:
        return len(self.table)

    def decide(
        self,
        waiting: Int64Array,
        scale: float,
        *,
        tuple_bytes: float,
        row_bytes: float,
        factor: float,
        max_rows: int,
        max_bytes: int,
    ) -> Decision:
        """Apply the cache inequality: a value is worth caching if its rows take less than its waiting tuples.

        Parameters
        ----------
        waiting, scale
            How many tuples of the values, in the order of ``table.items()``, wait now, and what to multiply with.
        tuple_bytes, row_bytes
            v_S and v_R.
        factor
            s_f: by how much the tuples must outweigh the rows.
        max_rows
            Values with more rows are left out.
        max_bytes
            The best values are taken until this is full.
        """
        codes, first_waiting, counts, _ = self.table.items()
        # Two looks, a cycle apart: one alone would favour values that happened to come often once.
        frequencies = (first_waiting * self._scale + waiting * scale) / 2
        cached_bytes = counts * row_bytes + ENTRY_BYTES
        worth = frequencies * tuple_bytes / (factor * cached_bytes)
        is_cacheable = (counts > 0) & (counts <= min(max_rows, MAX_COUNT - 1))
        best = np.flatnonzero((worth > 1.0) & is_cacheable)
        best = best[np.argsort(-worth[best], kind="stable")]
        total = np.cumsum(cached_bytes[best])
        best = best[: int(np.searchsorted(total, max_bytes, side="right"))]
        nbytes = int(np.ceil(total[best.size - 1])) if best.size else 0
        return Decision(codes[best], counts[best], frequencies[best], nbytes)

    def without_rows(
        self, waiting: Int64Array, scale: float, tuple_bytes: float, factor: float
    ) -> tuple[Int64Array, npt.NDArray[np.float64]]:
        """The values that have no row and are worth an entry that says so, and their tuples per cycle."""
        codes, first_waiting, counts, _ = self.table.items()
        frequencies = (first_waiting * self._scale + waiting * scale) / 2
        chosen = (counts == 0) & (frequencies * tuple_bytes > factor * ENTRY_BYTES)
        return codes[chosen], frequencies[chosen]


class SwitchingBuffer:
    """The buffer s_B: rows of values that are about to enter the cache, as the scan meets them.

    Examples
    --------
    >>> from dovetail.testing.shard import MemoryShard
    >>> shard = MemoryShard(pa.table({"v": ["a", "b", "c"]}), codes=[1, 2, 2])
    >>> buffer = SwitchingBuffer(Decision(np.array([2]), np.array([2]), np.array([9.0]), 100))
    >>> buffer.collect(shard.read_block(0, 3))
    >>> codes, pages = buffer.pages(1000)
    >>> codes.tolist(), pages[0].column("v").to_pylist()
    ([2, 2], ['b', 'c'])
    """

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self._table = ValueTable(max(1, len(decision)), CANDIDATE_LOAD)
        self._table.put(decision.codes, counts=decision.row_counts)
        self._batches: list[pa.RecordBatch] = []
        self._codes: list[Int64Array] = []
        self._sizes: list[int] = []

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        of_rows = self.rows_nbytes + sum(codes.nbytes for codes in self._codes)
        return of_rows + self._table.nbytes + self.decision.held_bytes

    @property
    def rows_nbytes(self) -> int:
        """Bytes of the rows alone, which the cache takes over."""
        return sum(self._sizes)

    @property
    def most_nbytes(self) -> int:
        """Bytes that will be held when everything is collected, if rows are as long as expected."""
        rows = int(self.decision.row_counts.sum())
        return self.decision.nbytes + self._table.nbytes + self.decision.held_bytes + 8 * rows + _PADDED_BYTES

    def collect(self, block: RelationBlock) -> None:
        """Copy the rows of the chosen values out of a block."""
        rows = np.flatnonzero(self._table.find(block.codes) >= 0)
        if rows.size == 0:
            return
        batch = block.rows.take(pa.array(rows))
        codes = block.codes[rows]
        # Arrow pads every buffer, so that many small batches would hold more than they say: like sizes are made one.
        while self._codes and self._codes[-1].size <= min(codes.size, _SMALL_BATCH_ROWS):
            batch = pa.concat_batches([self._batches.pop(), batch])
            codes = np.concatenate([self._codes.pop(), codes])
            self._sizes.pop()
        self._batches.append(batch)
        self._codes.append(codes)
        self._sizes.append(bytes_of_rows(batch))

    def pages(self, page_bytes: int) -> tuple[Int64Array, list[pa.RecordBatch]]:
        """Everything that was collected, rows of a value side by side and in one batch, and the rows' codes.

        Where the scan met each value's rows one after the other, batches are made one by one, and what was collected
        is let go as they are: so that about ``page_bytes`` are needed besides. Otherwise all is copied at once.
        """
        total = int(self.decision.row_counts.sum())
        collected = sum(codes.size for codes in self._codes)
        if collected != total:
            raise InternalError(f"Of {total} rows that were to enter the cache, a cycle met {collected}.")
        codes = np.concatenate(self._codes) if self._codes else np.empty(0, np.int64)
        runs = 1 + int(np.count_nonzero(codes[1:] != codes[:-1])) if codes.size else 0
        if runs > len(self.decision):
            order = np.argsort(codes, kind="stable")
            everything = pa.concat_batches(self._batches).take(pa.array(order))
            self._batches = []
            return codes[order], [everything]
        pages: list[pa.RecordBatch] = []
        parts: list[pa.RecordBatch] = []
        at = held = 0
        while self._batches:
            batch = self._batches.pop(0)
            parts.append(batch)
            at, held = at + batch.num_rows, held + bytes_of_rows(batch)
            is_boundary = at == codes.size or codes[at] != codes[at - 1]
            if (held >= page_bytes and is_boundary) or not self._batches:
                pages.append(pa.concat_batches(parts, memory_pool=LASTING_ROWS_POOL))
                parts, held = [], 0
        return codes, pages

    def is_contiguous(self) -> bool:
        """Whether `pages` can go batch by batch."""
        codes = np.concatenate(self._codes) if self._codes else np.empty(0, np.int64)
        return codes.size == 0 or 1 + int(np.count_nonzero(codes[1:] != codes[:-1])) <= len(self.decision)
