"""A map from join codes to one int64 each, in memory fixed at construction.

It holds what the operators know about a join value: how often it was seen in this cycle, at which row its
cached tuples begin, that it has no match. Slots are 16 bytes (code and value together, so that a lookup is
one random read); a removed slot is closed by shifting its neighbours back, so the table never needs to be
rebuilt. With the default load of at most one half, an entry of capacity costs 32 bytes.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from dovetail.errors import BudgetError
from dovetail.kernels._arrays import BoolArray, Int64Array, as_codes
from dovetail.kernels._slots import DEFAULT_MAX_LOAD, count_slot_bytes, erase_slot, find_slot, find_words, make_slots
from dovetail.kernels.multimap import MAX_CAPACITY

# A slot's word is the value with the sign bit flipped, because a word of 0 marks an empty slot: so the smallest int64
# is the one value that cannot be stored.
_FLIP = np.int64(np.iinfo(np.int64).min)


@njit(cache=True)
def _turn_words_into_values(words: Any, default: Any) -> None:
    for i in range(words.size):
        words[i] = default if words[i] == 0 else words[i] ^ _FLIP


@njit(cache=True)
def _put_values(slots: Any, codes: Any, values: Any) -> Any:
    """Set each code's value and give how many codes are new."""
    added = 0
    for row in range(codes.size):
        slot = find_slot(slots, codes[row])
        added += slots[2 * slot + 1] == 0
        slots[2 * slot] = codes[row]
        slots[2 * slot + 1] = values[row] ^ _FLIP
    return added


@njit(cache=True)
def _add_values(slots: Any, codes: Any, amounts: Any, out_totals: Any) -> Any:
    """Add to each code's value, 0 where it has none, and give how many codes are new."""
    added = 0
    for row in range(codes.size):
        slot = find_slot(slots, codes[row])
        total = amounts[row]
        if slots[2 * slot + 1] == 0:
            slots[2 * slot] = codes[row]
            added += 1
        else:
            total += slots[2 * slot + 1] ^ _FLIP
        slots[2 * slot + 1] = total ^ _FLIP
        out_totals[row] = total
    return added


