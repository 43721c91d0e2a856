"""The chunks of a window: which tuples entered together, and when they leave.

There can be as many chunks as tuples, so they are rows of one array, 32 accounted bytes each. Python objects would take
six times as much, uncounted.
"""

from typing import NamedTuple

import numpy as np

from dovetail.core.arrays import Int64Array

__all__ = ["Chunk", "ChunkQueue"]

_EXTRA = 8
_LAST_SEQ, _LIVE, _FIRST_ARRIVAL, _DEADLINE = range(4)


class Chunk(NamedTuple):
    """Tuples that entered together and leave together."""

    last_seq: int  # the window's number of the newest one
    live: int  # how many still wait
    first_arrival: int  # how many tuples were offered before the first one
    deadline: int  # the scan's row count at which they have met every row


class ChunkQueue:
    """Chunks, the oldest first; beyond `capacity` it grows, but that should not happen.

    Examples
    --------
    >>> chunks = ChunkQueue(capacity=2)
    >>> chunks.append(Chunk(last_seq=3, live=4, first_arrival=0, deadline=100))
    >>> chunks.append(Chunk(last_seq=5, live=2, first_arrival=4, deadline=110))
    >>> chunks.count_out(np.array([0, 4, 5]))
    >>> len(chunks), chunks.oldest.live, chunks.is_full
    (1, 3, False)
    """

    BYTES_PER_CHUNK = 4 * 8

    def __init__(self, capacity: int) -> None:
        self._capacity = max(1, capacity)
        self._numbers = np.zeros((4, self._capacity), np.int64)
        self._start = self._stop = 0

    def __len__(self) -> int:
        return self._stop - self._start

    @property
    def is_full(self) -> bool:
        return len(self) >= self._capacity

    @property
    def nbytes(self) -> int:
        return self._numbers.nbytes

    @property
    def oldest(self) -> Chunk:
        """The chunk that leaves first; there must be one."""
        return self._chunk(self._start)

    @property
    def newest(self) -> Chunk:
        """The chunk that entered last; there must be one."""
        return self._chunk(self._stop - 1)

    def to_list(self) -> list[Chunk]:
        return [self._chunk(place) for place in range(self._start, self._stop)]

    def deadlines_of(self, seqs: Int64Array) -> Int64Array:
        """The deadlines of the tuples with these numbers."""
        numbers = self._numbers[:, self._start : self._stop]
        return np.asarray(numbers[_DEADLINE, np.searchsorted(numbers[_LAST_SEQ], seqs)], np.int64)

    def append(self, chunk: Chunk) -> None:
        """Add a chunk that entered after all others."""
        if self._stop == self._numbers.shape[1]:
            # Move to the front to reuse the space of chunks that have left.
            count, extra = len(self), 0 if self._start else _EXTRA
            numbers = np.zeros((4, self._numbers.shape[1] + extra), np.int64) if extra else self._numbers
            numbers[:, :count] = self._numbers[:, self._start : self._stop].copy()
            self._numbers, self._start, self._stop = numbers, 0, count
        self._numbers[:, self._stop] = chunk
        self._stop += 1

    def extend_newest(self, last_seq: int, count: int) -> None:
        """Add `count` tuples to the newest chunk."""
        self._numbers[_LAST_SEQ, self._stop - 1] = last_seq
        self._numbers[_LIVE, self._stop - 1] += count

    def count_out_oldest(self, count: int) -> None:
        """The `count` oldest tuples have left."""
        live = self._numbers[_LIVE]
        while count:
            gone = min(count, int(live[self._start]))
            live[self._start] -= gone
            count -= gone
            if live[self._start] == 0:
                self._start += 1

    def count_out(self, seqs: Int64Array) -> None:
        """The tuples with these numbers have left."""
        numbers = self._numbers[:, self._start : self._stop]
        # Searching few chunks among many ordered tuples is several times faster than each tuple among the chunks.
        gone = np.searchsorted(np.sort(seqs), numbers[_LAST_SEQ], side="right")
        numbers[_LIVE] -= np.diff(gone, prepend=0)
        is_left = numbers[_LIVE] > 0
        if not is_left.all():
            kept = numbers[:, is_left]
            self._start, self._stop = 0, kept.shape[1]
            self._numbers[:, : self._stop] = kept

    def end_newest_at(self, last_seq: int) -> None:
        """The newest chunk now ends with this tuple."""
        self._numbers[_LAST_SEQ, self._stop - 1] = last_seq

    def renumbered(self, capacity: int) -> "ChunkQueue":
        """The same chunks in a queue of another capacity, with tuples numbered from 0."""
        other = ChunkQueue(max(capacity, len(self)))
        other._stop = len(self)
        other._numbers[:, : other._stop] = self._numbers[:, self._start : self._stop]
        other._numbers[_LAST_SEQ, : other._stop] = np.cumsum(other._numbers[_LIVE, : other._stop]) - 1
        return other

    def _chunk(self, place: int) -> Chunk:
        return Chunk(*self._numbers[:, place].tolist())
