"""What is known of join values: where their cached rows are, how many they have, how often they were asked for.

A table from codes to three small numbers that share a slot's word, so that a probe, the rows that answer it and the
count of how often it was asked cost one random read together:

==========  =======  ====================================================================================
field       bits     meaning
==========  =======  ====================================================================================
row         31       number of the value's first cached row, or any number that the owner wants to keep
count       12       how many rows it has; 0: it is known to have none
frequency   19       how often it was asked for; stops at its largest value instead of running over
==========  =======  ====================================================================================

With the default load an entry of capacity costs 20 bytes; looking for codes that are not there is faster with a lower
one.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from dovetail.errors import BudgetError
from dovetail.kernels._arrays import BoolArray, Int64Array, as_codes
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
    """Write each code's slot, -1 where it is not in the table."""
    homes = np.empty(BLOCK, dtype=np.uint32)
    for start in range(0, codes.size, BLOCK):
        stop = min(start + BLOCK, codes.size)
        # Asks for the block's lines, so that they are on their way while the first ones are compared.
        hash_block(slots, codes, start, stop, homes)
        for row in range(start, stop):
            slot = find_slot(slots, codes[row])
            out_slots[row] = slot if slots[2 * slot + 1] != 0 else -1


@njit(cache=True)
def _put(slots: Any, codes: Any, words: Any) -> Any:
    """Set each code's word and give how many codes are new."""
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
    """Join values of a `ValueTable`, in no particular order."""

    codes: Int64Array
    rows: Int64Array
    counts: Int64Array
    frequencies: Int64Array


class ValueTable:
    """A row number, a count of rows and a frequency for each of a set of codes, in memory fixed at construction.

    Parameters
    ----------
    capacity
        The most codes that can be in the table at once.
    max_load
        The largest share of the slots that may be taken.

    Examples
    --------
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
        """Give the `nbytes` of a table of this capacity and load, for budgeting before there is one.

        Examples
        --------
        >>> ValueTable.nbytes_of(1000) == ValueTable(1000).nbytes
        True
        """
        return count_slot_bytes(capacity, max_load)

    @staticmethod
    def capacity_within(size_bytes: int, max_load: float = MAX_LOAD) -> int:
        """Give the largest capacity of a table of at most so many bytes; 0 if there is none.

        Examples
        --------
        >>> ValueTable.nbytes_of(ValueTable.capacity_within(4096)) <= 4096
        True
        """
        capacity = max(0, int((size_bytes - 64) // 16 // 4 * 4 * max_load))
        while capacity and count_slot_bytes(capacity, max_load) > size_bytes:
            capacity -= 1
        return capacity

    @classmethod
    def over(cls, slots: Int64Array, size: int, max_load: float = MAX_LOAD) -> "ValueTable":
        """Give a table over the `slots` of another one, which may be mapped from a file and read-only.

        They begin at a multiple of 64 bytes. What changes the table must not be called on read-only slots.

        Examples
        --------
        >>> import numpy as np
        >>> table = ValueTable(10)
        >>> table.put(np.array([7]), rows=np.array([3]))
        >>> again = ValueTable.over(table.slots, len(table))
        >>> again.rows_at(again.find(np.array([7]))).tolist()
        [3]
        """
        table = cls.__new__(cls)
        table._capacity, table._max_load, table._slots, table._size = size, max_load, slots, size
        return table

    @property
    def slots(self) -> Int64Array:
        """The table itself: a code and what is known of it, slot after slot."""
        return self._slots

    def __len__(self) -> int:
        return self._size

    @property
    def capacity(self) -> int:
        """The most codes that can be in the table at once."""
        return self._capacity

    @property
    def nbytes(self) -> int:
        """Bytes held, from construction on."""
        return self.nbytes_of(self._capacity, self._max_load)

    # ---------------------------------------------------------------- looking up

    def find(self, codes: Int64Array) -> Int64Array:
        """Give the slot of each code, -1 where it is not in the table; slots are good until the table changes."""
        codes = as_codes(codes)
        found = np.empty(codes.size, dtype=np.int64)
        _find_slots(self._slots, codes, found)
        return found

    def rows_at(self, found: Int64Array) -> Int64Array:
        """Give the row numbers of slots."""
        return self._slots[2 * found + 1] >> _ROW_SHIFT & MAX_ROW

    def counts_at(self, found: Int64Array) -> Int64Array:
        """Give the numbers of rows of slots."""
        return self._slots[2 * found + 1] >> _COUNT_SHIFT & MAX_COUNT

    def frequencies_at(self, found: Int64Array) -> Int64Array:
        """Give the frequencies of slots."""
        return self._slots[2 * found + 1] & MAX_FREQUENCY

    def items(self) -> Values:
        """Give everything that the table holds."""
        found = np.flatnonzero(self._slots[1::2])
        codes = self._slots[2 * found]
        return Values(codes, self.rows_at(found), self.counts_at(found), self.frequencies_at(found))

    # ---------------------------------------------------------------- changing

    def put(
        self,
        codes: Int64Array,
        rows: Int64Array | int = 0,
        counts: Int64Array | int = 0,
        frequencies: Int64Array | int = 0,
    ) -> None:
        """Set what is known of codes, replacing what was; counts and frequencies stop at their largest values.

        Raises
        ------
        BudgetError
            If the new codes do not all fit; then nothing has been changed.
        """
        codes = as_codes(codes)
        if self._size + codes.size > self._capacity:
            added = np.unique(codes[self.find(codes) < 0]).size
            if self._size + added > self._capacity:
                raise BudgetError(
                    f"{added:,} more codes do not fit a ValueTable of capacity {self._capacity:,} that holds "
                    f"{self._size:,}; remove codes first or use a larger one."
                )
        words = np.full(codes.size, _PRESENT)
        words |= np.asarray(rows, np.int64) << _ROW_SHIFT
        words |= np.minimum(counts, MAX_COUNT).astype(np.int64) << _COUNT_SHIFT
        words |= np.minimum(frequencies, MAX_FREQUENCY).astype(np.int64)
        self._size += int(_put(self._slots, codes, words))

    def remove(self, codes: Int64Array) -> BoolArray:
        """Remove the codes and tell for each whether it was there."""
        codes = as_codes(codes)
        was_there = np.empty(codes.size, dtype=np.bool_)
        self._size -= int(_remove(self._slots, codes, was_there))
        return was_there

    def observe(self, found: Int64Array) -> None:
        """Add one to the frequency of each slot, as often as it is given; -1 is passed over."""
        _observe(self._slots, found)

    def count_rows(self, codes: Int64Array) -> None:
        """Add one to the count of each code that is in the table, as often as it is given."""
        _count_rows(self._slots, as_codes(codes))

    def reset_frequencies(self) -> None:
        """Begin counting anew: every frequency becomes 0."""
        self._slots[1::2] &= ~_FREQUENCY

    def resized(self, capacity: int) -> "ValueTable":
        """Give a table of another capacity, at least its length, that knows the same.

        Examples
        --------
        >>> import numpy as np
        >>> small = ValueTable(1)
        >>> small.put(np.array([5]), counts=np.array([2]))
        >>> small.resized(9).items().counts.tolist()
        [2]
        """
        other = ValueTable(max(capacity, self._size, 1), self._max_load)
        other.put(*self.items())
        return other
