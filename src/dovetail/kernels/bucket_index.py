"""A hash index over rows that are stored in the order of their hash: no slots, only where each bucket begins.

The rows of an immutable chunk are ordered by the hash of their code. Buckets are stretches of the hash's range, so
every power of two of them up to the number of buckets is a partition of the rows into as many slices: what the chunk
has of one hash partition lies together, and any part of the rows is still in order, for any number of buckets. The
index is one int32 per bucket beside the codes themselves, is written and mapped like any other column, and needs no
work to attach.
"""

from typing import Any

import numpy as np
from numba import njit

from dovetail.kernels._arrays import Int32Array, Int64Array, as_codes
from dovetail.kernels._vector import prefetch
from dovetail.kernels.hashing import home_slot, mix64

__all__ = ["bucket_count_of", "expand_piece", "find_in_buckets", "order_by_bucket", "partitions_of", "start_buckets"]

_BLOCK = 128
_SHORT = 12  # in fewer codes a linear search beats a binary one
MAX_ROWS = 2**31 - 1


def bucket_count_of(rows: int, partitions: int) -> int:
    """Give how many buckets a chunk gets: a power of two, about one row each, and no partition without one.

    Examples
    --------
    >>> bucket_count_of(1000, partitions=16), bucket_count_of(3, partitions=16)
    (1024, 16)
    """
    return max(partitions, 1 << max(0, rows - 1).bit_length())


@njit(cache=True, inline="always")
def _is_before(left: Any, right: Any) -> Any:
    """Whether a code is stored before another one."""
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
    """Write the rows by hash, then by code where hashes are forced to collide, then in their order."""
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
    """Give the order in which rows of these codes are stored, and where in it each bucket begins.

    Returns
    -------
    order, starts
        Row ``order[i]`` goes to place i; the places of bucket b are from ``starts[b]`` to ``starts[b + 1]``.

    Examples
    --------
    >>> import numpy as np
    >>> codes = np.array([7, 5, 7])
    >>> order, starts = order_by_bucket(codes, 4)
    >>> sorted(order.tolist()), int(starts[-1])
    ([0, 1, 2], 3)
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
    """Give where each bucket begins, for codes in the order of `order_by_bucket`, of any number of buckets.

    Examples
    --------
    >>> import numpy as np
    >>> start_buckets(np.array([7, 7]), 1).tolist()
    [0, 2]
    """
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
        # Three passes, so that the reads of a block are under way together instead of one after the other.
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
    """Find the places of each query among codes that lie in the order of `order_by_bucket`.

    Returns
    -------
    first, count, total
        The places of query i are from ``first[i]`` to ``first[i] + count[i]``; there are ``total`` in all.

    Examples
    --------
    >>> import numpy as np
    >>> codes = np.array([7, 5, 7])
    >>> order, starts = order_by_bucket(codes, 4)
    >>> first, count, total = find_in_buckets(starts, codes[order], np.array([7, 6]))
    >>> count.tolist(), total, sorted(order[first[0] : first[0] + 2].tolist())
    ([2, 0], 2, [0, 2])
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
    """Give the next (query, place) pairs of ranges, at most `max_pairs`, and the state to go on with.

    Parameters
    ----------
    first, count
        What `find_in_buckets` gave.
    state
        ``(0, 0, total)`` to begin with; the last number is how many pairs are left.
    max_pairs
        At least 1.

    Examples
    --------
    >>> import numpy as np
    >>> first, count = np.array([4, 0], np.int32), np.array([3, 1], np.int32)
    >>> queries, places, state = expand_piece(first, count, (0, 0, 4), max_pairs=2)
    >>> queries.tolist(), places.tolist(), state
    ([0, 0], [4, 5], (0, 2, 2))
    >>> queries, places, state = expand_piece(first, count, state, max_pairs=2)
    >>> queries.tolist(), places.tolist(), state[2]
    ([0, 1], [6, 0], 0)
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
    """Give the hash partition of each code: the same stretch of the hash's range as its slice of a chunk.

    Examples
    --------
    >>> import numpy as np
    >>> bool((partitions_of(np.arange(100), 4) < 4).all())
    True
    """
    out = np.empty(codes.size, np.int32)
    _partitions(as_codes(codes), partitions, out)
    return out


def _readonly(starts: Int32Array) -> Int32Array:
    """A view as Arrow gives it, so that the kernel is compiled for one kind of array only."""
    view = starts.view()
    view.flags.writeable = False
    return view
