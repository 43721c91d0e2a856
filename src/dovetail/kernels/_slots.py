"""The open-addressing slot table that `MultiMap` and `ValueTable` are built on.

A slot is 16 bytes: a code and a word, which is 0 where the slot is empty; the maps give the word its meaning.
Four slots make a cache line. The search for a code begins at the first slot of its *home line* and goes on
slot by slot, so the taken slots of a line are always its first ones, and one comparison of the whole line
answers nearly every search: the code is there, or the last slot of the line is empty and the code is nowhere.

Batches are looked up in blocks, eight codes at a time. While one block is compared, the lines of the next are on their
way from memory. What a home line does not answer is put aside without a branch, because at random codes the processor
would mispredict it.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from dovetail.kernels._vector import LANES, LINE, append_lanes, count_bits, find_eight, lowest_bit, match_line, prefetch
from dovetail.kernels.hashing import home_slot

Int64Array = npt.NDArray[np.int64]

DEFAULT_MAX_LOAD = 1 / 3  # where one line answers nearly every search
DENSE_LOAD = 0.5  # for maps that live in a budget: a quarter less memory, slower where codes are absent
SLOTS_PER_LINE = LINE // 2
BLOCK = 256  # codes looked up together; their lines and the next block's fit the first-level cache
_CODES_OF_LINE = 0b01010101  # the elements of a line that are codes
_WORDS_OF_LINE = 0b10101010


def count_slots(capacity: int, max_load: float) -> int:
    """Give how many slots a table gets: a multiple of a line, with one more than its codes whatever the load.

    The one more is where a search that finds nothing ends.
    """
    slots = max(int(np.ceil(capacity / max_load)), capacity + 1)
    return -(-slots // SLOTS_PER_LINE) * SLOTS_PER_LINE


def count_slot_bytes(capacity: int, max_load: float) -> int:
    """Give the bytes that `make_slots` allocates."""
    return 16 * count_slots(capacity, max_load) + 64


def make_slots(capacity: int, max_load: float) -> Int64Array:
    """Make an empty table whose first slot lies at the beginning of a cache line."""
    size = 2 * count_slots(capacity, max_load)
    allocation = np.zeros(size + LINE, dtype=np.int64)
    start = -allocation.ctypes.data % 64 // 8
    return allocation[start : start + size]


@njit(cache=True, inline="always")
def find_slot(slots: Any, code: Any) -> Any:
    """Give the slot that holds `code`, or the empty slot where it would go."""
    line = LINE * home_slot(code, slots.size // LINE)
    while True:
        # What an empty slot once held may still be there and match, but then no slot before it is empty.
        candidates = match_line(slots, line, code) & _CODES_OF_LINE | match_line(slots, line, 0) & _WORDS_OF_LINE
        if candidates != 0:
            return (line + lowest_bit(candidates)) >> 1
        line += LINE
        if line == slots.size:
            line = 0


@njit(cache=True)
def erase_slot(slots: Any, hole: Any) -> None:
    """Empty a slot and move codes behind it back, so that no search ends too early."""
    line = hole // SLOTS_PER_LINE * LINE
    empty = match_line(slots, line, 0) & _WORDS_OF_LINE
    if empty != 0:
        # Searches come to all of a line's slots, so the last taken one can fill the hole, and nothing lies beyond.
        last = ((line + lowest_bit(empty)) >> 1) - 1
        slots[2 * hole] = slots[2 * last]
        slots[2 * hole + 1] = slots[2 * last + 1]
        slots[2 * last + 1] = 0
        return
    slot_count = slots.size // 2
    slot = hole
    while True:
        slot += 1
        if slot == slot_count:
            slot = 0
        if slots[2 * slot + 1] == 0:
            break
        displacement = slot - home_slot(slots[2 * slot], slots.size // LINE) * SLOTS_PER_LINE
        if displacement < 0:
            displacement += slot_count
        distance = slot - hole
        if distance < 0:
            distance += slot_count
        if displacement >= distance:
            slots[2 * hole] = slots[2 * slot]
            slots[2 * hole + 1] = slots[2 * slot + 1]
            hole = slot
    slots[2 * hole + 1] = 0


@njit(cache=True)
def hash_block(slots: Any, codes: Any, start: Any, stop: Any, out_homes: Any) -> None:
    """Write the home lines of at most a block of codes, and ask for them."""
    line_count = slots.size // LINE
    for i in range(stop - start):
        out_homes[i] = home_slot(codes[start + i], line_count)
        prefetch(slots, LINE * np.int64(out_homes[i]))


@njit(cache=True)
def _search_on(slots: Any, line: Any, code: Any) -> Any:
    """Give the word of `code`, which is in no line before `line`, or 0."""
    while True:
        if line == slots.size:
            line = 0
        matches = match_line(slots, line, code) & _CODES_OF_LINE
        if matches != 0:
            return slots[line + lowest_bit(matches) + 1]
        if slots[line + LINE - 1] == 0:
            return np.int64(0)
        line += LINE


@njit(cache=True)
def find_block(
    slots: Any, codes: Any, start: Any, stop: Any, homes: Any, next_homes: Any, aside: Any, out_words: Any
) -> None:
    """Write the words of codes[start:stop], at most a block, 0 for those not in the table.

    `homes` is what `hash_block`, or the call for the block before, made of these codes. The home lines of the block
    after them are written to `next_homes` and asked for. `aside` is room for the numbers of a block.
    """
    line_count = slots.size // LINE
    # Slices, because the compiler knows that an index from 0 on is not a negative one that counts from the end.
    block = codes[start:stop]
    next_block = codes[stop : 2 * stop - start]
    for i in range(next_block.size):
        next_homes[i] = home_slot(next_block[i], line_count)
    for i in range(next_block.size, block.size):
        next_homes[i] = homes[i]
    put_aside: Any = 0
    whole = block.size // LANES * LANES
    for i in range(0, whole, LANES):
        for lane in range(LANES):
            prefetch(slots, LINE * np.int64(next_homes[i + lane]))
        unanswered = find_eight(slots, homes, block, i, out_words)
        append_lanes(aside, put_aside, i, unanswered)
        put_aside += count_bits(unanswered)
    for i in range(whole, block.size):
        prefetch(slots, LINE * np.int64(next_homes[i]))
        out_words[i] = _search_on(slots, LINE * np.int64(homes[i]), block[i])
    for j in range(put_aside):
        line = LINE * (np.int64(homes[aside[j]]) + 1)
        prefetch(slots, line if line < slots.size else 0)
    for j in range(put_aside):
        which = aside[j]
        out_words[which] = _search_on(slots, LINE * (np.int64(homes[which]) + 1), block[which])


@njit(cache=True)
def find_words(slots: Any, codes: Any, out_words: Any) -> None:
    """Write each code's word, 0 where it is not in the table."""
    homes = np.empty(BLOCK, dtype=np.uint32)
    next_homes = np.empty(BLOCK, dtype=np.uint32)
    aside = np.empty(BLOCK, dtype=np.uint32)
    hash_block(slots, codes, 0, min(BLOCK, codes.size), homes)
    for start in range(0, codes.size, BLOCK):
        stop = min(start + BLOCK, codes.size)
        find_block(slots, codes, start, stop, homes, next_homes, aside, out_words[start:stop])
        homes, next_homes = next_homes, homes
