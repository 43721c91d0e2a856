"""A set of 64-bit integers as disjoint, sorted, closed intervals; neighbours are one.

It takes 16 bytes per interval however many values that is. Values that come one by one in order are one interval;
those that never touch are as many intervals as values, which is why a set can be told to `forget`.

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

__all__ = ["LEAST", "MOST", "IntervalSet"]

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]
LEAST = -(2**63)
MOST = 2**63 - 1
_NARROW, _MOST_LOOKED_AT = 64, 1 << 20


class IntervalSet:
    """Immutable; the operations give new sets."""

    __slots__ = ("highs", "lows")

    def __init__(self, lows: Int64Array, highs: Int64Array) -> None:
        self.lows, self.highs = lows, highs

    @classmethod
    def empty(cls) -> "IntervalSet":
        """The set of nothing."""
        return cls(np.zeros(0, np.int64), np.zeros(0, np.int64))

    @classmethod
    def of(cls, values: Iterable[int] | Int64Array) -> "IntervalSet":
        """The set of these values."""
        points = np.asarray(values if isinstance(values, np.ndarray) else list(values), np.int64)
        return cls._merged(points, points)

    @classmethod
    def between(cls, low: int | None, high: int | None) -> "IntervalSet":
        """All values from low to high, both included; None is no end."""
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
        # A low at the very bottom cannot begin an interval that something lies before, so it must not wrap around.
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
        """Bytes of its arrays."""
        return self.lows.nbytes + self.highs.nbytes

    def pairs(self) -> list[tuple[int, int]]:
        """The intervals, in order."""
        return list(zip(self.lows.tolist(), self.highs.tolist(), strict=True))

    def widths(self) -> npt.NDArray[np.float64]:
        """How many values each interval has; not exact for the widest."""
        return self.highs.astype(np.float64) - self.lows.astype(np.float64) + 1.0

    def contains(self, values: Int64Array) -> BoolArray:
        """Which values are in the set."""
        return self.find(values) >= 0

    def find(self, values: Int64Array) -> npt.NDArray[np.int64]:
        """The number of the interval that holds each value; -1 for none."""
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
        """The values of either."""
        if len(other) == 0 or len(self) == 0:
            return self if len(other) == 0 else other
        return self._merged(np.concatenate([self.lows, other.lows]), np.concatenate([self.highs, other.highs]))

    def complement(self) -> "IntervalSet":
        """All other values.

        Examples
        --------
        >>> IntervalSet.of([5]).complement().complement().pairs()
        [(5, 5)]
        """
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
        """The values of both.

        Examples
        --------
        >>> IntervalSet.between(1, 9).intersection(IntervalSet.of([0, 1, 5])).pairs()
        [(1, 1), (5, 5)]
        """
        if len(self) == 0 or len(other) == 0:
            return IntervalSet.empty()
        # Where each of the other's intervals meets ours: from the first that ends at or after it begins.
        first = np.searchsorted(self.highs, other.lows, side="left")
        last = np.searchsorted(self.lows, other.highs, side="right")
        count = np.maximum(last - first, 0)
        theirs = np.repeat(np.arange(len(other)), count)
        ours = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
        return IntervalSet(
            np.maximum(self.lows[ours], other.lows[theirs]), np.minimum(self.highs[ours], other.highs[theirs])
        )

    def minus(self, other: "IntervalSet") -> "IntervalSet":
        """The values of this that are not in the other.

        Examples
        --------
        >>> IntervalSet.between(1, 5).minus(IntervalSet.of([3])).pairs()
        [(1, 2), (4, 5)]
        """
        return self if len(other) == 0 or len(self) == 0 else self.intersection(other.complement())

    def keep(self, mask: BoolArray) -> "IntervalSet":
        """Only some of the intervals."""
        return IntervalSet(self.lows[mask], self.highs[mask])

    def bridged(self, comes: Callable[[Int64Array], BoolArray]) -> "IntervalSet":
        """Together with the narrow gaps of which no value ever comes: whether these are in the set means nothing.

        Parameters
        ----------
        comes
            Tells which of some values can come at all.

        Examples
        --------
        >>> IntervalSet.of([2, 4, 8]).bridged(lambda values: values == 6).pairs()
        [(2, 4), (8, 8)]
        """
        if len(self) < 2:
            return self
        # As unsigned numbers: the distance of two of them may be beyond the signed ones.
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
        """All values, where there are at most so many; else None.

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
