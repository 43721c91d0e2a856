"""Lookups, grouping and merging in sorted arrays of join codes.

A relation's codes are sorted and stay on disk, mapped into memory. What is resident is one code in `stride`:
the *fences*. A lookup finds the stretch of codes to look at in the fences alone, so it touches one short
stretch of the mapped array per query, and no more of it than an equal range covers.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@njit(cache=True, inline="always")
def _lower_bound(values: Any, low: Any, high: Any, query: Any) -> Any:
    """Give the first index in [low, high] before which all of values[low:high] are smaller than the query."""
    size = high - low
    while size > 0:
        half = size >> 1
        if values[low + half] < query:
            low += half + 1
            size -= half + 1
        else:
            size = half
    return low


@njit(cache=True, inline="always")
def _upper_bound(values: Any, low: Any, high: Any, query: Any) -> Any:
    """Give the first index in [low, high] before which all of values[low:high] are at most the query."""
    size = high - low
    while size > 0:
        half = size >> 1
        if values[low + half] <= query:
            low += half + 1
            size -= half + 1
        else:
            size = half
    return low


@njit(cache=True)
def _find_ranges(fences: Any, stride: Any, codes: Any, queries: Any, out_first: Any, out_count: Any) -> None:
    for row in range(queries.size):
        query = queries[row]
        fence = _lower_bound(fences, 0, fences.size, query)
        low = max(0, (fence - 1) * stride + 1)
        first = _lower_bound(codes, low, min(fence * stride, codes.size), query)
        last_fence = _upper_bound(fences, fence, fences.size, query)
        low = max(first, (last_fence - 1) * stride + 1)
        out_first[row] = first
        out_count[row] = _upper_bound(codes, low, min(last_fence * stride, codes.size), query) - first


def make_fences(codes: Int64Array, stride: int) -> Int64Array:
    """Give the fences of sorted codes: one code in `stride`, beginning with the first.

    Examples
    --------
    >>> import numpy as np
    >>> make_fences(np.array([1, 2, 2, 5, 9]), stride=2).tolist()
    [1, 2, 9]
    """
    _require_stride(stride)
    return np.ascontiguousarray(codes[::stride])


def lookup_sorted(
    fences: Int64Array, stride: int, codes: Int64Array, queries: Int64Array
) -> tuple[Int64Array, Int32Array]:
    """Find each query's equal range in sorted codes.

    Parameters
    ----------
    fences
        ``codes[::stride]``, see `make_fences`.
    stride
        How many codes lie from one fence to the next.
    codes
        Ascending, with any number of repetitions; typically mapped from a file.
    queries
        In any order.

    Returns
    -------
    first, count
        The equal range is ``codes[first : first + count]``. Where count is 0, first is where the query would
        go.

    Examples
    --------
    >>> import numpy as np
    >>> codes = np.array([1, 2, 2, 2, 5, 9])
    >>> first, count = lookup_sorted(make_fences(codes, 2), 2, codes, np.array([2, 3, 9]))
    >>> first.tolist(), count.tolist()
    ([1, 4, 5], [3, 0, 1])
    """
    _require_stride(stride)
    if fences.size != -(-codes.size // stride):
        raise ValueError(
            f"{codes.size:,} codes with a fence at every {stride:,} have {-(-codes.size // stride):,} "
            f"fences, not {fences.size:,}."
        )
    first = np.empty(queries.size, dtype=np.int64)
    count = np.empty(queries.size, dtype=np.int32)
    _find_ranges(fences, stride, codes, queries, first, count)
    return first, count


@njit(cache=True)
def _expand(first: Any, count: Any, out_rows: Any, out_positions: Any) -> None:
    pair = 0
    for row in range(first.size):
        start = first[row]
        for i in range(count[row]):
            out_rows[pair] = row
            out_positions[pair] = start + i
            pair += 1


def expand_ranges(first: Int64Array, count: Int32Array) -> tuple[Int64Array, Int64Array]:
    """Give (row, position) for every position of every range, by row and then by position.

    Examples
    --------
    >>> import numpy as np
    >>> rows, positions = expand_ranges(np.array([5, 0, 7]), np.array([2, 0, 1], dtype=np.int32))
    >>> rows.tolist(), positions.tolist()
    ([0, 0, 2], [5, 6, 7])
    """
    pair_count = int(count.sum(dtype=np.int64))
    rows = np.empty(pair_count, dtype=np.int64)
    positions = np.empty(pair_count, dtype=np.int64)
    _expand(first, count, rows, positions)
    return rows, positions


@njit(cache=True)
def _find_groups(block_ids: Any, out_starts: Any) -> Any:
    """Write where each stretch of equal ids begins, and give how many there are."""
    groups = 0
    for i in range(block_ids.size):
        if i == 0 or block_ids[i] != block_ids[i - 1]:
            out_starts[groups] = i
            groups += 1
    return groups


def group_by_block(positions: Int64Array, blocks: int | Int64Array) -> tuple[Int64Array, Int64Array]:
    """Group sorted row positions by the block that they lie in.

    Parameters
    ----------
    positions
        Ascending, repetitions allowed.
    blocks
        The rows of a block, all blocks being of that size; or the first row of each block, ascending,
        beginning with 0.

    Returns
    -------
    block_ids, group_offsets
        The blocks that hold any of the positions, ascending; those of the i-th are
        ``positions[group_offsets[i] : group_offsets[i + 1]]``.

    Examples
    --------
    >>> import numpy as np
    >>> block_ids, offsets = group_by_block(np.array([3, 4, 25]), 10)
    >>> block_ids.tolist(), offsets.tolist()
    ([0, 2], [0, 2, 3])
    >>> block_ids, offsets = group_by_block(np.array([3, 4, 25]), np.array([0, 4, 100]))
    >>> block_ids.tolist(), offsets.tolist()
    ([0, 1], [0, 1, 3])
    """
    if isinstance(blocks, int | np.integer):
        if blocks < 1:
            raise ValueError(f"A block has at least 1 row, not {blocks}.")
        ids = positions // np.int64(blocks)
    else:
        if blocks.size == 0 or blocks[0] != 0:
            raise ValueError("The first of the blocks must begin at row 0.")
        ids = np.searchsorted(blocks, positions, side="right").astype(np.int64) - 1
    starts = np.empty(positions.size + 1, dtype=np.int64)
    groups = int(_find_groups(ids, starts))
    starts[groups] = positions.size
    offsets = starts[: groups + 1].copy()
    return ids[offsets[:-1]], offsets


def _require_stride(stride: int) -> None:
    if stride < 1:
        raise ValueError(f"The stride between fences is at least 1, not {stride}.")
