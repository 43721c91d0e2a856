"""A time index within a bucket index: places of one code are in the order of their times, so a search finds a span.

It takes no memory: only the order of places with the same code changes. A code with a long history is then probed in
the logarithm of its length, and expanded only where its times lie within the bounds of the query.
"""

from typing import Any

import numpy as np
from numba import njit

from dovetail.core.arrays import Int32Array, Int64Array

__all__ = ["EVERY_PLACE", "are_runs_in_time_order", "narrow_to_times", "sort_runs_by_time"]

EVERY_PLACE: Int32Array = np.empty(0, np.int32)
"""In place of an order of rows: place i is row i."""

_SHORT = 16  # below this many places an insertion sort beats a merge sort


@njit(cache=True)
def _sort_runs(codes: Any, times: Any, order: Any) -> None:
    start = 0
    while start < codes.size:
        stop = start + 1
        while stop < codes.size and codes[stop] == codes[start]:
            stop += 1
        is_sorted = True
        for i in range(start + 1, stop):
            if times[order[i]] < times[order[i - 1]]:
                is_sorted = False
                break
        if not is_sorted:
            if stop - start > _SHORT:
                rows = order[start:stop].copy()
                order[start:stop] = rows[np.argsort(times[rows], kind="mergesort")]
            else:
                for i in range(start + 1, stop):
                    row = order[i]
                    place = i
                    while place > start and times[row] < times[order[place - 1]]:
                        order[place] = order[place - 1]
                        place -= 1
                    order[place] = row
        start = stop


def sort_runs_by_time(codes: Int64Array, times: Int64Array, order: Int32Array) -> None:
    """Sort places with the same code by time, stably, in place: place i holds row ``order[i]`` of code ``codes[i]``.

    Examples
    --------
    >>> order = np.array([0, 1, 2], np.int32)
    >>> sort_runs_by_time(np.array([5, 5, 7]), np.array([9, 3, 1]), order)
    >>> order.tolist()
    [1, 0, 2]
    """
    _sort_runs(_readonly(codes), _readonly(times), order)


@njit(cache=True)
def _are_in_order(codes: Any, times: Any) -> Any:
    behind = 0
    for i in range(1, codes.size):
        behind += codes[i] == codes[i - 1] and times[i] < times[i - 1]
    return behind == 0


def are_runs_in_time_order(codes: Int64Array, times: Int64Array) -> bool:
    """Whether rows with the same code, which lie together, are in the order of their times.

    Examples
    --------
    >>> are_runs_in_time_order(np.array([5, 5, 7]), np.array([3, 9, 1]))
    True
    """
    return bool(_are_in_order(_readonly(codes), _readonly(times)))


@njit(cache=True)
def _narrow(first: Any, count: Any, times: Any, order: Any, earliest: Any, latest: Any) -> Any:
    has_order = order.size > 0
    total = np.int64(0)
    for query in range(first.size):
        if count[query] == 0:
            continue
        low = np.int64(first[query])
        high = low + np.int64(count[query])
        end = high
        while low < high:
            middle = (low + high) >> 1
            time = times[order[middle]] if has_order else times[middle]
            if time < earliest[query]:
                low = middle + 1
            else:
                high = middle
        begin = low
        high = end
        while low < high:
            middle = (low + high) >> 1
            time = times[order[middle]] if has_order else times[middle]
            if time <= latest[query]:
                low = middle + 1
            else:
                high = middle
        first[query] = begin
        count[query] = low - begin
        total += low - begin
    return total


def narrow_to_times(
    first: Int32Array,
    count: Int32Array,
    times: Int64Array,
    order: Int32Array,
    earliest: Int64Array,
    latest: Int64Array,
) -> int:
    """Narrow the places of each query, in place, to times from `earliest` to `latest`, both included; returns how many
    are left.

    Query i has the places ``first[i]`` to ``first[i] + count[i]``, which are in the order of their times. Place p is
    row ``order[p]`` of `times`; with `EVERY_PLACE`, row p.

    Examples
    --------
    >>> first, count = np.array([0], np.int32), np.array([4], np.int32)
    >>> narrow_to_times(first, count, np.array([1, 3, 5, 7]), EVERY_PLACE, np.array([2]), np.array([5]))
    2
    >>> first.tolist(), count.tolist()
    ([1], [2])
    """
    return int(_narrow(first, count, _readonly(times), _readonly(order), _readonly(earliest), _readonly(latest)))


def _readonly(array: Any) -> Any:
    """A read-only view, as Arrow arrays are, so that a kernel is compiled for one kind of array only."""
    view = array.view()
    view.flags.writeable = False
    return view
