"""The chunks of a window: which tuples entered together, and when they leave.

There can be as many chunks as tuples, so they are numbers in one array, 32 bytes each and accounted for, and not
objects of Python's own, which would take six times as much that nobody counted.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Chunk", "ChunkQueue"]

Int64Array = npt.NDArray[np.int64]
_EXTRA = 8
_LAST_SEQ, _LIVE, _FIRST_ARRIVAL, _DEADLINE = range(4)


class Chunk(NamedTuple):
    """Tuples that entered one after the other and leave together.

    Attributes
    ----------
    last_seq
        The window's number of the newest of them.
    live
        How many still wait.
    first_arrival
        How many tuples had been offered before the first of them.
    deadline
        Relation rows that the scan has passed when they have met every row.
    """

    last_seq: int
    live: int
    first_arrival: int
    deadline: int


class ChunkQueue:
    """Chunks, the oldest first.

    Parameters
    ----------
    capacity
        How many chunks are planned for. A queue that is full takes more, and more memory, but should not be given any.

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
        """Whether there are as many chunks as planned."""
        return len(self) >= self._capacity

    @property
    def nbytes(self) -> int:
        """Bytes held."""
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
        """All chunks, the oldest first."""
        return [self._chunk(place) for place in range(self._start, self._stop)]

    def append(self, chunk: Chunk) -> None:
        """Add a chunk that entered after all others."""
        if self._stop == self._numbers.shape[1]:
            # To the front, where there is none before them.
            count, extra = len(self), 0 if self._start else _EXTRA
            numbers = np.zeros((4, self._numbers.shape[1] + extra), np.int64) if extra else self._numbers
            numbers[:, :count] = self._numbers[:, self._start : self._stop].copy()
            self._numbers, self._start, self._stop = numbers, 0, count
        self._numbers[:, self._stop] = chunk
        self._stop += 1

    def extend_newest(self, last_seq: int, count: int) -> None:
        """So many further tuples belong to the newest chunk."""
        self._numbers[_LAST_SEQ, self._stop - 1] = last_seq
        self._numbers[_LIVE, self._stop - 1] += count

    def count_out_oldest(self, count: int) -> None:
        """The oldest so many tuples have left."""
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
        # Few chunks are looked for among many tuples, in order: several times faster than each tuple among the chunks.
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
        """The same chunks in a queue of another capacity, tuples being numbered from 0 on."""
        other = ChunkQueue(max(capacity, len(self)))
        other._stop = len(self)
        other._numbers[:, : other._stop] = self._numbers[:, self._start : self._stop]
        other._numbers[_LAST_SEQ, : other._stop] = np.cumsum(other._numbers[_LIVE, : other._stop]) - 1
        return other

    def _chunk(self, place: int) -> Chunk:
        return Chunk(*self._numbers[:, place].tolist())
