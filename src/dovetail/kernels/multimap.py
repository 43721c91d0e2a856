"""A multi-map from join codes to entries in order of arrival, in memory fixed at construction.

It indexes a window of stream tuples. A batch of codes is appended, a batch is probed for all pairs, the oldest entries
are removed (MESHJOIN's expiry), or all entries of some codes are removed (HYBRIDJOIN, SSBJ). It is never rebuilt: the
slot of a removed code is closed by shifting its neighbours back, and the position of a removed entry is reused.

Memory per entry of capacity: with the default load of one third, 48 bytes of slots and 17 bytes of entries (16 for each
of 1 1/16 ring positions); with `DENSE_LOAD`, which windows in a budget use, 32 and 17. The spare positions let an
insertion find a free position in constant amortised time, however scattered the free positions are.
"""

from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from dovetail.core.arrays import BoolArray, Int32Array, Int64Array
from dovetail.core.errors import BudgetError, InternalError
from dovetail.kernels import _multimap_kernels as compiled
from dovetail.kernels._arrays import as_codes
from dovetail.kernels._slots import DEFAULT_MAX_LOAD, DENSE_LOAD, count_slot_bytes, find_words, make_slots

__all__ = ["DENSE_LOAD", "MAX_CAPACITY", "MultiMap", "ProbeState"]

Integer = TypeVar("Integer", bound=np.signedinteger[Any])

MAX_CAPACITY = 2_000_000_000
_SPARE_SHARE = 16


class ProbeState(NamedTuple):
    """The state of a probe in bounded steps, returned by and passed to `MultiMap.probe_limited`."""

    row: int
    position: int
    remaining: int
    revision: int


# Makes the kernel return plain ring positions.
_POSITIONS = (0, 0, 0)
_BEGINNING = ProbeState(row=0, position=0, remaining=0, revision=0)


