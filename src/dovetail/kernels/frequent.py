"""The codes with the most entries in a `MultiMap`: the candidates for a cache."""

from typing import Any

import numpy as np
from numba import njit

from dovetail.core.arrays import Int64Array
from dovetail.kernels._multimap_kernels import LOW_HALF
from dovetail.kernels.multimap import MultiMap

__all__ = ["frequent_codes"]

_MOST_TOLD_APART = 255


@njit(cache=True)
def _count_counts(slots: Any, out_codes_with: Any) -> None:
    """Count the codes per number of entries; the last element counts all larger numbers too."""
    last = out_codes_with.size - 1
    for slot in range(slots.size // 2):
        entries = slots[2 * slot + 1] & LOW_HALF
        if entries != 0:
            out_codes_with[min(entries, last)] += 1


@njit(cache=True)
def _collect_codes(slots: Any, least: Any, out_codes: Any, out_counts: Any) -> Any:
    """Write the codes with at least `least` entries, up to the size of the output; return how many were written."""
    found = 0
    for slot in range(slots.size // 2):
        entries = slots[2 * slot + 1] & LOW_HALF
        if entries >= least and found < out_codes.size:
            out_codes[found] = slots[2 * slot]
            out_counts[found] = entries
            found += 1
    return found


def frequent_codes(entries: MultiMap, min_count: int, max_codes: int) -> tuple[Int64Array, Int64Array]:
    """The codes with the most entries, at least `min_count` each, and their entry counts.

    If more than `max_codes` qualify, those with the fewest entries are left out: all codes with the same number of
    entries together, unless that would leave none. Two passes over the slots, one to count and one to collect, need no
    memory beyond the result.

    >>> window = MultiMap(9)
    >>> _ = window.insert(np.array([5, 6, 5, 7, 6, 5]))
    >>> codes, counts = frequent_codes(window, min_count=2, max_codes=10)
    >>> sorted(zip(codes.tolist(), counts.tolist()))
    [(5, 3), (6, 2)]
    """
    if max_codes < 1 or len(entries) == 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    codes_with = np.zeros(_MOST_TOLD_APART + 1, np.int64)
    _count_counts(entries._slots, codes_with)
    at_least = np.cumsum(codes_with[::-1])[::-1]
    fitting = np.flatnonzero(at_least <= max_codes)
    # If more codes have the highest count than fit, any of them will do.
    least = max(min_count, int(fitting[0]) if fitting.size else _MOST_TOLD_APART)
    if at_least[min(least, _MOST_TOLD_APART)] == 0 and least > min_count:
        least = max(min_count, least - 1)
    room = int(min(max_codes, at_least[min(max(least, 1), _MOST_TOLD_APART)]))
    codes, counts = np.empty(room, np.int64), np.empty(room, np.int64)
    found = int(_collect_codes(entries._slots, max(least, 1), codes, counts))
    return codes[:found].copy(), counts[:found].copy()
