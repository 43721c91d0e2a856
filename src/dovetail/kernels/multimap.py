"""A multi-map from join codes to entries in order of arrival, in memory fixed at construction.

It is the index of a window of stream tuples: a batch of codes is appended, a batch is probed for all pairs,
the oldest entries leave (MESHJOIN's expiry), or all entries of some codes leave from the middle (HYBRIDJOIN,
SSBJ). Nothing is ever rebuilt: a removed code's slot is closed by shifting its neighbours back, and the place
of a removed entry is reused by the next one to arrive.

Memory per entry of capacity, with the default load of at most one third: 48 bytes of slots and 17 bytes of
entries (16 for each of 1 1/16 ring positions); with `DENSE_LOAD`, which windows in a budget use, 32 and 17. The spare
positions are what lets an insertion find a place in constant (amortised) time, however scattered the places are that
removals left.
"""

from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from dovetail.errors import BudgetError, InternalError
from dovetail.kernels import _multimap_kernels as compiled
from dovetail.kernels._arrays import BoolArray, Int32Array, Int64Array, as_codes
from dovetail.kernels._slots import DEFAULT_MAX_LOAD, DENSE_LOAD, count_slot_bytes, find_words, make_slots

__all__ = ["DENSE_LOAD", "MAX_CAPACITY", "MultiMap", "ProbeState"]

Integer = TypeVar("Integer", bound=np.signedinteger[Any])

MAX_CAPACITY = 2_000_000_000
_SPARE_SHARE = 16


class ProbeState(NamedTuple):
    """Where a probe in bounded steps goes on: `MultiMap.probe_limited` gives it and takes it back."""

    row: int
    position: int
    remaining: int
    revision: int


# What the kernel needs to give ring positions as they are.
_POSITIONS = (0, 0, 0)
_BEGINNING = ProbeState(row=0, position=0, remaining=0, revision=0)


