"""Which join values enter the cache, and how (SSBJ, algorithm 1): candidates, decisions, buffer s_B.

A value with many waiting tuples is a *candidate*. Over one cycle all relation rows of the candidates are counted. Then
it is decided for all of them together which are worth caching; over another cycle their rows are collected, and at its
end they enter the cache together. So a value is never partly in the cache.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.core.errors import InternalError
from dovetail.joins.cache.relation_cache import LASTING_ROWS_POOL, bytes_of_rows
from dovetail.joins.protocol import RelationBlock
from dovetail.kernels.value_table import MAX_COUNT, ValueTable

__all__ = ["CANDIDATE_LOAD", "ENTRY_BYTES", "Candidates", "Decision", "SwitchingBuffer"]

ENTRY_BYTES = ValueTable.nbytes_of(1 << 20) / (1 << 20)
"""The size of a join value in the cache, without its rows."""
CANDIDATE_LOAD = 0.65  # every relation row is probed, and few are found
_SMALL_BATCH_ROWS = 1024
_PADDED_BYTES = 1024  # padding of the buffers of a few small batches


@dataclass(frozen=True)
class Decision:
    """Values that are to enter the cache, the most valuable first."""

    codes: Int64Array
    row_counts: Int64Array  # per value
    frequencies: npt.NDArray[np.float64]  # tuples per cycle, as far as known
    nbytes: int  # their size in the cache

    def __len__(self) -> int:
        return int(self.codes.size)

    @property
    def held_bytes(self) -> int:
        """Bytes of the decision itself."""
        return self.codes.nbytes + self.row_counts.nbytes + self.frequencies.nbytes


class Candidates:
    """Join values whose relation rows are being counted; `waiting` tuples times `scale` are tuples per cycle."""

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

        `waiting` tuples, in the order of ``table.items()``, times `scale` are tuples per cycle; `tuple_bytes` and
        `row_bytes` are v_S and v_R, `factor` is s_f. Values with more than `max_rows` are left out; the best ones are
        taken up to `max_bytes`.
        """
        codes, first_waiting, counts, _ = self.table.items()
        # Two counts, a cycle apart: one alone would favour values that were frequent by chance.
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
        """The values without rows that are worth a negative entry, and their tuples per cycle."""
        codes, first_waiting, counts, _ = self.table.items()
        frequencies = (first_waiting * self._scale + waiting * scale) / 2
        chosen = (counts == 0) & (frequencies * tuple_bytes > factor * ENTRY_BYTES)
        return codes[chosen], frequencies[chosen]


class SwitchingBuffer:
    """The buffer s_B: rows of values that are about to enter the cache, collected by the scan."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self._table = ValueTable(max(1, len(decision)), CANDIDATE_LOAD)
        self._table.put(decision.codes, counts=decision.row_counts)
        self._batches: list[pa.RecordBatch] = []
        self._codes: list[Int64Array] = []
        self._sizes: list[int] = []

    @property
    def nbytes(self) -> int:
        of_rows = self.rows_nbytes + sum(codes.nbytes for codes in self._codes)
        return of_rows + self._table.nbytes + self.decision.held_bytes

    @property
    def rows_nbytes(self) -> int:
        """Bytes of the rows alone, which the cache takes over."""
        return sum(self._sizes)

    @property
    def most_nbytes(self) -> int:
        """The size when everything is collected, if rows are as long as expected."""
        rows = int(self.decision.row_counts.sum())
        return self.decision.nbytes + self._table.nbytes + self.decision.held_bytes + 8 * rows + _PADDED_BYTES

    def collect(self, block: RelationBlock) -> None:
        """Copy the rows of the chosen values out of a block."""
        rows = np.flatnonzero(self._table.find(block.codes) >= 0)
        if rows.size == 0:
            return
        batch = block.rows.take(pa.array(rows))
        codes = block.codes[rows]
        # Arrow pads every buffer, so many small batches take more than they report: batches of similar size are merged.
        while self._codes and self._codes[-1].size <= min(codes.size, _SMALL_BATCH_ROWS):
            batch = pa.concat_batches([self._batches.pop(), batch])
            codes = np.concatenate([self._codes.pop(), codes])
            self._sizes.pop()
        self._batches.append(batch)
        self._codes.append(codes)
        self._sizes.append(bytes_of_rows(batch))

    def pages(self, page_bytes: int) -> tuple[Int64Array, list[pa.RecordBatch]]:
        """All collected rows, those of a value contiguous and in one batch, and their codes.

        If the scan met each value's rows contiguously, batches are built one by one and the collected rows are freed
        meanwhile, so only about ``page_bytes`` of additional memory are needed. Otherwise everything is copied at once.
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
        """Whether `pages` can work batch by batch."""
        codes = np.concatenate(self._codes) if self._codes else np.empty(0, np.int64)
        return codes.size == 0 or 1 + int(np.count_nonzero(codes[1:] != codes[:-1])) <= len(self.decision)