@njit(cache=True)
def _remove_codes(slots: Any, codes: Any, out_was_there: Any) -> Any:
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
def _collect_items(slots: Any, out_codes: Any, out_values: Any) -> None:
    found = 0
    for slot in range(slots.size // 2):
        if slots[2 * slot + 1] != 0:
            out_codes[found] = slots[2 * slot]
            out_values[found] = slots[2 * slot + 1] ^ _FLIP
            found += 1


class CodeMap:
    """One int64 value for each of a set of int64 codes.

    Any value may be stored except the smallest int64. In a batch with repeated codes the later ones see what
    the earlier ones did.

    Parameters
    ----------
    capacity
        The most codes that can be in the map at once.
    max_load
        The largest share of the slots that may be taken; less memory for slower lookups as it grows.

    Examples
    --------
    >>> import numpy as np
    >>> seen = CodeMap(capacity=10)
    >>> seen.add(np.array([7, 8, 7])).tolist()
    [1, 1, 2]
    >>> seen.get(np.array([7, 9]), default=0).tolist()
    [2, 0]
    """

    def __init__(self, capacity: int, max_load: float = DEFAULT_MAX_LOAD) -> None:
        if not 1 <= capacity <= MAX_CAPACITY:
            raise ValueError(f"A CodeMap holds between 1 and {MAX_CAPACITY:,} codes, not {capacity:,}.")
        if not 0.1 <= max_load <= 0.9:
            raise ValueError(f"The load of a CodeMap must be between 0.1 and 0.9, not {max_load}.")
        self._capacity = int(capacity)
        self._max_load = float(max_load)
        self._slots = make_slots(capacity, max_load)
        self._size = 0

    @staticmethod
    def nbytes_of(capacity: int, max_load: float = DEFAULT_MAX_LOAD) -> int:
        """Give the `nbytes` of a map of this capacity and load, for budgeting before there is one.

        Examples
        --------
        >>> CodeMap.nbytes_of(1000)
        32064
        """
        return count_slot_bytes(capacity, max_load)

    def __len__(self) -> int:
        return self._size

    @property
    def capacity(self) -> int:
        """The most codes that can be in the map at once."""
        return self._capacity

    @property
    def nbytes(self) -> int:
        """Bytes held, from construction on: they do not depend on the number of codes."""
        return self.nbytes_of(self._capacity, self._max_load)

    def insert(self, codes: Int64Array, values: Int64Array) -> int:
        """Set the codes' values, replacing what was there, and give how many codes are new.

        Raises
        ------
        BudgetError
            If the new codes do not all fit; then nothing has been changed.
        """
        codes, values = as_codes(codes), _as_values(values, codes.size)
        if codes.size and values.min() == _FLIP:
            raise ValueError("The smallest int64 cannot be a value of a CodeMap: it marks empty slots.")
        self._require_room(codes)
        added = int(_put_values(self._slots, codes, values))
        self._size += added
        return added

    def add(self, codes: Int64Array, amounts: Int64Array | int = 1) -> Int64Array:
        """Add to the codes' values (0 for a new code) and give the sums.

        Raises
        ------
        BudgetError
            If the new codes do not all fit; then nothing has been changed.
        """
        codes = as_codes(codes)
        if isinstance(amounts, int):
            amounts = np.full(codes.size, amounts, dtype=np.int64)
        amounts = _as_values(amounts, codes.size)
        self._require_room(codes)
        totals = np.empty(codes.size, dtype=np.int64)
        self._size += int(_add_values(self._slots, codes, amounts, totals))
        return totals

    def get(self, codes: Int64Array, default: int = -1) -> Int64Array:
        """Give the codes' values, `default` for those that are not in the map."""
        codes = as_codes(codes)
        words = np.empty(codes.size, dtype=np.int64)
        find_words(self._slots, codes, words)
        _turn_words_into_values(words, default)
        return words

    def contains(self, codes: Int64Array) -> BoolArray:
        """Tell for each code whether it is in the map."""
        codes = as_codes(codes)
        words = np.empty(codes.size, dtype=np.int64)
        find_words(self._slots, codes, words)
        return np.not_equal(words, 0)

    def remove(self, codes: Int64Array) -> BoolArray:
        """Remove the codes and tell for each whether it was there."""
        codes = as_codes(codes)
        was_there = np.empty(codes.size, dtype=np.bool_)
        self._size -= int(_remove_codes(self._slots, codes, was_there))
        return was_there

    def items(self) -> tuple[Int64Array, Int64Array]:
        """Give all codes and their values, in no particular order."""
        codes = np.empty(self._size, dtype=np.int64)
        values = np.empty(self._size, dtype=np.int64)
        _collect_items(self._slots, codes, values)
        return codes, values

    def clear(self) -> None:
        """Remove all codes."""
        self._slots[:] = 0
        self._size = 0

    def resized(self, capacity: int) -> "CodeMap":
        """Give a map of another capacity with the same codes and values.

        Raises
        ------
        BudgetError
            If this map holds more codes than the new capacity.

        Examples
        --------
        >>> import numpy as np
        >>> small = CodeMap(2)
        >>> small.insert(np.array([5]), np.array([50]))
        1
        >>> small.resized(4).get(np.array([5])).tolist()
        [50]
        """
        if self._size > capacity:
            raise BudgetError(
                f"A CodeMap that holds {self._size:,} codes cannot get the capacity {capacity:,}; remove codes first."
            )
        other = CodeMap(capacity, self._max_load)
        other.insert(*self.items())
        return other

    def _require_room(self, codes: Int64Array) -> None:
        if self._size + codes.size <= self._capacity:
            return
        added = np.unique(codes[~self.contains(codes)]).size
        if self._size + added > self._capacity:
            raise BudgetError(
                f"{added:,} more codes do not fit a CodeMap of capacity {self._capacity:,} that holds "
                f"{self._size:,}; remove codes first or use a larger one."
            )


def _as_values(values: npt.NDArray[np.integer[Any]], size: int) -> Int64Array:
    if values.shape != (size,):
        raise ValueError(f"There must be one value for each of the {size:,} codes, not {values.shape}.")
    return np.ascontiguousarray(values, dtype=np.int64)
