"""A set of 64-bit integers as disjoint, sorted, closed intervals; adjacent ones are merged.

It takes 16 bytes per interval. Values that arrive in order are one interval; values that never touch are one interval
each, which is why users of a set must be able to `forget`.

Examples
--------
>>> closed = IntervalSet.of([3, 5]).union(IntervalSet.of([4]))
>>> closed.pairs()
[(3, 5)]
>>> closed.contains(np.array([2, 3, 5])).tolist()
[False, True, True]
"""

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from dovetail.core.arrays import BoolArray, Int64Array

__all__ = ["LEAST", "MOST", "IntervalSet"]

LEAST = -(2**63)
MOST = 2**63 - 1
_NARROW, _MOST_LOOKED_AT = 64, 1 << 20


class IntervalSet:
    """Immutable; operations return new sets."""

    __slots__ = ("highs", "lows")

    def __init__(self, lows: Int64Array, highs: Int64Array) -> None:
        self.lows, self.highs = lows, highs

    @classmethod
    def empty(cls) -> "IntervalSet":
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64))

    @classmethod
    def of(cls, values: Iterable[int] | Int64Array) -> "IntervalSet":
        """The set of these values."""
        points = np.asarray(values if isinstance(values, np.ndarray) else list(values), np.int64)
        return cls._merged(points, points)

    @classmethod
    def between(cls, low: int | None, high: int | None) -> "IntervalSet":
        """All values from low to high, inclusive; None for no bound."""
        first, last = LEAST if low is None else low, MOST if high is None else high
        if first > last:
            return cls.empty()
        return cls(np.array([first], np.int64), np.array([last], np.int64))

    @classmethod
    def _merged(cls, lows: Int64Array, highs: Int64Array) -> "IntervalSet":
        if lows.size == 0:
            return cls.empty()
        order = np.argsort(lows, kind="stable")
        lows, highs = lows[order], np.maximum.accumulate(highs[order])
        # Nothing lies before the minimum: low - 1 must not wrap around.
        begins = (lows[1:] > highs[:-1]) & (lows[1:] - 1 > highs[:-1])
        firsts = np.concatenate([[True], begins])
        lasts = np.concatenate([begins, [True]])
        return cls(lows[firsts], highs[lasts])

    def __len__(self) -> int:
        return len(self.lows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IntervalSet) and self.pairs() == other.pairs()

    def __hash__(self) -> int:
        return hash(tuple(self.pairs()))

    @property
    def nbytes(self) -> int:
        return self.lows.nbytes + self.highs.nbytes

    def pairs(self) -> list[tuple[int, int]]:
        """The intervals, in order."""
        return list(zip(self.lows.tolist(), self.highs.tolist(), strict=True))

    def widths(self) -> npt.NDArray[np.float64]:
        """The number of values per interval; approximate for the widest."""
        return self.highs.astype(np.float64) - self.lows.astype(np.float64) + 1.0

    def contains(self, values: Int64Array) -> BoolArray:
        """Which values are in the set."""
        return self.find(values) >= 0

    def find(self, values: Int64Array) -> Int64Array:
        """The index of the interval that holds each value; -1 for none."""
        if len(self.lows) == 0:
            return np.full(len(values), -1)
        if len(self.lows) == 1:
            return np.where((values >= self.lows[0]) & (values <= self.highs[0]), 0, -1)
        places = np.searchsorted(self.lows, values, side="right") - 1
        inside = (places >= 0) & (values <= self.highs[places])
        return np.where(inside, places, -1)

    def covers(self, low: int, high: int) -> bool:
        """Whether every value from low to high is in the set."""
        place = int(np.searchsorted(self.lows, low, side="right")) - 1
        return place >= 0 and high <= int(self.highs[place])

    def union(self, other: "IntervalSet") -> "IntervalSet":
        if len(other) == 0 or len(self) == 0:
            return self if len(other) == 0 else other
        return self._merged(np.concatenate([self.lows, other.lows]), np.concatenate([self.highs, other.highs]))

    @classmethod
    def union_of(cls, parts: list["IntervalSet"]) -> "IntervalSet":
        """The union of several sets."""
        parts = [cls.empty(), *parts]
        return cls._merged(np.concatenate([p.lows for p in parts]), np.concatenate([p.highs for p in parts]))

    def complement(self) -> "IntervalSet":
        if len(self) == 0:
            return IntervalSet.between(None, None)
        lows = np.concatenate([[LEAST], self.highs[self.highs < MOST] + 1])
        highs = np.concatenate([self.lows[self.lows > LEAST] - 1, [MOST]])
        if self.lows[0] == LEAST:
            lows = lows[1:]
        if self.highs[-1] == MOST:
            highs = highs[:-1]
        return IntervalSet(lows.astype(np.int64), highs.astype(np.int64))

    def intersection(self, other: "IntervalSet") -> "IntervalSet":
        if len(self) == 0 or len(other) == 0:
            return IntervalSet.empty()
        # Each of the other's intervals meets ours from the first that ends at or after its start.
        first = np.searchsorted(self.highs, other.lows, side="left")
        last = np.searchsorted(self.lows, other.highs, side="right")
        count = np.maximum(last - first, 0)
        theirs = np.repeat(np.arange(len(other)), count)
        ours = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
        return IntervalSet(
            np.maximum(self.lows[ours], other.lows[theirs]), np.minimum(self.highs[ours], other.highs[theirs])
        )

    def minus(self, other: "IntervalSet") -> "IntervalSet":
        return self if len(other) == 0 or len(self) == 0 else self.intersection(other.complement())

    def keep(self, mask: BoolArray) -> "IntervalSet":
        return IntervalSet(self.lows[mask], self.highs[mask])

    def bridged(self, comes: Callable[[Int64Array], BoolArray]) -> "IntervalSet":
        """Fill narrow gaps in which no value can occur, as decided by `comes`: their membership does not matter.

        Examples
        --------
        >>> IntervalSet.of([2, 4, 8]).bridged(lambda values: values == 6).pairs()
        [(2, 4), (8, 8)]
        """
        if len(self) < 2:
            return self
        # Unsigned: the distance of two values may exceed the signed range.
        gaps = self.lows[1:].view(np.uint64) - self.highs[:-1].view(np.uint64) - np.uint64(1)
        narrow = np.flatnonzero(gaps <= max(_NARROW, _MOST_LOOKED_AT // len(gaps)))
        if not narrow.size:
            return self
        sizes = gaps[narrow].astype(np.int64)
        starts = np.cumsum(sizes) - sizes
        values = np.arange(int(sizes.sum())) + np.repeat(self.highs[:-1][narrow] + 1 - starts, sizes)
        is_empty = ~np.logical_or.reduceat(comes(values), starts)
        ends: BoolArray = np.ones(len(gaps), np.bool_)
        ends[narrow[is_empty]] = False
        return IntervalSet(self.lows[np.concatenate([[True], ends])], self.highs[np.concatenate([ends, [True]])])

    def points(self, most: int) -> Int64Array | None:
        """All values if there are at most `most`, else None.

        Examples
        --------
        >>> IntervalSet.between(1, 3).points(10).tolist()
        [1, 2, 3]
        """
        if float(self.widths().sum()) > most:
            return None
        counts = (self.highs - self.lows + 1).astype(np.int64)
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        values: Int64Array = np.repeat(self.lows, counts) + offsets
        return values