class MultiMap:
    """Entries under int64 codes, any number per code, in order of arrival.

    An entry is identified by its *sequence number*: an int64 that grows with arrival and is never reused. Numbers may
    have gaps. ``seq % ring_size`` is different for any two live entries, so arrays of length `ring_size` can hold data
    of the entries at that position.

    ``capacity`` is the maximum number of live entries, ``max_load`` the largest fraction of slots in use. A higher load
    takes less memory and makes probes slower.

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

    # An entry stores its lap in 31 bits.
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
        # Added to the numbers of the kernels, which count laps from here.
        self._seq_base = 0
        self._revision = 0

    @staticmethod
    def ring_size_of(capacity: int) -> int:
        """The `ring_size` of a map of this capacity, for budgeting before it exists."""
        return int(capacity) + int(capacity) // _SPARE_SHARE + 1

    @staticmethod
    def nbytes_of(capacity: int, max_load: float = DEFAULT_MAX_LOAD) -> int:
        """The `nbytes` of a map of this capacity and load, for budgeting before it exists."""
        entry_bytes = 16 * MultiMap.ring_size_of(capacity)
        return count_slot_bytes(capacity, max_load) + entry_bytes + 8 * compiled.STATE_SIZE

    def __len__(self) -> int:
        return int(self._state[compiled.LIVE])

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def ring_size(self) -> int:
        """The number of positions: the length of arrays indexed by ``seq % ring_size``."""
        return self._ring_size

    @property
    def nbytes(self) -> int:
        """Bytes held, whatever the number of entries."""
        return self.nbytes_of(self._capacity, self._max_load)

    @property
    def next_seq(self) -> int:
        """A lower bound of future sequence numbers, larger than all numbers so far."""
        return int(self._state[compiled.NEXT_SEQ]) + self._seq_base

    @property
    def oldest(self) -> tuple[int, int] | None:
        """The sequence number and the code of the oldest live entry, or None."""
        if not compiled.advance_oldest(self._entries, self._state):
            return None
        seq = int(self._state[compiled.OLDEST_SEQ])
        return seq + self._seq_base, int(self._entries[2 * (seq % self._ring_size)])

    def insert(self, codes: Int64Array) -> Int64Array:
        """Append one entry per code and return their sequence numbers, ascending. If they do not all fit, none is
        inserted.
        """
        codes = as_codes(codes)
        if len(self) + codes.size > self._capacity:
            raise BudgetError(
                f"{codes.size:,} more entries do not fit in a MultiMap of capacity {self._capacity:,} that "
                f"holds {len(self):,}; remove entries first or use a larger one."
            )
        self._make_laps_available(codes.size)
        self._revision += 1
        seqs = np.empty(codes.size, dtype=np.int64)
        compiled.insert_codes(self._slots, self._entries, self._state, codes, seqs)
        return self._public(seqs)

    def probe(self, codes: Int64Array) -> tuple[Int32Array, Int64Array]:
        """Return all (row of `codes`, sequence number) pairs of equal codes, by row, then oldest first."""
        if self._state[compiled.STALE]:
            # Only the entries know their lap.
            rows, positions = self.probe_positions(codes)
            return rows, self.seqs_at(positions)
        ring = self._ring_size
        this_lap = int(self._state[compiled.NEXT_SEQ]) // ring * ring
        cursor = int(self._state[compiled.NEXT_SEQ]) - this_lap
        places = (cursor, this_lap + self._seq_base, this_lap - ring + self._seq_base)
        return self._probe_all(codes, places, np.dtype(np.int64))

    def probe_positions(self, codes: Int64Array) -> tuple[Int32Array, Int32Array]:
        """The pairs of `probe` with ring positions (``seq % ring_size``) instead of sequence numbers: cheaper than
        `probe`.
        """
        return self._probe_all(codes, _POSITIONS, np.dtype(np.int32))

    def _probe_all(
        self, codes: Int64Array, places: tuple[int, int, int], dtype: np.dtype[Integer]
    ) -> tuple[Int32Array, npt.NDArray[Integer]]:
        codes = as_codes(codes)
        # Start with room for one pair per row: enough for most batches, and then each code is searched once.
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
        """At most `max_pairs` pairs, starting at `state`, and the state to continue from."""
        rows = np.empty(max_pairs, dtype=np.int32)
        found = np.empty(max_pairs, dtype=dtype)
        written, row, position, remaining = compiled.probe_into(
            self._slots, self._entries, codes, state.row, state.position, state.remaining, *places, rows, found
        )
        if written < max_pairs:
            # A view would keep the larger arrays in memory.
            rows, found = rows[:written].copy(), found[:written].copy()
        return rows, found, ProbeState(int(row), int(position), int(remaining), self._revision)

    def probe_limited(
        self, codes: Int64Array, state: ProbeState | None, max_pairs: int
    ) -> tuple[Int32Array, Int64Array, ProbeState | None]:
        """`probe_positions_limited` with sequence numbers instead of positions."""
        rows, positions, state = self.probe_positions_limited(codes, state, max_pairs)
        return rows, self.seqs_at(positions), state

    def probe_positions_limited(
        self, codes: Int64Array, state: ProbeState | None, max_pairs: int
    ) -> tuple[Int32Array, Int32Array, ProbeState | None]:
        """The next pairs of `probe_positions`, at most `max_pairs`, and the state for the next call.

        Pass the same codes to every call of one probe. The state is None before the first call and after the last pair;
        the last call may return no pairs. Raises a `ValueError` if entries were inserted or removed since the probe
        started.
        """
        if max_pairs < 1:
            raise ValueError(f"A probe must be allowed at least 1 pair per call, not {max_pairs}.")
        codes = as_codes(codes)
        if state is None:
            state = _BEGINNING
        elif state.revision != self._revision:
            raise ValueError("The MultiMap has changed since this probe started; start a new one.")
        rows, positions, state = self._probe_from(codes, state, max_pairs, _POSITIONS, np.dtype(np.int32))
        return rows, positions, None if state.row == codes.size else state

    def count(self, codes: Int64Array) -> Int32Array:
        """The number of live entries of each code."""
        codes = as_codes(codes)
        words = np.empty(codes.size, dtype=np.int64)
        find_words(self._slots, codes, words)
        words &= compiled.LOW_HALF
        return words.astype(np.int32)

    def contains(self, codes: Int64Array) -> BoolArray:
        """Whether each code has a live entry."""
        codes = as_codes(codes)
        words = np.empty(codes.size, dtype=np.int64)
        find_words(self._slots, codes, words)
        return np.not_equal(words, 0)

    def remove_oldest(self, count: int) -> Int64Array:
        """Remove the `count` oldest entries, or all if fewer, and return their numbers in ascending order."""
        if count < 0:
            raise ValueError(f"Cannot remove {count} entries.")
        self._revision += 1
        seqs = np.empty(min(int(count), len(self)), dtype=np.int64)
        compiled.remove_oldest_entries(self._slots, self._entries, self._state, seqs)
        return self._public(seqs)

    def oldest_seqs(self, count: int) -> Int64Array:
        """The numbers of the `count` oldest entries, or of all if fewer, without removing them."""
        if count < 0:
            raise ValueError(f"There are no {count} oldest entries.")
        seqs = np.empty(min(int(count), len(self)), dtype=np.int64)
        compiled.collect_oldest(self._entries, self._state, seqs)
        return self._public(seqs)

    def remove_codes(self, codes: Int64Array) -> Int64Array:
        """Remove all entries of the codes and return their numbers, by row of `codes`, then oldest first.

        Codes without entries and repeated codes are skipped.
        """
        codes = as_codes(codes)
        self._revision += 1
        # Repeated codes are counted repeatedly here, so this is an upper bound.
        at_most = min(int(self.count(codes).sum(dtype=np.int64)), len(self))
        seqs = np.empty(at_most, dtype=np.int64)
        removed = compiled.remove_codes_entries(self._slots, self._entries, self._state, codes, seqs)
        return self._public(seqs if removed == at_most else seqs[:removed].copy())

    def remove_seqs(self, seqs: Int64Array) -> int:
        """Remove the entries with these numbers and return how many, counting repeated numbers once.

        If one is not the number of a live entry, none is removed. Takes time proportional to all entries of the
        affected codes, once per call: remove many at a time.
        """
        seqs = self._private(seqs)
        self._require_live(seqs)
        self._revision += 1
        return int(compiled.remove_seqs_entries(self._slots, self._entries, self._state, seqs))

    def live_seqs(self) -> Int64Array:
        """The numbers of all live entries, oldest first."""
        seqs = np.empty(len(self), dtype=np.int64)
        compiled.collect_live(self._entries, seqs)
        seqs.sort()
        return self._public(seqs)

    def positions_between(self, low: int, high: int, start: int, max_count: int) -> tuple[Int64Array, int]:
        """Ring positions of live entries with a code in [low, high], by a pass over the ring.

        ``start`` is the ring position to start at: 0, or ``next_start`` of the previous call. Returns at most
        ``max_count`` positions, ascending, and ``next_start``: `ring_size` when the pass is finished.
        """
        if max_count < 1:
            raise ValueError(f"A pass must be allowed at least 1 position per call, not {max_count}.")
        positions = np.empty(min(max_count, len(self)) or 1, dtype=np.int64)
        found, place = compiled.collect_between(self._entries, low, high, start, positions)
        return positions[:found].copy(), int(place)

    def codes_of(self, seqs: Int64Array) -> Int64Array:
        """The codes of live entries; a `ValueError` if one is not live."""
        seqs = self._private(seqs)
        self._require_live(seqs)
        codes = np.empty(seqs.size, dtype=np.int64)
        compiled.codes_at_seqs(self._entries, seqs, codes)
        return codes

    def seqs_at(self, positions: Int32Array | Int64Array) -> Int64Array:
        """The numbers of the live entries at ring positions, such as those from `probe_positions`."""
        seqs = np.empty(positions.size, dtype=np.int64)
        compiled.seqs_at_positions(self._entries, self._state, positions, seqs)
        return self._public(seqs)

    def codes_left_at(self, positions: Int32Array | Int64Array) -> Int64Array:
        """The codes of entries removed from ring positions, if nothing was inserted since."""
        return self._entries[2 * positions]

    def positions_of(self, seqs: Int64Array) -> Int64Array:
        return seqs % self._ring_size

    def clear(self) -> None:
        """Remove all entries. Sequence numbers continue."""
        self._revision += 1
        self._slots[:] = 0
        self._entries[:] = compiled.FREE
        self._state[compiled.LIVE] = 0
        self._state[compiled.STALE] = 0
        self._state[compiled.OLDEST_SEQ] = self._state[compiled.NEXT_SEQ]

    def resized(self, capacity: int) -> "MultiMap":
        """A map of another capacity with the same entries in the same order; refused if they do not fit.

        Entries get new numbers, larger than any old one, because their ring positions change. Entry i of the new map's
        `live_seqs` is entry i of this one's.
        """
        if len(self) > capacity:
            raise BudgetError(
                f"A MultiMap that holds {len(self):,} entries cannot be resized to capacity {capacity:,}; "
                f"remove entries first."
            )
        other = MultiMap(capacity, self._max_load)
        # A multiple of the ring keeps seq % ring_size equal to the position.
        other._seq_base = -(-self.next_seq // other._ring_size) * other._ring_size
        other.insert(self.codes_of(self.live_seqs()))
        return other

    def _public(self, seqs: Int64Array) -> Int64Array:
        """Convert numbers of the kernels to public sequence numbers, in place."""
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
        """Renumber laps from the oldest live entry when their 31 bits are about to overflow."""
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
            raise InternalError("An entry has been live for 2**31 laps of its MultiMap's ring.")
