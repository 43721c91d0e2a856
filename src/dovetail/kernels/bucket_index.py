"""A hash index over rows sorted by hash: it stores only where each bucket starts, no slots.

The rows of an immutable chunk are sorted by the hash of their code. A bucket is a range of the hash. Therefore any
power of two up to the number of buckets also divides the rows into that many slices: the rows of one hash partition
are contiguous, and any slice is still sorted, for any number of buckets. The index is one int32 per bucket in addition
to the codes. It is written and mapped like any other column and needs no work to attach.
"""

from typing import Any

import numpy as np
from numba import njit

from dovetail.core.arrays import Int32Array, Int64Array
from dovetail.kernels._arrays import as_codes
from dovetail.kernels._vector import prefetch
from dovetail.kernels.hashing import home_slot, mix64

__all__ = [
    "bucket_count_of", "expand_piece", "find_in_buckets", "order_by_bucket", "partitions_of", "start_buckets",
    "stretch_of_partition",
]  # fmt: skip

_BLOCK = 128
_SHORT = 12  # below this many codes a linear search beats a binary search
MAX_ROWS = 2**31 - 1


def bucket_count_of(rows: int, partitions: int) -> int:
    """A power of two: about one row per bucket, and at least one bucket per partition."""
    return max(partitions, 1 << max(0, rows - 1).bit_length())


@njit(cache=True, inline="always")
def _is_before(left: Any, right: Any) -> Any:
    left_hash, right_hash = mix64(left), mix64(right)
    return left_hash < right_hash or (left_hash == right_hash and left < right)


@njit(cache=True)
def _count_buckets(codes: Any, starts: Any) -> None:
    buckets = starts.size - 1
    starts[:] = 0
    for i in range(codes.size):
        starts[home_slot(codes[i], buckets) + 1] += 1
    for bucket in range(buckets):
        starts[bucket + 1] += starts[bucket]


@njit(cache=True)
def _scatter(codes: Any, starts: Any, out_order: Any) -> None:
    """Write the rows by hash, then by code (for forced hash collisions), then in their original order."""
    buckets = starts.size - 1
    ends = starts[:-1].copy()
    for i in range(codes.size):
        bucket = home_slot(codes[i], buckets)
        out_order[ends[bucket]] = i
        ends[bucket] += 1
    for bucket in range(buckets):
        low, high = starts[bucket], starts[bucket + 1]
        if high - low > 2 * _SHORT:
            rows = out_order[low:high].copy()
            rows = rows[np.argsort(codes[rows], kind="mergesort")]
            hashes = np.empty(rows.size, np.uint64)
            for i in range(rows.size):
                hashes[i] = mix64(codes[rows[i]])
            out_order[low:high] = rows[np.argsort(hashes, kind="mergesort")]
            continue
        for i in range(low + 1, high):
            row = out_order[i]
            place = i
            while place > low and _is_before(codes[row], codes[out_order[place - 1]]):
                out_order[place] = out_order[place - 1]
                place -= 1
            out_order[place] = row


def order_by_bucket(codes: Int64Array, bucket_count: int) -> tuple[Int32Array, Int32Array]:
    """The order in which rows of these codes are stored, and where each bucket starts.

    Row ``order[i]`` goes to place i. Bucket b has the places ``starts[b]`` to ``starts[b + 1]``.
    """
    codes = as_codes(codes)
    if codes.size > MAX_ROWS:
        raise ValueError(f"A chunk holds at most {MAX_ROWS:,} rows, not {codes.size:,}.")
    starts = np.empty(bucket_count + 1, np.int32)
    order = np.empty(codes.size, np.int32)
    _count_buckets(codes, starts)
    _scatter(codes, starts, order)
    return order, starts


def start_buckets(codes: Int64Array, bucket_count: int) -> Int32Array:
    """Where each bucket starts, for codes in the order of `order_by_bucket` and any number of buckets."""
    starts = np.empty(bucket_count + 1, np.int32)
    _count_buckets(as_codes(codes), starts)
    return starts