class MultiMap:
    """Entries filed under int64 codes, any number per code, in order of arrival.

    An entry is known by its *sequence number*: an int64 that grows with arrival and is never used again.
    Numbers may have gaps. ``seq % ring_size`` differs between any two live entries, so arrays of length
    `ring_size` can hold what belongs to an entry at that position.

    Parameters
    ----------
    capacity
        The most entries that can be live at once.
    max_load
        The largest share of the slots that may be taken; less memory for slower probes as it grows.

    Examples
    --------
    >>> import numpy as np
    >>> window = MultiMap(capacity=4)
    >>> window.insert(np.array([7, 8, 7])).tolist()
    [0, 1, 2]
    >>> rows, seqs = window.probe(np.array([9, 7]))
    >>> rows.tolist(), seqs.tolist()
    ([1, 1], [0, 2])
    >>> window.remove_oldest(1).tolist(), window.remove_codes(np.array([7])).tolist(), len(window)
    ([0], [2], 1)
    """

    # An entry stores how often the ring had been gone round in 31 bits.
    _last_lap = 2**31 - 1

    def __init__(self, capacity: int, max_load: float = DEFAULT_MAX_LOAD) -> None:
        if not 1 <= capacity <= MAX_CAPACITY:
            raise ValueError(f"A MultiMap holds between 1 and {MAX_CAPACITY:,} entries, not {capacity:,}.")
        if not 0.1 <= max_load <= 0.9:
            raise ValueError(f"The load of a MultiMap must be between 0.1 and 0.9, not {max_load}.")
        self._capacity = int(capacity)
        self._max_load = float(max_load)
        self._slots = make_slots(capacity, max_load)
        ring_size = self.ring_size_of(capacity)
        self._entries: Int64Array = np.full(2 * ring_size, compiled.FREE, dtype=np.int64)
        self._state: Int64Array = np.zeros(compiled.STATE_SIZE, dtype=np.int64)
        self._ring_size = ring_size
        # What is added to the numbers the kernels work with: laps are counted from here.
        self._seq_base = 0
        self._revision = 0

    @staticmethod
    def ring_size_of(capacity: int) -> int:
        """Give the `ring_size` of a map of this capacity, for budgeting before there is one.

        Examples
        --------
        >>> MultiMap.ring_size_of(1600)
        1701
        """
        return int(capacity) + int(capacity) // _SPARE_SHARE + 1

    @staticmethod
    def nbytes_of(capacity: int, max_load: float = DEFAULT_MAX_LOAD) -> int:
        """Give the `nbytes` of a map of this capacity and load, for budgeting before there is one.

        Examples
        --------
        >>> MultiMap.nbytes_of(1600) == MultiMap(1600).nbytes
        True
        """
        entry_bytes = 16 * MultiMap.ring_size_of(capacity)
        return count_slot_bytes(capacity, max_load) + entry_bytes + 8 * compiled.STATE_SIZE

    def __len__(self) -> int:
        return int(self._state[compiled.LIVE])

    @property
    def capacity(self) -> int:
        """The most entries that can be live at once."""
        return self._capacity

    @property
    def ring_size(self) -> int:
        """How many positions there are: the length of arrays that are indexed by ``seq % ring_size``."""
        return self._ring_size

    @property
    def nbytes(self) -> int:
        """Bytes held, from construction on: they do not depend on the number of entries."""
        return self.nbytes_of(self._capacity, self._max_load)

    @property
    def next_seq(self) -> int:
        """Above every sequence number handed out so far, and not above any still to come."""
        return int(self._state[compiled.NEXT_SEQ]) + self._seq_base

    @property
    def oldest(self) -> tuple[int, int] | None:
        """The sequence number and the code of the oldest live entry, or None."""
        if not compiled.advance_oldest(self._entries, self._state):
            return None
        seq = int(self._state[compiled.OLDEST_SEQ])
        return seq + self._seq_base, int(self._entries[2 * (seq % self._ring_size)])

    def insert(self, codes: Int64Array) -> Int64Array:
        """Append one entry per code and give their sequence numbers, which ascend.

        Raises
        ------
        BudgetError
            If they do not all fit; then none has been inserted.
        """
        codes = as_codes(codes)
        if len(self) + codes.size > self._capacity:
            raise BudgetError(
                f"{codes.size:,} more entries do not fit a MultiMap of capacity {self._capacity:,} that "
                f"holds {len(self):,}; remove entries first or use a larger one."
            )
        self._make_laps_available(codes.size)
        self._revision += 1
        seqs = np.empty(codes.size, dtype=np.int64)
        compiled.insert_codes(self._slots, self._entries, self._state, codes, seqs)
        return self._public(seqs)

    def probe(self, codes: Int64Array) -> tuple[Int32Array, Int64Array]:
        """Give all (row of `codes`, sequence number) pairs of equal codes: by row, then oldest first."""
        if self._state[compiled.STALE]:
            # Only the entries know their laps.
            rows, positions = self.probe_positions(codes)
            return rows, self.seqs_at(positions)
        ring = self._ring_size
        this_lap = int(self._state[compiled.NEXT_SEQ]) // ring * ring
        cursor = int(self._state[compiled.NEXT_SEQ]) - this_lap
        places = (cursor, this_lap + self._seq_base, this_lap - ring + self._seq_base)
        return self._probe_all(codes, places, np.dtype(np.int64))

    def probe_positions(self, codes: Int64Array) -> tuple[Int32Array, Int32Array]:
        """Give the pairs of `probe` with ring positions (``seq % ring_size``) instead of sequence numbers.

        Cheaper than `probe` where only what is stored at the positions is wanted.
        """
        return self._probe_all(codes, _POSITIONS, np.dtype(np.int32))

    def _probe_all(
        self, codes: Int64Array, places: tuple[int, int, int], dtype: np.dtype[Integer]
    ) -> tuple[Int32Array, npt.NDArray[Integer]]:
        codes = as_codes(codes)
        # Room for one pair per row first: enough for most batches, and then each code is searched once.
        rows, found, state = self._probe_from(codes, _BEGINNING, codes.size, places, dtype)
        if state.row == codes.size:
            return rows, found
        left = int(self.count(codes[state.row :]).sum(dtype=np.int64))
        if state.remaining:
            left -= int(self.count(codes[state.row : state.row + 1])[0]) - state.remaining
        more_rows, more_found, _ = self._probe_from(codes, state, left, places, dtype)
        return np.concatenate((rows, more_rows)), np.concatenate((found, more_found))

    def _probe_from(
        self,
        codes: Int64Array,
        state: ProbeState,
        max_pairs: int,
        places: tuple[int, int, int],
        dtype: np.dtype[Integer],
    ) -> tuple[Int32Array, npt.NDArray[Integer], ProbeState]:
        """Give at most `max_pairs` pairs from a place on, and the place to go on from."""
        rows = np.empty(max_pairs, dtype=np.int32)
        found = np.empty(max_pairs, dtype=dtype)
        written, row, position, remaining = compiled.probe_into(
            self._slots, self._entries, codes, state.row, state.position, state.remaining, *places, rows, found
        )
        if written < max_pairs:
            # A copy, since a view would keep all of the larger arrays in memory.
            rows, found = rows[:written].copy(), found[:written].copy()
        return rows, found, ProbeState(int(row), int(position), int(remaining), self._revision)

    def probe_limited(
        self, codes: Int64Array, state: ProbeState | None, max_pairs: int
    ) -> tuple[Int32Array, Int64Array, ProbeState | None]:
        """Give the next pairs of `probe`, at most `max_pairs` of them, and the state to go on with.

        Takes and raises what `probe_positions_limited` does.

        Examples
        --------
        >>> import numpy as np
        >>> window = MultiMap(3)
        >>> _ = window.insert(np.array([5, 5, 5]))
        >>> rows, seqs, state = window.probe_limited(np.array([5]), None, max_pairs=2)
        >>> seqs.tolist(), state is None
        ([0, 1], False)
        >>> rows, seqs, state = window.probe_limited(np.array([5]), state, max_pairs=2)
        >>> seqs.tolist(), state is None
        ([2], True)
        """
        rows, positions, state = self.probe_positions_limited(codes, state, max_pairs)
        return rows, self.seqs_at(positions), state

    def probe_positions_limited(
        self, codes: Int64Array, state: ProbeState | None, max_pairs: int
    ) -> tuple[Int32Array, Int32Array, ProbeState | None]:
        """Give the next pairs of `probe_positions`, at most `max_pairs` of them, and the state to go on with.

        Parameters
        ----------
        codes
            The same codes in every call of one probe.
        state
            None in the first call, then what the previous call gave. None comes back after the last pair; the
            last call may give no pairs.
        max_pairs
            At least 1.

        Raises
        ------
        ValueError
            If entries were inserted or removed since the probe began: what it gave before may no longer hold.

        Examples
        --------
        >>> import numpy as np
        >>> window = MultiMap(3)
        >>> _ = window.insert(np.array([5, 5, 5]))
        >>> rows, positions, state = window.probe_positions_limited(np.array([5]), None, max_pairs=2)
        >>> positions.tolist(), state is None
        ([0, 1], False)
        >>> rows, positions, state = window.probe_positions_limited(np.array([5]), state, max_pairs=2)
        >>> positions.tolist(), state is None
        ([2], True)
        """
        if max_pairs < 1:
            raise ValueError(f"A probe must be allowed at least 1 pair per call, not {max_pairs}.")
        codes = as_codes(codes)
        if state is None:
            state = _BEGINNING
        elif state.revision != self._revision:
            raise ValueError("The MultiMap has changed since this probe began; begin a new one.")
        rows, positions, state = self._probe_from(codes, state, max_pairs, _POSITIONS, np.dtype(np.int32))
        return rows, positions, None if state.row == codes.size else state

    def count(self, codes: Int64Array) -> Int32Array:
        """Give the number of live entries of each code."""
        codes = as_codes(codes)
        words = np.empty(codes.size, dtype=np.int64)
        find_words(self._slots, codes, words)
        words &= compiled.LOW_HALF
        return words.astype(np.int32)

    def contains(self, codes: Int64Array) -> BoolArray:
        """Tell for each code whether it has a live entry."""
        codes = as_codes(codes)
        words = np.empty(codes.size, dtype=np.int64)
        find_words(self._slots, codes, words)
        return np.not_equal(words, 0)

    def remove_oldest(self, count: int) -> Int64Array:
        """Remove the `count` oldest entries, or all if fewer, and give their numbers, which ascend."""
        if count < 0:
            raise ValueError(f"Cannot remove {count} entries.")
        self._revision += 1
        seqs = np.empty(min(int(count), len(self)), dtype=np.int64)
        compiled.remove_oldest_entries(self._slots, self._entries, self._state, seqs)
        return self._public(seqs)

    def oldest_seqs(self, count: int) -> Int64Array:
        """Give the numbers of the `count` oldest entries, or of all if there are fewer, without removing them.

        Examples
        --------
        >>> import numpy as np
        >>> window = MultiMap(4)
        >>> _ = window.insert(np.array([5, 9, 6]))
        >>> window.oldest_seqs(2).tolist(), len(window)
        ([0, 1], 3)
        """
        if count < 0:
            raise ValueError(f"There are no {count} oldest entries.")
        seqs = np.empty(min(int(count), len(self)), dtype=np.int64)
        compiled.collect_oldest(self._entries, self._state, seqs)
        return self._public(seqs)

    def remove_codes(self, codes: Int64Array) -> Int64Array:
        """Remove all entries of the codes and give their numbers: by row of `codes`, then oldest first.

        Codes without entries, and repetitions, are passed over.
        """
        codes = as_codes(codes)
        self._revision += 1
        # Repeated codes are counted repeatedly here, so this is an upper bound.
        at_most = min(int(self.count(codes).sum(dtype=np.int64)), len(self))
        seqs = np.empty(at_most, dtype=np.int64)
        removed = compiled.remove_codes_entries(self._slots, self._entries, self._state, codes, seqs)
        return self._public(seqs if removed == at_most else seqs[:removed].copy())

    def remove_seqs(self, seqs: Int64Array) -> int:
        """Remove the entries with these numbers and give how many there were, repetitions not counted.

        The time is proportional to all entries of the codes concerned, once per call: remove many at a time.

        Raises
        ------
        ValueError
            If one of them is not a live entry's; then none has been removed.
        """
        seqs = self._private(seqs)
        self._require_live(seqs)
        self._revision += 1
        return int(compiled.remove_seqs_entries(self._slots, self._entries, self._state, seqs))

    def live_seqs(self) -> Int64Array:
        """Give the numbers of all live entries, the oldest first."""
        seqs = np.empty(len(self), dtype=np.int64)
        compiled.collect_live(self._entries, seqs)
        seqs.sort()
        return self._public(seqs)

    def positions_between(self, low: int, high: int, start: int, max_count: int) -> tuple[Int64Array, int]:
        """Give ring positions of live entries with a code from low to high, both included, by a pass over the ring.

        Parameters
        ----------
        low, high
            The least and the greatest code.
        start
            The ring position to begin at: 0, or what the previous call gave.
        max_count
            The most positions to give, at least 1.

        Returns
        -------
        positions, next_start
            Ascending positions, and where to go on; `ring_size` when the pass is finished.

        Examples
        --------
        >>> import numpy as np
        >>> window = MultiMap(4)
        >>> _ = window.insert(np.array([5, 9, 6]))
        >>> window.positions_between(5, 8, 0, 10)[0].tolist()
        [0, 2]
        """
        if max_count < 1:
            raise ValueError(f"A pass must be allowed at least 1 position per call, not {max_count}.")
        positions = np.empty(min(max_count, len(self)) or 1, dtype=np.int64)
        found, place = compiled.collect_between(self._entries, low, high, start, positions)
        return positions[:found].copy(), int(place)

    def codes_of(self, seqs: Int64Array) -> Int64Array:
        """Give the codes of live entries.

        Raises
        ------
        ValueError
            If one of the numbers is not a live entry's.
        """
        seqs = self._private(seqs)
        self._require_live(seqs)
        codes = np.empty(seqs.size, dtype=np.int64)
        compiled.codes_at_seqs(self._entries, seqs, codes)
        return codes

    def seqs_at(self, positions: Int32Array | Int64Array) -> Int64Array:
        """Give the numbers of the live entries at ring positions, such as `probe_positions` gives."""
        seqs = np.empty(positions.size, dtype=np.int64)
        compiled.seqs_at_positions(self._entries, self._state, positions, seqs)
        return self._public(seqs)

    def codes_left_at(self, positions: Int32Array | Int64Array) -> Int64Array:
        """Give the codes of entries that were removed from ring positions, as long as nothing was inserted since.

        Examples
        --------
        >>> import numpy as np
        >>> window = MultiMap(4)
        >>> positions = window.positions_of(window.insert(np.array([5, 9])))
        >>> _ = window.remove_oldest(2)
        >>> window.codes_left_at(positions).tolist()
        [5, 9]
        """
        return self._entries[2 * positions]

    def positions_of(self, seqs: Int64Array) -> Int64Array:
        """Give the ring positions of entries: ``seq % ring_size``."""
        return seqs % self._ring_size

    def clear(self) -> None:
        """Remove all entries. Numbers go on from where they were."""
        self._revision += 1
        self._slots[:] = 0
        self._entries[:] = compiled.FREE
        self._state[compiled.LIVE] = 0
        self._state[compiled.STALE] = 0
        self._state[compiled.OLDEST_SEQ] = self._state[compiled.NEXT_SEQ]

    def resized(self, capacity: int) -> "MultiMap":
        """Give a map of another capacity with the same entries in the same order.

        Entries get new numbers, larger than any old one, since their ring positions change: entry i of the
        new map's `live_seqs` is entry i of this one's.

        Raises
        ------
        BudgetError
            If this map holds more entries than the new capacity.

        Examples
        --------
        >>> import numpy as np
        >>> small = MultiMap(2)
        >>> _ = small.insert(np.array([5, 6]))
        >>> large = small.resized(4)
        >>> large.codes_of(large.live_seqs()).tolist(), large.capacity
        ([5, 6], 4)
        """
        if len(self) > capacity:
            raise BudgetError(
                f"A MultiMap that holds {len(self):,} entries cannot get the capacity {capacity:,}; "
                f"remove entries first."
            )
        other = MultiMap(capacity, self._max_load)
        # A multiple of the ring keeps seq % ring_size equal to the position.
        other._seq_base = -(-self.next_seq // other._ring_size) * other._ring_size
        other.insert(self.codes_of(self.live_seqs()))
        return other

    def _public(self, seqs: Int64Array) -> Int64Array:
        """Turn the kernels' numbers into ours, in place."""
        if self._seq_base:
            seqs += self._seq_base
        return seqs

    def _private(self, seqs: Int64Array) -> Int64Array:
        seqs = np.ascontiguousarray(seqs, dtype=np.int64)
        return seqs - self._seq_base if self._seq_base else seqs

    def _require_live(self, seqs: Int64Array) -> None:
        dead = int(compiled.first_dead_seq(self._entries, seqs))
        if dead >= 0:
            raise ValueError(f"No live entry of the MultiMap has the number {int(seqs[dead]) + self._seq_base}.")

    def _make_laps_available(self, entry_count: int) -> None:
        """Count laps from the oldest live entry's again when their 31 bits are about to run out."""
        laps_needed = 2 + entry_count // (self._ring_size - self._capacity)
        ring = self._ring_size
        if self._state[compiled.NEXT_SEQ] // ring + laps_needed < self._last_lap:
            return
        compiled.advance_oldest(self._entries, self._state)
        laps = int(self._state[compiled.OLDEST_SEQ]) // ring
        words = self._entries[1::2]
        words[words >= 0] -= laps << 32
        self._state[compiled.OLDEST_SEQ] -= laps * ring
        self._state[compiled.NEXT_SEQ] -= laps * ring
        self._seq_base += laps * ring
        if self._state[compiled.NEXT_SEQ] // ring + laps_needed >= self._last_lap:
            raise InternalError("An entry has been live for 2**31 rounds of its MultiMap's ring.")
