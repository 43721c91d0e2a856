"""Where looked-up rows come from: the relation's index alone, or a cache in front of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.core.errors import InternalError
from dovetail.joins.protocol import RelationShard
from dovetail.joins.state import JoinState
from dovetail.relation.widths import fixed_row_bytes, row_widths, widest_row

__all__ = ["CachedRows", "Found", "HeldRows", "IndexedRows", "RowCache", "RowSource"]


HELD_PIECE_BYTES = 4 << 20
"""How much is joined at a time of rows that are held."""


@dataclass(frozen=True)
class Found:
    """Rows of some codes: pairs (index of the code, position), contiguous per code."""

    queries: Int64Array
    positions: Int64Array
    is_cached: BoolArray | None = None  # which codes are in the cache, with or without rows; None: no cache


class RowSource(Protocol):
    """Finds and reads the rows of many codes at once. Positions are specific to this source."""

    schema: pa.Schema

    def find(self, codes: Int64Array) -> Found:
        """All rows of distinct, ascending codes."""

    def count(self, codes: Int64Array) -> Int64Array:
        """The number of rows per code."""

    def widths(self, positions: Int64Array) -> Int64Array | int:
        """Bytes of the rows at ascending positions, or one number if all rows are equally wide."""

    def widest_at(self, positions: Int64Array) -> int:
        """Upper bound of the bytes of a row at ascending positions."""

    def gather(self, positions: Int64Array) -> pa.RecordBatch:
        """The rows at ascending positions."""

    def sweep(self, positions: Int64Array) -> Iterator[pa.RecordBatch]:
        """The same in pieces, read in one pass where that is cheaper."""


class IndexedRows:
    """The rows of a relation, through its index."""

    def __init__(self, state: JoinState) -> None:
        self._state, self.schema = state, state.spec.shard.schema

    @property
    def shard(self) -> RelationShard:
        """The relation's shard, borrowed by the join."""
        return self._state.spec.shard

    def find(self, codes: Int64Array) -> Found:
        return Found(*self.shard.lookup(codes, in_order=False))

    def count(self, codes: Int64Array) -> Int64Array:
        return self.shard.count(codes)

    def widths(self, positions: Int64Array) -> Int64Array | int:
        return self.shard.widths(positions)

    def widest_at(self, positions: Int64Array) -> int:
        return self.shard.widest_at(positions)

    def gather(self, positions: Int64Array) -> pa.RecordBatch:
        return joined([batch for _, batch in self.shard.gather_ascending(positions)], self.schema)

    def sweep(self, positions: Int64Array) -> Iterator[pa.RecordBatch]:
        for _, batch in self.shard.gather_ascending(positions, in_pass=True):
            yield batch


class RowCache(Protocol):
    """Rows of some join values, closer than the relation: in this process, or in a file shared by workers."""

    @property
    def row_limit(self) -> int:
        """One more than the highest row number."""

    @property
    def widest(self) -> int:
        """Upper bound of the bytes of a row."""

    def find_rows(self, codes: Int64Array) -> tuple[BoolArray, Int64Array, Int64Array]:
        """Whether each code is known, and the first row and number of rows of the known ones."""

    def rows_at(self, rows: Int64Array) -> pa.RecordBatch:
        """The rows with these ascending numbers."""

    def row_widths(self, rows: Int64Array) -> Int64Array | int:
        """Bytes of the rows with these ascending numbers, or one number if all rows are equally wide."""