@njit(cache=True)
def _lower_bound(codes: Any, low: Any, high: Any, code: Any) -> Any:
    while low < high:
        middle = (low + high) >> 1
        if _is_before(codes[middle], code):
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True)
def _upper_bound(codes: Any, low: Any, high: Any, code: Any) -> Any:
    while low < high:
        middle = (low + high) >> 1
        if not _is_before(code, codes[middle]):
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True)
def _find(starts: Any, codes: Any, queries: Any, out_first: Any, out_count: Any) -> Any:
    buckets = starts.size - 1
    homes = np.empty(_BLOCK, np.int64)
    found = 0
    for begin in range(0, queries.size, _BLOCK):
        stop = min(begin + _BLOCK, queries.size)
        # Three passes, so that the reads of a block are in flight together.
        for row in range(begin, stop):
            homes[row - begin] = home_slot(queries[row], buckets)
            prefetch(starts, homes[row - begin])
        for row in range(begin, stop):
            prefetch(codes, min(np.int64(starts[homes[row - begin]]), codes.size - 1))
        for row in range(begin, stop):
            home = homes[row - begin]
            low, high = np.int64(starts[home]), np.int64(starts[home + 1])
            query = queries[row]
            if high - low > _SHORT:
                low = _lower_bound(codes, low, high, query)
                stop_at = _upper_bound(codes, low, high, query)
            else:
                while low < high and codes[low] != query:
                    low += 1
                stop_at = low
                while stop_at < high and codes[stop_at] == query:
                    stop_at += 1
            out_first[row] = low
            out_count[row] = stop_at - low
            found += stop_at - low
    return found


def find_in_buckets(starts: Int32Array, codes: Int64Array, queries: Int64Array) -> tuple[Int32Array, Int32Array, int]:
    """Find the places of each query among codes in the order of `order_by_bucket`: first, count, total.

    Query i has the places ``first[i]`` to ``first[i] + count[i]``. ``total`` is the sum of the counts.
    """
    first = np.zeros(queries.size, np.int32)
    count = np.zeros(queries.size, np.int32)
    total = 0
    if codes.size and queries.size:
        total = int(_find(_readonly(starts), as_codes(codes), as_codes(queries, "Queries"), first, count))
    return first, count, total


@njit(cache=True)
def _expand(first: Any, count: Any, row: Any, offset: Any, out_rows: Any, out_places: Any) -> Any:
    written = 0
    while row < first.size and written < out_rows.size:
        taken = min(np.int64(count[row]) - offset, out_rows.size - written)
        place = first[row] + offset
        for i in range(taken):
            out_rows[written + i] = row
            out_places[written + i] = place + i
        written += taken
        offset += taken
        if offset == count[row]:
            row += 1
            offset = 0
    return row, offset


def expand_piece(
    first: Int32Array, count: Int32Array, state: tuple[int, int, int], max_pairs: int
) -> tuple[Int32Array, Int32Array, tuple[int, int, int]]:
    """The next (query, place) pairs of the ranges that `find_in_buckets` found, at most `max_pairs`, and the next
    state.

    The state is initially ``(0, 0, total)``; its last number is how many pairs are left.
    """
    row, offset, left = state
    pairs = min(left, max_pairs)
    rows = np.empty(pairs, np.int32)
    places = np.empty(pairs, np.int32)
    row, offset = _expand(first, count, row, offset, rows, places)
    return rows, places, (int(row), int(offset), left - pairs)


@njit(cache=True)
def _partitions(codes: Any, partitions: Any, out: Any) -> None:
    for i in range(codes.size):
        out[i] = home_slot(codes[i], partitions)


def partitions_of(codes: Int64Array, partitions: int) -> Int32Array:
    """The hash partition of each code: the same hash range as its slice of a chunk."""
    out = np.empty(codes.size, np.int32)
    _partitions(as_codes(codes), partitions, out)
    return out


@njit(cache=True)
def _partition_begin(codes: Any, partitions: Any, partition: Any) -> Any:
    low, high = np.int64(0), np.int64(codes.size)
    while low < high:
        middle = (low + high) >> 1
        if home_slot(codes[middle], partitions) < partition:
            low = middle + 1
        else:
            high = middle
    return low


def stretch_of_partition(codes: Int64Array, partitions: int, partition: int) -> tuple[int, int]:
    """Where the codes of a hash partition begin and end among codes in the order of `order_by_bucket`."""
    codes = as_codes(codes)
    begin, end = _partition_begin(codes, partitions, partition), _partition_begin(codes, partitions, partition + 1)
    return int(begin), int(end)


def _readonly(starts: Int32Array) -> Int32Array:
    """A read-only view, as Arrow arrays are, so that the kernel is compiled for one kind of array only."""
    view = starts.view()
    view.flags.writeable = False
    return view
