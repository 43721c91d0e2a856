"""A table from join codes to three small numbers: first cached row, row count and request frequency.

The three share a slot's word, so a probe, its answer and its frequency count cost one random read together:

==========  =======  ====================================================================================
field       bits     meaning
==========  =======  ====================================================================================
row         31       number of the first cached row, or any number that the owner wants to store
count       12       number of rows; 0: known to have none
frequency   19       how often the code was requested; saturates instead of overflowing
==========  =======  ====================================================================================

With the default load, an entry of capacity costs 20 bytes. A lower load makes lookups of absent codes faster.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.core.errors import BudgetError
from dovetail.kernels._arrays import as_codes
from dovetail.kernels._slots import BLOCK, count_slot_bytes, erase_slot, find_slot, hash_block, make_slots

__all__ = ["MAX_COUNT", "MAX_FREQUENCY", "MAX_ROW", "ValueTable", "Values"]

MAX_LOAD = 0.8
_PRESENT = np.int64(1 << 62)  # a word of 0 marks an empty slot
_ROW_SHIFT, _COUNT_SHIFT = 31, 19
MAX_ROW = (1 << 31) - 1
MAX_COUNT = (1 << 12) - 1
MAX_FREQUENCY = (1 << 19) - 1
_FREQUENCY = np.int64(MAX_FREQUENCY)
_COUNT = np.int64(MAX_COUNT << _COUNT_SHIFT)
_ONE_ROW = np.int64(1 << _COUNT_SHIFT)


@njit(cache=True)
def _find_slots(slots: Any, codes: Any, out_slots: Any) -> None:
    """Write the slot of each code; -1 if it is not in the table."""
    homes = np.empty(BLOCK, dtype=np.uint32)
    for start in range(0, codes.size, BLOCK):
        stop = min(start + BLOCK, codes.size)
        # Prefetches the lines of the block.
        hash_block(slots, codes, start, stop, homes)
        for row in range(start, stop):
            slot = find_slot(slots, codes[row])
            out_slots[row] = slot if slots[2 * slot + 1] != 0 else -1


@njit(cache=True)
def _put(slots: Any, codes: Any, words: Any) -> Any:
    """Set the word of each code and return how many codes are new."""
    added = 0
    for row in range(codes.size):
        slot = find_slot(slots, codes[row])
        added += slots[2 * slot + 1] == 0
        slots[2 * slot] = codes[row]
        slots[2 * slot + 1] = words[row]
    return added


@njit(cache=True)
def _remove(slots: Any, codes: Any, out_was_there: Any) -> Any:
    removed = 0
    for row in range(codes.size):
        slot = find_slot(slots, codes[row])
        was_there = slots[2 * slot + 1] != 0
        out_was_there[row] = was_there
        if was_there:
            erase_slot(slots, slot)
            removed += 1
    return removed


@njit(cache=True)
def _observe(slots: Any, found: Any) -> None:
    for row in range(found.size):
        slot = found[row]
        if slot >= 0 and slots[2 * slot + 1] & _FREQUENCY != _FREQUENCY:
            slots[2 * slot + 1] += 1


@njit(cache=True)
def _count_rows(slots: Any, codes: Any) -> None:
    homes = np.empty(BLOCK, dtype=np.uint32)
    for start in range(0, codes.size, BLOCK):
        stop = min(start + BLOCK, codes.size)
        hash_block(slots, codes, start, stop, homes)
        for row in range(start, stop):
            slot = find_slot(slots, codes[row])
            word = slots[2 * slot + 1]
            if word != 0 and word & _COUNT != _COUNT:
                slots[2 * slot + 1] = word + _ONE_ROW


class Values(NamedTuple):
    """The entries of a `ValueTable`, in no particular order."""

    codes: Int64Array
    rows: Int64Array
    counts: Int64Array
    frequencies: Int64Array


class ValueTable:
    """A row number, a row count and a frequency per code, in memory fixed at construction.

    ``capacity`` is the maximum number of codes, ``max_load`` the largest fraction of slots in use.

    >>> import numpy as np
    >>> table = ValueTable(10)
    >>> table.put(np.array([7, 8]), rows=np.array([0, 3]), counts=np.array([3, 0]))
    >>> found = table.find(np.array([8, 9, 7, 7]))
    >>> (found >= 0).tolist(), table.counts_at(found[found >= 0]).tolist()
    ([True, False, True, True], [0, 3, 3])
    >>> table.observe(found)
    >>> sorted(zip(*(column.tolist() for column in table.items())))
    [(7, 0, 3, 2), (8, 3, 0, 1)]
    """

    def __init__(self, capacity: int, max_load: float = MAX_LOAD) -> None:
        if not 0.1 <= max_load <= 0.9:
            raise ValueError(f"The load of a ValueTable must be between 0.1 and 0.9, not {max_load}.")
        if not 1 <= capacity < MAX_ROW:
            raise ValueError(f"A ValueTable holds between 1 and {MAX_ROW - 1:,} codes, not {capacity:,}.")
        self._capacity = int(capacity)
        self._max_load = max_load
        self._slots = make_slots(self._capacity, max_load)
        self._size = 0

    @staticmethod
    def nbytes_of(capacity: int, max_load: float = MAX_LOAD) -> int:
        """The `nbytes` of a table of this capacity and load, for budgeting before it exists."""
        return count_slot_bytes(capacity, max_load)

    @staticmethod
    def capacity_within(size_bytes: int, max_load: float = MAX_LOAD) -> int:
        """The largest capacity of a table of at most `size_bytes`; 0 if even one code does not fit."""
        capacity = max(0, int((size_bytes - 64) // 16 // 4 * 4 * max_load))
        while capacity and count_slot_bytes(capacity, max_load) > size_bytes:
            capacity -= 1
        return capacity

    @classmethod
    def over(cls, slots: Int64Array, size: int, max_load: float = MAX_LOAD) -> "ValueTable":
        """A table over existing `slots`, which may be mapped from a file and read-only.

        The slots must start at a multiple of 64 bytes. Do not call methods that change the table on read-only slots.
        """
        table = cls.__new__(cls)
        table._capacity, table._max_load, table._slots, table._size = size, max_load, slots, size
        return table

    @property
    def slots(self) -> Int64Array:
        """The raw table: a code and its word per slot."""
        return self._slots

    def __len__(self) -> int:
        return self._size

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def nbytes(self) -> int:
        return self.nbytes_of(self._capacity, self._max_load)

    # ---------------------------------------------------------------- lookup

    def find(self, codes: Int64Array) -> Int64Array:
        """The slot of each code; -1 if it is not in the table. Slots are valid until the table changes."""
        codes = as_codes(codes)
        found = np.empty(codes.size, dtype=np.int64)
        _find_slots(self._slots, codes, found)
        return found

    def rows_at(self, found: Int64Array) -> Int64Array:
        return self._slots[2 * found + 1] >> _ROW_SHIFT & MAX_ROW

    def counts_at(self, found: Int64Array) -> Int64Array:
        return self._slots[2 * found + 1] >> _COUNT_SHIFT & MAX_COUNT

    def frequencies_at(self, found: Int64Array) -> Int64Array:
        return self._slots[2 * found + 1] & MAX_FREQUENCY

    def items(self) -> Values:
        found = np.flatnonzero(self._slots[1::2])
        codes = self._slots[2 * found]
        return Values(codes, self.rows_at(found), self.counts_at(found), self.frequencies_at(found))

    # ---------------------------------------------------------------- changes

    def put(
        self,
        codes: Int64Array,
        rows: Int64Array | int = 0,
        counts: Int64Array | int = 0,
        frequencies: Int64Array | int = 0,
    ) -> None:
        """Set or replace the entries of codes. Counts and frequencies saturate. If new codes do not all fit, nothing is
        changed.
        """
        codes = as_codes(codes)
        if self._size + codes.size > self._capacity:
            added = np.unique(codes[self.find(codes) < 0]).size
            if self._size + added > self._capacity:
                raise BudgetError(
                    f"{added:,} more codes do not fit in a ValueTable of capacity {self._capacity:,} that holds "
                    f"{self._size:,}; remove codes first or use a larger one."
                )
        words = np.full(codes.size, _PRESENT)
        words |= np.asarray(rows, np.int64) << _ROW_SHIFT
        words |= np.minimum(counts, MAX_COUNT).astype(np.int64) << _COUNT_SHIFT
        words |= np.minimum(frequencies, MAX_FREQUENCY).astype(np.int64)
        self._size += int(_put(self._slots, codes, words))

    def remove(self, codes: Int64Array) -> BoolArray:
        """Remove the codes and return for each whether it was in the table."""
        codes = as_codes(codes)
        was_there = np.empty(codes.size, dtype=np.bool_)
        self._size -= int(_remove(self._slots, codes, was_there))
        return was_there

    def observe(self, found: Int64Array) -> None:
        """Add one to the frequency of each slot per occurrence; -1 is ignored."""
        _observe(self._slots, found)

    def count_rows(self, codes: Int64Array) -> None:
        """Add one to the row count of each code in the table, per occurrence."""
        _count_rows(self._slots, as_codes(codes))

    def reset_frequencies(self) -> None:
        self._slots[1::2] &= ~_FREQUENCY

    def resized(self, capacity: int) -> "ValueTable":
        """A table of another capacity, at least its length, with the same entries."""
        other = ValueTable(max(capacity, self._size, 1), self._max_load)
        other.put(*self.items())
        return other
