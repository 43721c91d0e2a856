"""Immutable chunks of an input's tuples, each with its own hash index.

A chunk is a record batch in hash order (see `dovetail.kernels.bucket_index`), with codes, arrival stamps and event
times beside it. As a table it has, before the input's columns, one ``__code`` column per join attribute, ``__arrival``,
and ``__low`` and ``__high`` if there is a window; its index is a second, smaller table. Both can be written as Arrow
IPC files and mapped in constant time.

With a window, rows with the same code are in the order of their earliest time (`is_timed`), so that a probe finds those
within its bounds by a binary search. Chunks stored before that was so are expanded and filtered instead.

Only one bit per row changes, and is kept apart: whether a row of a preserved input is *done*, that is, has matched or
was emitted as unmatched.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int32Array, Int64Array, UInt8Array
from dovetail.kernels.bucket_index import (
    bucket_count_of,
    expand_piece,
    find_in_buckets,
    order_by_bucket,
    start_buckets,
)
from dovetail.kernels.time_index import EVERY_PLACE, narrow_to_times, sort_runs_by_time

__all__ = ["IN_MEMORY", "Chunk", "OtherIndex", "Tuples", "get_bits", "make_bits", "set_bits"]

IN_MEMORY = 2**62
"""The departure stamp of tuples still in memory."""
_MOST_PAIRS = 65_536
DIRECT = 0
"""The departure stamp of tuples that were never in memory: before every arrival."""


class Tuples(NamedTuple):
    """Rows of one input with their stamps, in any order."""

    rows: pa.RecordBatch
    codes: tuple[Int64Array, ...]
    arrivals: Int64Array
    low: Int64Array | None
    high: Int64Array | None
    done: BoolArray | None

    def filter(self, keep: BoolArray) -> "Tuples":
        low = None if self.low is None else self.low[keep]
        high = low if self.high is self.low else None if self.high is None else self.high[keep]
        done = None if self.done is None else self.done[keep]
        rows = self.rows.filter(pa.array(keep))
        return Tuples(rows, tuple(codes[keep] for codes in self.codes), self.arrivals[keep], low, high, done)


class OtherIndex(NamedTuple):
    """The index of an attribute that does not determine the row order."""

    order: Int32Array
    codes: Int64Array
    starts: Int32Array


class Chunk:
    """Tuples in hash order of their first attribute, with an index for each attribute.

    `serial` is unique for the operator, across restarts; `departure` is the stamp at which the tuples left memory
    (`IN_MEMORY` if they have not); `level` counts merges.
    """

    __slots__ = (
        "arrivals", "codes", "departure", "done", "gone", "gone_count", "high", "is_timed", "level", "low",
        "max_arrival", "max_low", "min_low", "nbytes", "others", "rows", "saved_done", "saved_gone", "serial", "starts",
    )  # fmt: skip

    def __init__(
        self,
        serial: int,
        tuples: Tuples,
        starts: Int32Array,
        others: tuple[OtherIndex, ...],
        level: int = 0,
        departure: int = IN_MEMORY,
        extremes: Sequence[int] | None = None,
        is_timed: bool = False,
    ) -> None:
        self.serial = serial
        self.is_timed = is_timed
        self.rows = tuples.rows
        self.codes = tuples.codes
        self.arrivals = tuples.arrivals
        self.low, self.high = tuples.low, tuples.high
        self.done = None if tuples.done is None else make_bits(tuples.done)
        # Those of the done bits that are stored.
        self.saved_done = None if self.done is None else np.zeros_like(self.done)
        # Rows that were purged and are not copied out yet, one bit each; None for none. And which are stored.
        self.gone: UInt8Array | None = None
        self.saved_gone: UInt8Array | None = None
        self.gone_count = 0
        self.starts = starts
        self.others = others
        self.level = level
        self.departure = departure
        self.nbytes = self._count_bytes()
        # Passed in if known, so that attaching a mapped chunk reads none of its rows.
        self.max_arrival, self.min_low, self.max_low = self._find_extremes() if extremes is None else extremes

    @classmethod
    def build(cls, serial: int, tuples: Tuples, partitions: int, level: int = 0) -> "Chunk":
        """A chunk of tuples in any order."""
        order, starts = order_by_bucket(tuples.codes[0], bucket_count_of(len(tuples.arrivals), partitions))
        if tuples.low is not None:
            sort_runs_by_time(tuples.codes[0][order], tuples.low, order)
        places = pa.array(order)
        low = None if tuples.low is None else tuples.low[order]
        high = low if tuples.high is tuples.low else None if tuples.high is None else tuples.high[order]
        ordered = Tuples(
            # Column by column: only one column exists twice at a time.
            pa.RecordBatch.from_arrays([c.take(places) for c in tuples.rows.columns], schema=tuples.rows.schema),
            tuple(codes[order] for codes in tuples.codes),
            tuples.arrivals[order],
            low,
            high,
            None if tuples.done is None else tuples.done[order],
        )
        return cls.of_ordered(serial, ordered, partitions, level, starts=starts, is_timed=low is not None)

    @classmethod
    def of_ordered(
        cls,
        serial: int,
        tuples: Tuples,
        partitions: int,
        level: int = 0,
        departure: int = IN_MEMORY,
        starts: Int32Array | None = None,
        extremes: Sequence[int] | None = None,
        is_timed: bool = False,
    ) -> "Chunk":
        """A chunk of tuples already in hash order; `is_timed` if those of a code are in the order of their times."""
        count = bucket_count_of(len(tuples.arrivals), partitions)
        if starts is None:
            starts = start_buckets(tuples.codes[0], count)
        others = []
        for codes in tuples.codes[1:]:
            order, other_starts = order_by_bucket(codes, count)
            if tuples.low is not None:
                sort_runs_by_time(codes[order], tuples.low, order)
            others.append(OtherIndex(order, codes[order], other_starts))
        return cls(serial, tuples, starts, tuple(others), level, departure, extremes, is_timed)

    def __len__(self) -> int:
        return len(self.arrivals)

    @property
    def tuples(self) -> Tuples:
        """The contents without the index, with the current done bits."""
        done = None if self.done is None else get_bits(self.done, None, len(self))
        return Tuples(self.rows, self.codes, self.arrivals, self.low, self.high, done)

    def mark_gone(self, rows: BoolArray) -> None:
        """Purge rows without copying the others; nothing finds them any more. None of them may be gone already."""
        if self.gone is None or self.saved_gone is None:
            self.gone = make_bits(np.zeros(len(self), np.bool_))
            self.saved_gone = np.zeros_like(self.gone)
            self.nbytes += 2 * self.gone.nbytes
        self.gone |= make_bits(rows)
        self.gone_count += int(np.count_nonzero(rows))

    def is_gone(self, rows: npt.NDArray[np.signedinteger] | None = None) -> BoolArray:
        """Which of some rows, or of all, were purged."""
        if self.gone is None:
            return np.zeros(len(self) if rows is None else len(rows), np.bool_)
        return get_bits(self.gone, rows, len(self))

    def count(self, queries: Int64Array) -> Int32Array:
        """How many rows have each code of the first attribute, without those that were purged."""
        first, count, total = self.find(0, queries)
        state = (0, 0, total if self.gone_count else 0)
        while state[2]:
            rows, places, state = expand_piece(first, count, state, _MOST_PAIRS)
            count -= np.bincount(rows[self.is_gone(places)], minlength=len(count)).astype(np.int32)
        return count

    def rows_of(self, queries: Int64Array) -> Int32Array:
        """The rows with one of these codes of the first attribute, in ascending order, without purged ones."""
        first, count, total = self.find(0, queries)
        if total == 0:
            return np.zeros(0, np.int32)
        _, places, _ = expand_piece(first, count, (0, 0, total), total)
        rows = np.unique(places)
        return rows[~self.is_gone(rows)] if self.gone_count else rows

    def find(self, place: int, queries: Int64Array) -> tuple[Int32Array, Int32Array, int]:
        """For each query, the range of places whose code of the input's attribute number `place` is equal."""
        if place == 0:
            return find_in_buckets(self.starts, self.codes[0], queries)
        other = self.others[place - 1]
        return find_in_buckets(other.starts, other.codes, queries)

    def find_within(
        self, place: int, queries: Int64Array, earliest: Int64Array, latest: Int64Array
    ) -> tuple[Int32Array, Int32Array, int]:
        """Like `find`, without places whose earliest time is outside each query's bounds, if there is a time index."""
        first, count, found = self.find(place, queries)
        if found == 0 or self.low is None or not self.has_time_index(place):
            return first, count, found
        order = EVERY_PLACE if place == 0 else self.others[place - 1].order
        return first, count, narrow_to_times(first, count, self.low, order, earliest, latest)

    def has_time_index(self, place: int) -> bool:
        """Whether places with the same code of the input's attribute number `place` are in the order of their times."""
        return self.low is not None and (self.is_timed or place > 0)

    def rows_at(self, place: int, places: Int32Array) -> Int32Array:
        """The rows at places returned by `find`."""
        return places if place == 0 else self.others[place - 1].order[places]

    def partition_offsets(self, partitions: int) -> Int32Array:
        """The first row of each hash partition, plus the end."""
        return self.starts[:: (len(self.starts) - 1) // partitions]

    def expired_rows(self, horizon: int) -> BoolArray | None:
        """Which rows lie wholly before the horizon; None if none do."""
        if self.low is None or self.min_low >= horizon:
            return None
        return np.less(self.low, horizon)

    def index_table(self) -> pa.Table:
        """The index by the first attribute, for storage."""
        return pa.table({"starts": self.starts})

    @property
    def extremes(self) -> tuple[int, int, int]:
        """The last arrival, and the minimum and maximum of the tuples' earliest times."""
        return self.max_arrival, self.min_low, self.max_low

    def _find_extremes(self) -> tuple[int, int, int]:
        latest = int(self.arrivals.max(initial=-1))
        if self.low is None:
            return latest, 0, 0
        return latest, int(self.low.min(initial=IN_MEMORY)), int(self.low.max(initial=-IN_MEMORY))

    def _count_bytes(self) -> int:
        arrays: list[npt.NDArray[Any]] = [*self.codes, self.arrivals, self.starts]
        for other in self.others:
            arrays += [other.order, other.codes, other.starts]
        if self.low is not None:
            arrays.append(self.low)
        if self.high is not None and self.high is not self.low:
            arrays.append(self.high)
        if self.done is not None:
            arrays += [self.done, self.done]  # and which of them are stored
        # Whole buffers: nbytes ignores what a builder has over-allocated.
        return int(self.rows.get_total_buffer_size()) + sum(array.nbytes for array in arrays)


def merged(serial: int, chunks: Sequence[Chunk], keep: Sequence[BoolArray | None], partitions: int) -> Chunk:
    """One chunk of the kept rows of several."""
    parts = [c.tuples if mask is None else c.tuples.filter(mask) for c, mask in zip(chunks, keep, strict=True)]
    parts = [part for part in parts if len(part.arrivals)] or parts[:1]
    level = max(chunk.level for chunk in chunks) + 1
    if len(parts) == 1:
        is_timed = all(chunk.is_timed for chunk in chunks)
        return Chunk.of_ordered(serial, parts[0], partitions, level, is_timed=is_timed)
    return Chunk.build(serial, concatenated(parts), partitions, level)


def concatenated(parts: Sequence[Tuples]) -> Tuples:
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    low = None if first.low is None else np.concatenate([p.low for p in parts if p.low is not None])
    high = low
    if first.high is not first.low:
        high = np.concatenate([p.high for p in parts if p.high is not None])
    return Tuples(
        pa.concat_batches([part.rows for part in parts]),
        tuple(np.concatenate([part.codes[k] for part in parts]) for k in range(len(first.codes))),
        np.concatenate([part.arrivals for part in parts]),
        low,
        high,
        None if first.done is None else np.concatenate([p.done for p in parts if p.done is not None]),
    )


# ---------------------------------------------------------------- done bits


def make_bits(flags: BoolArray) -> UInt8Array:
    """Pack flags into bits, eight per byte.

    Examples
    --------
    >>> make_bits(np.array([True, False, True])).tolist()
    [5]
    """
    return np.packbits(flags, bitorder="little")


def get_bits(bits: UInt8Array, rows: npt.NDArray[np.signedinteger] | None, count: int = 0) -> BoolArray:
    """The flags of some rows, or of the first `count`.

    Examples
    --------
    >>> get_bits(np.array([5], np.uint8), np.array([2, 1])).tolist()
    [True, False]
    """
    if rows is None:
        return np.unpackbits(bits, count=count, bitorder="little").astype(np.bool_)
    flags: BoolArray = np.bitwise_and(bits[rows >> 3] >> (rows & 7).astype(np.uint8), np.uint8(1)).astype(np.bool_)
    return flags


def set_bits(bits: UInt8Array, rows: npt.NDArray[np.signedinteger]) -> None:
    """Set the flags of these rows in place; rows may repeat.

    Examples
    --------
    >>> bits = np.zeros(1, np.uint8)
    >>> set_bits(bits, np.array([0, 2, 2]))
    >>> bits.tolist()
    [5]
    """
    np.bitwise_or.at(bits, rows >> 3, np.uint8(1) << (rows & 7).astype(np.uint8))
