"""Finds the waiting tuples that a block of the relation may match, in pieces of bounded size.

A matcher returns candidate pairs (row of the block, position in the window), usually by equal codes. For a range
without equality the window is searched in the order of the range's column; for any other condition every tuple is a
candidate for every row.
"""

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.joins.conditions import Range, band_of
from dovetail.joins.protocol import RelationBlock
from dovetail.joins.spec import JoinSpec
from dovetail.joins.window.stream_window import StreamWindow
from dovetail.joins.window.tuple_store import Positions
from dovetail.kernels.multimap import ProbeState
from dovetail.kernels.sorted_codes import expand_ranges

__all__ = ["Matcher", "expand_in_pieces", "matcher_for"]

Pairs = Iterator[tuple[Positions, Positions]]


class Matcher(Protocol):
    """Returns candidate pairs. `bytes_per_tuple` is the most it holds, or needs for a moment, per waiting tuple."""

    bytes_per_tuple: int

    @property
    def nbytes(self) -> int: ...

    def pairs(self, block: RelationBlock, window: StreamWindow, max_pairs: int) -> Pairs:
        """Pieces of at most ``max_pairs`` (rows of the block, positions in the window); every pair is in one piece.

        The pairs and their order depend on the block and the window only, not on ``max_pairs``.
        """


def matcher_for(spec: JoinSpec) -> Matcher:
    """The matcher for a join's condition."""
    if spec.has_equality:
        is_any_row_enough = spec.how in ("semi", "anti") and not (spec.must_recheck_keys or spec.condition)
        return _EqualCodes(is_any_row_enough)
    band = band_of(spec.condition)
    if band is not None and _is_sortable(spec, band):
        return _OrderedRange(band, spec.stream_columns.get_field_index(band.stream_column))
    return _AllPairs()


class _EqualCodes:
    """Pairs of equal codes, by one probe of the window's hash table with the block's codes."""

    bytes_per_tuple = 0
    nbytes = 0

    def __init__(self, is_any_row_enough: bool) -> None:
        self._is_any_row_enough = is_any_row_enough

    def pairs(self, block: RelationBlock, window: StreamWindow, max_pairs: int) -> Pairs:
        codes, rows_of_codes = block.codes, None
        if self._is_any_row_enough and codes.size > 1:
            # The relation is sorted by code, so this leaves one row per value for most join values.
            is_first = np.concatenate([[True], codes[1:] != codes[:-1]])
            if not is_first.all():
                rows_of_codes = np.flatnonzero(is_first)
                codes = codes[rows_of_codes]
        state: ProbeState | None = None
        while True:
            rows, positions, state = window.probe(codes, state, max_pairs)
            if rows.size:
                yield (rows if rows_of_codes is None else rows_of_codes[rows]), positions
            if state is None:
                return


class _OrderedRange:
    """Pairs in which the stream's value can lie between the row's bounds, by binary search in the ordered window.

    The order is kept from step to step: new tuples are merged in, tuples that left are removed. Bounds are treated as
    inclusive and as doubles, which preserve the order of rounded values; the condition is checked afterwards on every
    candidate.
    """

    bytes_per_tuple = 2 * 2 * 8  # a value and a number, and both again while the order is updated

    def __init__(self, band: Range, column: int) -> None:
        self._band = band
        self._column = column
        self._values = np.empty(0, np.float64)
        self._seqs = np.empty(0, np.int64)
        self._last_seq = -1

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + self._seqs.nbytes

    def pairs(self, block: RelationBlock, window: StreamWindow, max_pairs: int) -> Pairs:
        self._renew(window)
        low, high = (_sortable(block.rows.column(name)) for name in (self._band.low, self._band.high))
        first = np.searchsorted(self._values, low[0], side="left")
        stop = np.searchsorted(self._values, high[0], side="right")
        counts = np.where(low[1] & high[1], np.maximum(stop - first, 0), 0)
        positions = window.index.positions_of(self._seqs)
        yield from expand_in_pieces(first.astype(np.int64), counts.astype(np.int64), positions, max_pairs)

    def _renew(self, window: StreamWindow) -> None:
        live = window.index.live_seqs()
        if live.size == 0:
            self._values, self._seqs = self._values[:0].copy(), self._seqs[:0].copy()
            return
        places = np.minimum(np.searchsorted(live, self._seqs), live.size - 1)
        still = live[places] == self._seqs
        if not still.all():
            self._values, self._seqs = self._values[still], self._seqs[still]
        arrived = live[live > self._last_seq]
        self._last_seq = int(live[-1])
        if arrived.size == 0:
            return
        values, valid = _sortable(window.gather(window.index.positions_of(arrived), [self._column])[0])
        values, arrived = values[valid], arrived[valid]
        order = np.argsort(values, kind="stable")
        places = np.searchsorted(self._values, values[order], side="right")
        self._values = np.insert(self._values, places, values[order])
        self._seqs = np.insert(self._seqs, places, arrived[order])


