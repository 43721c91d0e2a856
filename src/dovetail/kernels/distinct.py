"""The distinct codes of a batch, so that each is looked up once."""

from typing import Any

import numpy as np
from numba import njit

from dovetail.core.arrays import Int32Array, Int64Array
from dovetail.kernels._arrays import as_codes
from dovetail.kernels.hashing import home_slot

__all__ = ["distinct_codes"]


@njit(cache=True)
def _number_codes(codes: Any, slots: Any, out_distinct: Any, out_numbers: Any) -> Any:
    """Number the codes in order of first occurrence and return how many there are. All slots must be -1."""
    found = 0
    slot_count = slots.size
    for row in range(codes.size):
        code = codes[row]
        slot = home_slot(code, slot_count)
        while True:
            number = slots[slot]
            if number < 0:
                slots[slot] = found
                out_distinct[found] = code
                out_numbers[row] = found
                found += 1
                break
            if out_distinct[number] == code:
                out_numbers[row] = number
                break
            slot += 1
            if slot == slot_count:
                slot = 0
    return found


def distinct_codes(codes: Int64Array) -> tuple[Int64Array, Int32Array]:
    """The distinct codes in order of first occurrence, and for each row the index of its code."""
    codes = as_codes(codes)
    slots = np.full(2 * codes.size + 1, -1, dtype=np.int32)
    distinct = np.empty(codes.size, dtype=np.int64)
    numbers = np.empty(codes.size, dtype=np.int32)
    found = int(_number_codes(codes, slots, distinct, numbers))
    return distinct[:found], numbers
