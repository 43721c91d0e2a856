"""The open-addressing slot table of `MultiMap` and `ValueTable`.

A slot is 16 bytes: a code and a word. The word is 0 in an empty slot; otherwise its meaning is up to the map. A cache
line has four slots. The search for a code starts at the first slot of its *home line* and proceeds slot by slot, so
the occupied slots of a line are always its first ones. One comparison of the whole line answers nearly every search:
either it has the code, or its last slot is empty and the code is not in the table.

Batches are looked up in blocks, eight codes at a time. While one block is compared, the lines of the next are
prefetched. Codes that the home line does not answer are collected without a branch, because for random codes the
processor would mispredict it.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from dovetail.kernels._vector import LANES, LINE, append_lanes, count_bits, find_eight, lowest_bit, match_line, prefetch
from dovetail.kernels.hashing import home_slot

Int64Array = npt.NDArray[np.int64]

DEFAULT_MAX_LOAD = 1 / 3  # one line answers nearly every search
DENSE_LOAD = 0.5  # for maps in a memory budget: a quarter less memory, slower for absent codes
SLOTS_PER_LINE = LINE // 2
BLOCK = 256  # codes looked up together; their lines and the next block's fit in the L1 cache
_CODES_OF_LINE = 0b01010101  # the elements of a line that are codes
_WORDS_OF_LINE = 0b10101010


def count_slots(capacity: int, max_load: float) -> int:
    """The slots of a table: whole lines, with at least one empty slot, which ends a search that finds nothing."""
    slots = max(int(np.ceil(capacity / max_load)), capacity + 1)
    return -(-slots // SLOTS_PER_LINE) * SLOTS_PER_LINE


def count_slot_bytes(capacity: int, max_load: float) -> int:
    """The bytes that `make_slots` allocates."""
    return 16 * count_slots(capacity, max_load) + 64


def make_slots(capacity: int, max_load: float) -> Int64Array:
    """Make an empty table that starts on a cache line."""
    size = 2 * count_slots(capacity, max_load)
    allocation = np.zeros(size + LINE, dtype=np.int64)
    start = -allocation.ctypes.data % 64 // 8
    return allocation[start : start + size]


@njit(cache=True, inline="always")
def find_slot(slots: Any, code: Any) -> Any:
    """Return the slot that holds `code`, or the empty slot where it would be stored."""
    line = LINE * home_slot(code, slots.size // LINE)
    while True:
        # An empty slot may still contain its old code and match it, but then no slot before it is empty.
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
        # A search covers all slots of a line, so the line's last occupied slot can fill the hole.
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
    """Write the home lines of at most one block of codes, and prefetch them."""
    line_count = slots.size // LINE
    for i in range(stop - start):
        out_homes[i] = home_slot(codes[start + i], line_count)
        prefetch(slots, LINE * np.int64(out_homes[i]))


@njit(cache=True)
def _search_on(slots: Any, line: Any, code: Any) -> Any:
    """The word of `code`, or 0; the search starts at `line`."""
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
    """Write the words of codes[start:stop], at most one block; 0 for codes that are not in the table.

    `homes` are the home lines of these codes, written by `hash_block` or by the call for the previous block. The home
    lines of the next block are written to `next_homes` and prefetched. `aside` is scratch space of one block.
    """
    line_count = slots.size // LINE
    # Slices tell the compiler that the index does not start negative (counting from the end).
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
    """Write the word of each code; 0 if it is not in the table."""
    homes = np.empty(BLOCK, dtype=np.uint32)
    next_homes = np.empty(BLOCK, dtype=np.uint32)
    aside = np.empty(BLOCK, dtype=np.uint32)
    hash_block(slots, codes, 0, min(BLOCK, codes.size), homes)
    for start in range(0, codes.size, BLOCK):
        stop = min(start + BLOCK, codes.size)
        find_block(slots, codes, start, stop, homes, next_homes, aside, out_words[start:stop])
        homes, next_homes = next_homes, homes