class CachedRows:
    """The rows of a relation with a cache in front; positions of the cache come first."""

    def __init__(self, cache: RowCache, state: JoinState) -> None:
        self._cache, self._index, self.schema = cache, IndexedRows(state), state.spec.shard.schema

    def find(self, codes: Int64Array) -> Found:
        is_known, firsts, counts = self._cache.find_rows(codes)
        if not is_known.any():
            missed = self._index.find(codes)
            return Found(missed.queries, missed.positions + self._cache.row_limit, is_known)
        hits, misses = np.flatnonzero(is_known), np.flatnonzero(~is_known)
        counts = counts[hits]
        queries = np.repeat(hits, counts)
        ends = np.cumsum(counts)
        positions = np.repeat(firsts[hits] - (ends - counts), counts) + np.arange(queries.size)
        if misses.size:
            missed = self._index.find(codes[misses])
            queries = np.concatenate([queries, misses[missed.queries]])
            positions = np.concatenate([positions, missed.positions + self._cache.row_limit])
        return Found(queries, positions, is_known)

    def count(self, codes: Int64Array) -> Int64Array:
        is_known, _, counts = self._cache.find_rows(codes)
        misses = np.flatnonzero(~is_known)
        counts = np.where(is_known, counts, 0)
        counts[misses] = self._index.count(codes[misses])
        return counts

    def widths(self, positions: Int64Array) -> Int64Array | int:
        split = int(np.searchsorted(positions, self._cache.row_limit))
        behind = self._index.widths(positions[split:] - self._cache.row_limit)
        if isinstance(behind, int):
            return behind
        return np.concatenate([np.asarray(self._cache.row_widths(positions[:split])), behind])

    def widest_at(self, positions: Int64Array) -> int:
        split = int(np.searchsorted(positions, self._cache.row_limit))
        behind = self._index.widest_at(positions[split:] - self._cache.row_limit) if split < positions.size else 0
        return max(behind, self._cache.widest if split else 0)

    def gather(self, positions: Int64Array) -> pa.RecordBatch:
        split = int(np.searchsorted(positions, self._cache.row_limit))
        parts = [self._cache.rows_at(positions[:split])] if split else []
        if split < positions.size:
            parts.append(self._index.gather(positions[split:] - self._cache.row_limit))
        return joined(parts, self.schema)

    def sweep(self, positions: Int64Array) -> Iterator[pa.RecordBatch]:
        split = int(np.searchsorted(positions, self._cache.row_limit))
        if split:
            yield self._cache.rows_at(positions[:split])
        yield from self._index.sweep(positions[split:] - self._cache.row_limit)


class HeldRows:
    """Rows that were read together and are held in memory, by their positions in the source that they came from.

    They lie in a few large batches: pieces are joined as they come, so that little is held twice.
    """

    def __init__(self, source: RowSource, positions: Int64Array) -> None:
        self.schema = source.schema
        self._positions = positions
        self._batches: list[pa.RecordBatch] = []
        pieces: list[pa.RecordBatch] = []
        pieces_bytes = 0
        for piece in source.sweep(positions):
            pieces.append(piece)
            pieces_bytes += int(piece.nbytes)
            if pieces_bytes >= HELD_PIECE_BYTES:
                self._batches.append(joined(pieces, self.schema))
                pieces, pieces_bytes = [], 0
        if pieces:
            self._batches.append(joined(pieces, self.schema))
        self._starts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        if int(self._starts[-1]) != positions.size:
            raise InternalError(f"{positions.size} rows were asked for, {self._starts[-1]} came.")

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(int(batch.nbytes) for batch in self._batches) + self._positions.nbytes

    def find(self, codes: Int64Array) -> Found:
        raise InternalError("rows that are held are found by position, not by code.")

    def count(self, codes: Int64Array) -> Int64Array:
        raise InternalError("rows that are held are counted where they came from.")

    def widths(self, positions: Int64Array) -> Int64Array | int:
        fixed = fixed_row_bytes(self.schema)
        if fixed is not None:
            return fixed
        parts = [row_widths(batch, places) for batch, places in self._parts(positions)]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def widest_at(self, positions: Int64Array) -> int:
        return max((widest_row(batch) for batch in self._batches), default=0)

    def gather(self, positions: Int64Array) -> pa.RecordBatch:
        return joined(list(self.sweep(positions)), self.schema)

    def sweep(self, positions: Int64Array) -> Iterator[pa.RecordBatch]:
        for batch, places in self._parts(positions):
            yield pc.take(batch, pa.array(places), boundscheck=False)

    def _parts(self, positions: Int64Array) -> Iterator[tuple[pa.RecordBatch, Int64Array]]:
        """The places of ascending positions in each batch."""
        places = np.searchsorted(self._positions, positions)
        bounds = np.searchsorted(places, self._starts)
        for number, batch in enumerate(self._batches):
            low, high = int(bounds[number]), int(bounds[number + 1])
            if low < high:
                yield batch, places[low:high] - self._starts[number]


def joined(pieces: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    if len(pieces) == 1:
        return pieces[0]
    return pa.concat_batches(pieces) if pieces else pa.RecordBatch.from_pylist([], schema=schema)
