"""Lookups, grouping and merging in sorted arrays of join codes.

A relation's codes are sorted and stay on disk, mapped into memory. Only every `stride`-th code is resident: the
*fences*. A lookup searches the fences first, so it touches only one short range of the mapped array per query.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit

from dovetail.core.arrays import BoolArray, Int32Array, Int64Array
from dovetail.kernels._arrays import as_codes

_BLOCK = 64  # queries searched in parallel
_STATISTICS_ROWS = 1 << 16


@njit(cache=True)
def _advance_to_lower_bounds(values: Any, size: Any, queries: Any, bases: Any) -> None:
    """Move each base to the first of the `size` values after it that is not smaller than its query.

    All searches advance in lockstep: their reads do not wait for each other, and moving a base is arithmetic, not a
    branch that could be mispredicted.
    """
    while size > 1:
        half = size >> 1
        for i in range(queries.size):
            base = bases[i]
            bases[i] = base + (half if values[base + half - 1] < queries[i] else 0)
        size -= half
    if size == 1:
        for i in range(queries.size):
            bases[i] += np.int64(values[bases[i]] < queries[i])


@njit(cache=True)
def _upper_bound(values: Any, low: Any, high: Any, query: Any) -> Any:
    """Return the first index in [low, high] from which values[low:high] are larger than the query."""
    while low < high:
        middle = (low + high) >> 1
        if values[middle] <= query:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True)
def _find_ranges(fences: Any, stride: Any, codes: Any, queries: Any, out_first: Any, out_count: Any) -> None:
    """Write the equal range of each query; there is at least one code."""
    # There are stride - 1 codes between two fences. Near the end a window may start earlier than necessary: the
    # additional codes are all smaller than the query.
    window = min(stride - 1, codes.size)
    last_window = codes.size - window
    last = codes.size - 1
    bases = np.empty(_BLOCK, dtype=np.int64)
    fence_of = np.empty(_BLOCK, dtype=np.int64)
    for start in range(0, queries.size, _BLOCK):
        block = queries[start : start + _BLOCK]
        bases[:] = 0
        _advance_to_lower_bounds(fences, fences.size, block, bases)
        for i in range(block.size):
            fence_of[i] = bases[i]
            bases[i] = min(max(0, (bases[i] - 1) * stride + 1), last_window)
        _advance_to_lower_bounds(codes, window, block, bases)
        for i in range(block.size):
            first = bases[i]
            query = block[i]
            # A code at a fence is read there: in the array it may be on another page, which costs a read of the disk.
            fence = fence_of[i]
            place = fence * stride
            if first == place and fence < fences.size:
                is_found = fences[fence] == query
            else:
                is_found = first <= last and codes[min(first, last)] == query
            count = np.int64(is_found)
            if is_found and first < last:
                following = fences[fence] if first + 1 == place else codes[first + 1]
                if following == query:
                    fence = _upper_bound(fences, 0, fences.size, query)
                    low = max(first, (fence - 1) * stride + 1)
                    count = _upper_bound(codes, low, min(fence * stride, codes.size), query) - first
            out_first[start + i] = first
            out_count[start + i] = count


def make_fences(codes: Int64Array, stride: int) -> Int64Array:
    """Every `stride`-th code, starting with the first."""
    _require_stride(stride)
    return np.ascontiguousarray(codes[::stride])


def lookup_sorted(
    fences: Int64Array, stride: int, codes: Int64Array, queries: Int64Array
) -> tuple[Int64Array, Int32Array]:
    """Find each query's equal range ``codes[first : first + count]`` in ascending codes; `fences` are of `make_fences`.

    If count is 0, first is the insertion point. Queries may be in any order.

    >>> import numpy as np
    >>> codes = np.array([1, 2, 2, 2, 5, 9])
    >>> first, count = lookup_sorted(make_fences(codes, 2), 2, codes, np.array([2, 3, 9]))
    >>> first.tolist(), count.tolist()
    ([1, 4, 5], [3, 0, 1])
    """
    _require_stride(stride)
    if fences.size != -(-codes.size // stride):
        raise ValueError(
            f"{codes.size:,} codes with a stride of {stride:,} have {-(-codes.size // stride):,} "
            f"fences, not {fences.size:,}."
        )
    first = np.zeros(queries.size, dtype=np.int64)
    count = np.zeros(queries.size, dtype=np.int32)
    if codes.size:
        _find_ranges(as_codes(fences), stride, as_codes(codes), as_codes(queries, "Queries"), first, count)
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
    """(row, position) of every position of every range, by row, then by position."""
    pair_count = int(count.sum(dtype=np.int64))
    rows = np.empty(pair_count, dtype=np.int64)
    positions = np.empty(pair_count, dtype=np.int64)
    _expand(first, count, rows, positions)
    return rows, positions


@njit(cache=True)
def _find_groups(block_ids: Any, out_starts: Any) -> Any:
    """Write the start of each group of equal ids, and return the number of groups."""
    groups = 0
    for i in range(block_ids.size):
        if i == 0 or block_ids[i] != block_ids[i - 1]:
            out_starts[groups] = i
            groups += 1
    return groups


def group_by_block(positions: Int64Array, blocks: int | Int64Array) -> tuple[Int64Array, Int64Array]:
    """Group ascending row positions by block: the blocks that contain any, ascending, and the offsets of their
    positions.

    `blocks` is the number of rows per block, or the first row of each block, ascending from 0. The positions in the
    i-th block found are ``positions[group_offsets[i] : group_offsets[i + 1]]``.

    >>> import numpy as np
    >>> block_ids, offsets = group_by_block(np.array([3, 4, 25]), 10)
    >>> block_ids.tolist(), offsets.tolist()
    ([0, 2], [0, 2, 3])
    """
    if isinstance(blocks, int | np.integer):
        if blocks < 1:
            raise ValueError(f"A block has at least 1 row, not {blocks}.")
        ids = positions // np.int64(blocks)
    else:
        if blocks.size == 0 or blocks[0] != 0:
            raise ValueError("The first block must start at row 0.")
        ids = np.searchsorted(blocks, positions, side="right").astype(np.int64) - 1
    starts = np.empty(positions.size + 1, dtype=np.int64)
    groups = int(_find_groups(ids, starts))
    starts[groups] = positions.size
    offsets = starts[: groups + 1].copy()
    return ids[offsets[:-1]], offsets


@njit(cache=True)
def _merge_windows(
    windows: Any, begins: Any, ends: Any, is_last: Any, out_runs: Any, out_offsets: Any, written: Any
) -> Any:
    """Merge the windows until the output is full or a window is used up that is not the last of its run.

    Row r of `windows` holds codes of run r, from ``begins[r]``, which is advanced, to ``ends[r]``. The outputs get the
    run and the place in its window, starting at index `written`. Returns the new value of `written`.
    """
    run_count = begins.size
    while written < out_runs.size:
        best = -1
        second = -1
        for run in range(run_count):
            if begins[run] == ends[run]:
                if not is_last[run]:
                    return written
                continue
            code = windows[run, begins[run]]
            # Runs are visited in ascending order, so among equal codes the lower run comes first.
            if best == -1 or code < windows[best, begins[best]]:
                second = best
                best = run
            elif second == -1 or code < windows[second, begins[second]]:
                second = run
        if best == -1:
            break
        # The best run continues alone as long as it stays ahead of the second.
        place = begins[best]
        stop = min(ends[best], place + out_runs.size - written)
        while True:
            out_runs[written] = best
            out_offsets[written] = place
            written += 1
            place += 1
            if place == stop:
                break
            if second != -1:
                rival = windows[second, begins[second]]
                code = windows[best, place]
                if code > rival or (code == rival and second < best):
                    break
        begins[best] = place
    return written


def merge_sorted_runs(runs: Sequence[Int64Array], cursors: Int64Array, max_rows: int) -> tuple[Int32Array, Int64Array]:
    """Merge the next `max_rows` rows of several ascending runs, in memory proportional to `max_rows`, not to the runs.

    `cursors` are the next row of each run, initially zeros; they are advanced. Returns the run of each merged row and
    its row there: `max_rows` of them until the runs are used up, none after that. Equal codes are in the order of the
    runs, then of their rows.

    >>> import numpy as np
    >>> runs = [np.array([1, 5, 5]), np.array([2, 5])]
    >>> cursors = np.zeros(2, dtype=np.int64)
    >>> sources, rows = merge_sorted_runs(runs, cursors, max_rows=4)
    >>> sources.tolist(), rows.tolist(), cursors.tolist()
    ([0, 1, 0, 0], [0, 0, 1, 2], [3, 1])
    """
    if max_rows < 1:
        raise ValueError(f"A merge must be allowed at least 1 row per call, not {max_rows}.")
    if cursors.shape != (len(runs),) or cursors.dtype != np.int64:
        raise ValueError(f"{len(runs)} runs need {len(runs)} int64 cursors, not {cursors.shape} {cursors.dtype}.")
    remaining = sum(run.size - int(cursor) for run, cursor in zip(runs, cursors, strict=True))
    sources = np.empty(min(max_rows, remaining), dtype=np.int32)
    rows = np.empty(sources.size, dtype=np.int64)
    # Twice a run's even share of the output bounds what a call copies but leaves for the next one.
    window_rows = max(1, min(max_rows, -(-2 * max_rows // max(1, len(runs)))))
    windows = np.empty((len(runs), window_rows), dtype=np.int64)
    begins = np.zeros(len(runs), dtype=np.int64)
    ends = np.zeros(len(runs), dtype=np.int64)
    is_last = np.zeros(len(runs), dtype=np.bool_)
    written = 0
    while written < sources.size:
        for run in np.flatnonzero((begins == ends) & ~is_last).tolist():
            piece = runs[run][cursors[run] : cursors[run] + window_rows]
            windows[run, : piece.size] = piece
            begins[run], ends[run] = 0, piece.size
            is_last[run] = cursors[run] + piece.size == runs[run].size
        window_starts = cursors - begins
        done = int(_merge_windows(windows, begins, ends, is_last, sources, rows, written))
        rows[written:done] += window_starts[sources[written:done]]
        cursors[:] = window_starts + begins
        written = done
    return sources, rows


@njit(cache=True)
def _count_runs(codes: Any, state: Any) -> None:
    """Continue counting: state is [distinct codes, longest run, length of the last run, its code]."""
    distinct, longest, length, last = state[0], state[1], state[2], state[3]
    for i in range(codes.size):
        if length == 0 or codes[i] != last:
            distinct += 1
            length = 0
            last = codes[i]
        length += 1
        longest = max(longest, length)
    state[0], state[1], state[2], state[3] = distinct, longest, length, last


def run_statistics(
    runs: Int64Array | Sequence[Int64Array], deleted: Sequence[BoolArray | None] | None = None
) -> tuple[int, int]:
    """The number of distinct codes of sorted arrays, taken together, and the rows of the most frequent code.

    `deleted` tells, for each run, which rows are not counted; None for a run if all are.
    """
    arrays = [runs] if isinstance(runs, np.ndarray) else list(runs)
    masks: list[BoolArray | None] = [None] * len(arrays) if deleted is None else list(deleted)
    if [None if mask is None else mask.size for mask in masks] != [
        None if mask is None else run.size for mask, run in zip(masks, arrays, strict=True)
    ]:
        raise ValueError("A mask of deleted rows must have one element per row of its run.")
    state = np.zeros(4, dtype=np.int64)
    cursors = np.zeros(len(arrays), dtype=np.int64)
    while True:
        codes = _next_live_codes(arrays, masks, cursors)
        if codes is None:
            return int(state[0]), int(state[1])
        _count_runs(as_codes(codes), state)


def _next_live_codes(runs: list[Int64Array], masks: list[BoolArray | None], cursors: Int64Array) -> Int64Array | None:
    """The next live codes of the merged runs; advances the cursors. None at the end."""
    if len(runs) == 1:
        window = slice(int(cursors[0]), int(cursors[0]) + _STATISTICS_ROWS)
        codes = runs[0][window]
        cursors[0] += codes.size
        if codes.size == 0:
            return None
        return codes if masks[0] is None else codes[~masks[0][window]]
    sources, rows = merge_sorted_runs(runs, cursors, _STATISTICS_ROWS)
    if sources.size == 0:
        return None
    codes = np.empty(rows.size, dtype=np.int64)
    is_live = np.ones(rows.size, dtype=np.bool_)
    for number, (run, mask) in enumerate(zip(runs, masks, strict=True)):
        mine = np.flatnonzero(sources == number)
        codes[mine] = run[rows[mine]]
        if mask is not None:
            is_live[mine] = ~mask[rows[mine]]
    return codes[is_live]


def _require_stride(stride: int) -> None:
    if stride < 1:
        raise ValueError(f"The stride between fences must be at least 1, not {stride}.")