class _AllPairs:
    """Every waiting tuple with every row of the block."""

    bytes_per_tuple = 2 * 8
    nbytes = 0

    def pairs(self, block: RelationBlock, window: StreamWindow, max_pairs: int) -> Pairs:
        positions = window.live_positions()
        rows = block.rows.num_rows
        first = np.zeros(rows, np.int64)
        yield from expand_in_pieces(first, np.full(rows, positions.size, np.int64), positions, max_pairs)


def expand_in_pieces(first: Int64Array, counts: Int64Array, positions: Int64Array, max_pairs: int) -> Pairs:
    """Pairs (row, position) of each row's range of ``positions``, in pieces that may end inside a range."""
    row = 0
    first, counts = first.copy(), counts.copy()
    ends = np.cumsum(counts)
    done = 0
    while row < counts.size:
        stop = int(np.searchsorted(ends, done + max_pairs, side="right"))
        if stop > row:
            rows, taken = expand_ranges(first[row:stop], counts[row:stop].astype(np.int32))
            if rows.size:
                yield rows + row, positions[taken]
            done, row = int(ends[stop - 1]), stop
            continue
        # A single row has more candidates than a piece may hold.
        yield np.full(max_pairs, row, np.int64), positions[first[row] : first[row] + max_pairs]
        first[row] += max_pairs
        counts[row] -= max_pairs
        done += max_pairs


def _is_sortable(spec: JoinSpec, band: Range) -> bool:
    """Whether `_sortable` preserves the order between the three columns of a range."""
    ends = [spec.shard.schema.field(name).type for name in (band.low, band.high)]
    kinds = [spec.stream_schema.field(band.stream_column).type, *ends]
    t = pa.types
    if all(t.is_integer(kind) or t.is_float32(kind) or t.is_float64(kind) for kind in kinds):
        return True
    # Different units (days, microseconds) do not compare, so these must have one type.
    kinds = [_without_place(kind) for kind in kinds]
    return len(set(kinds)) == 1 and bool(t.is_temporal(kinds[0])) and kinds[0].bit_width in (32, 64)


def _without_place(kind: pa.DataType) -> pa.DataType:
    """A timestamp type without its time zone: values of all time zones count from the same moment."""
    return pa.timestamp(kind.unit, "UTC") if pa.types.is_timestamp(kind) and kind.tz is not None else kind


def _sortable(column: pa.Array) -> tuple[npt.NDArray[np.float64], BoolArray]:
    """A column as doubles in its own order, and which values are not NULL; NaN sorts last, as in Spark."""
    valid = np.asarray(column.is_valid().to_numpy(zero_copy_only=False), np.bool_)
    if pa.types.is_temporal(column.type):
        column = column.view(pa.int64() if column.type.bit_width == 64 else pa.int32())
    doubles = pc.cast(column, pa.float64(), safe=False).fill_null(0.0)
    return np.asarray(doubles.to_numpy(zero_copy_only=False), np.float64), valid
