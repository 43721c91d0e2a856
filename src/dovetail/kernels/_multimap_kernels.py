"""Compiled loops of `dovetail.kernels.multimap.MultiMap`.

Layout (all int64, so that an array is one allocation and a slot or entry is one aligned 16-byte unit):

``slots[2 i]``, ``slots[2 i + 1]``
    The code, and ``tail << 32 | count``: the ring position of the newest entry of the code, and its number of
    entries. See `dovetail.kernels._slots` for how slots are found.
``entries[2 p]``, ``entries[2 p + 1]``
    The code, and ``lap << 32 | next``: the lap of the ring in which the entry was written, and the ring position of
    the next newer entry of the code. The newest entry points back to the oldest, so both ends of the chain are
    reachable. A negative word marks a free position.
``state``
    Scalars, at the indexes named below.

An entry's sequence number is ``lap * ring + position``. The writer goes around the ring and skips positions that are
still occupied, so numbers grow with arrival but have gaps. At least ``ring - capacity`` positions are free at any time,
which bounds the number of positions skipped per entry written.
"""

from typing import Any

import numpy as np
from numba import njit

from dovetail.kernels._slots import BLOCK, erase_slot, find_block, find_slot, hash_block
from dovetail.kernels._vector import LANES, emit_eight, prefetch

NEXT_SEQ = 0  # the first number that the writer has not reached
OLDEST_SEQ = 1  # no live entry has a smaller number
LIVE = 2
STALE = 3  # live entries that the writer has skipped: their number is not the newest of their position
STATE_SIZE = 4

LOW_HALF = np.int64(0xFFFFFFFF)
FREE = np.int64(-1)
POSITION = np.int64(0x7FFFFFFF)
_CHAINS = 64  # chains walked together: more than the processor has loads in flight
DOOMED = np.int64(1 << 31)  # marks an entry to be removed; positions are smaller, so the bit is free


@njit(cache=True, inline="always")
def _release_entry(entries: Any, ring: Any, state: Any, position: Any) -> Any:
    """Free an entry and return its sequence number; the caller has unlinked it from its chain."""
    seq = (entries[2 * position + 1] >> 32) * ring + position
    entries[2 * position + 1] = FREE
    state[LIVE] -= 1
    if seq < state[NEXT_SEQ] - ring:
        state[STALE] -= 1
    return seq


@njit(cache=True)
def _ask_for_block(
    slots: Any, entries: Any, codes: Any, start: Any, stop: Any, homes: Any, next_homes: Any, aside: Any, words: Any
) -> None:
    """Prefetch the slots of codes[start:stop] and the newest entry of each."""
    find_block(slots, codes, start, stop, homes, next_homes, aside, words)
    for i in range(stop - start):
        prefetch(entries, 2 * (words[i] >> 32))


@njit(cache=True)
def insert_codes(slots: Any, entries: Any, state: Any, codes: Any, out_seqs: Any) -> None:
    """Append one entry per code; the caller has checked the capacity."""
    ring = entries.size // 2
    seq = state[NEXT_SEQ]
    lap = seq // ring
    position = seq - lap * ring
    stale = state[STALE]
    words = np.empty(BLOCK, dtype=np.int64)
    homes = np.empty(BLOCK, dtype=np.uint32)
    next_homes = np.empty(BLOCK, dtype=np.uint32)
    aside = np.empty(BLOCK, dtype=np.uint32)
    hash_block(slots, codes, 0, min(BLOCK, codes.size), homes)
    for start in range(0, codes.size, BLOCK):
        stop = min(start + BLOCK, codes.size)
        _ask_for_block(slots, entries, codes, start, stop, homes, next_homes, aside, words)
        homes, next_homes = next_homes, homes
        for row in range(start, stop):
            code = codes[row]
            while entries[2 * position + 1] >= 0:
                # Skipped for the first time if it was written in the previous lap.
                if (entries[2 * position + 1] >> 32) == lap - 1:
                    stale += 1
                position += 1
                if position == ring:
                    position = 0
                    lap += 1
            slot = find_slot(slots, code)
            word = slots[2 * slot + 1]
            entries[2 * position] = code
            if word == 0:
                slots[2 * slot] = code
                slots[2 * slot + 1] = (position << 32) | 1
                entries[2 * position + 1] = (lap << 32) | position
            else:
                tail = word >> 32
                tail_word = entries[2 * tail + 1]
                entries[2 * position + 1] = (lap << 32) | (tail_word & LOW_HALF)
                entries[2 * tail + 1] = (tail_word & ~LOW_HALF) | position
                slots[2 * slot + 1] = (position << 32) | ((word & LOW_HALF) + 1)
            out_seqs[row] = lap * ring + position
            position += 1
            if position == ring:
                position = 0
                lap += 1
    state[NEXT_SEQ] = lap * ring + position
    state[STALE] = stale
    state[LIVE] += codes.size


@njit(cache=True)
def _walk_chains(
    entries: Any,
    chains: Any,
    chain_count: Any,
    left_over: Any,
    cursor: Any,
    before_cursor: Any,
    from_cursor: Any,
    out_places: Any,
) -> Any:
    """Write the places of the entries of chains: rows of (previous entry, where to write, how many are left).

    All chains advance by one entry in turn, so that prefetched entries arrive while others are written: a single chain
    would wait for each of its entries. To keep enough chains in flight, the longest ones, at most `left_over`, are left
    for the next call. Returns how many.
    """
    while chain_count > left_over:
        going_on = 0
        for i in range(chain_count):
            position = entries[2 * chains[i, 0] + 1] & LOW_HALF
            target = chains[i, 1]
            left = chains[i, 2] - 1
            out_places[target] = position + (from_cursor if position >= cursor else before_cursor)
            if left > 0:
                prefetch(entries, 2 * position)
                chains[going_on, 0] = position
                chains[going_on, 1] = target + 1
                chains[going_on, 2] = left
                going_on += 1
        chain_count = going_on
    return chain_count


@njit(cache=True)
def probe_into(
    slots: Any,
    entries: Any,
    codes: Any,
    row: Any,
    position: Any,
    remaining: Any,
    cursor: Any,
    before_cursor: Any,
    from_cursor: Any,
    out_rows: Any,
    out_places: Any,
) -> Any:
    """Write (row, place) of every entry of every code, oldest entry first, until the output is full.

    An entry's place is its ring position plus `from_cursor` if the position is at or after `cursor`, else plus
    `before_cursor`. Both are 0 for ring positions, and the starts of two laps for sequence numbers.

    `remaining` entries of `row` are still to be written, starting at ring position `position`; 0 means that the row
    has not started. Returns the number of pairs written and where to continue; the row is ``codes.size`` at the end.
    """
    limit = out_rows.size
    pair = 0
    if remaining > 0:
        while remaining > 0:
            if pair == limit:
                return pair, row, position, remaining
            out_rows[pair] = row
            out_places[pair] = position + (from_cursor if position >= cursor else before_cursor)
            pair += 1
            remaining -= 1
            position = entries[2 * position + 1] & LOW_HALF
        row += 1
    words = np.empty(BLOCK, dtype=np.int64)
    homes = np.empty(BLOCK, dtype=np.uint32)
    next_homes = np.empty(BLOCK, dtype=np.uint32)
    aside = np.empty(BLOCK, dtype=np.uint32)
    chains = np.empty((_CHAINS, 3), dtype=np.int64)
    chain_count = 0
    hash_block(slots, codes, row, min(row + BLOCK, codes.size), homes)
    for start in range(row, codes.size, BLOCK):
        stop = min(start + BLOCK, codes.size)
        find_block(slots, codes, start, stop, homes, next_homes, aside, words)
        homes, next_homes = next_homes, homes
        for first in range(start, stop, LANES):
            if first + LANES <= stop and pair + LANES <= limit:
                emitted = emit_eight(
                    words, first - start, first, cursor, before_cursor, from_cursor, out_rows, out_places, pair
                )
                if emitted >= 0:
                    pair += emitted
                    continue
            for row in range(first, min(first + LANES, stop)):
                count = words[row - start] & LOW_HALF
                if count == 0:
                    continue
                tail = words[row - start] >> 32
                fitting = min(count, limit - pair)
                for k in range(pair, pair + fitting):
                    out_rows[k] = row
                if fitting < count:
                    _walk_chains(entries, chains, chain_count, 0, cursor, before_cursor, from_cursor, out_places)
                    position = entries[2 * tail + 1] & LOW_HALF
                    for k in range(pair, limit):
                        out_places[k] = position + (from_cursor if position >= cursor else before_cursor)
                        position = entries[2 * position + 1] & LOW_HALF
                    return limit, row, position, count - fitting
                if count == 1:
                    out_places[pair] = tail + (from_cursor if tail >= cursor else before_cursor)
                else:
                    prefetch(entries, 2 * tail)
                    chains[chain_count, 0] = tail
                    chains[chain_count, 1] = pair
                    chains[chain_count, 2] = count
                    chain_count += 1
                    if chain_count == _CHAINS:
                        chain_count = _walk_chains(
                            entries, chains, chain_count, _CHAINS // 2, cursor, before_cursor, from_cursor, out_places
                        )
                pair += count
    _walk_chains(entries, chains, chain_count, 0, cursor, before_cursor, from_cursor, out_places)
    return pair, codes.size, np.int64(0), np.int64(0)


@njit(cache=True)
def seqs_at_positions(entries: Any, state: Any, positions: Any, out_seqs: Any) -> None:
    """Write the sequence number of the live entry at each ring position."""
    ring = entries.size // 2
    if state[STALE] == 0:
        # Every live number is the newest of its position, so no entry needs to be read.
        lap = state[NEXT_SEQ] // ring
        cursor = state[NEXT_SEQ] - lap * ring
        this_lap = lap * ring
        for i in range(positions.size):
            position = np.int64(positions[i])
            out_seqs[i] = this_lap + position - (ring if position >= cursor else 0)
        return
    for i in range(positions.size):
        position = np.int64(positions[i])
        out_seqs[i] = (entries[2 * position + 1] >> 32) * ring + position


@njit(cache=True)
def advance_oldest(entries: Any, state: Any) -> Any:
    """Move OLDEST_SEQ to the oldest live entry; return whether there is one."""
    ring = entries.size // 2
    if state[LIVE] == 0:
        state[OLDEST_SEQ] = state[NEXT_SEQ]
        return False
    lap = state[OLDEST_SEQ] // ring
    position = state[OLDEST_SEQ] - lap * ring
    looked_at = 0
    while (entries[2 * position + 1] >> 32) != lap:
        position += 1
        looked_at += 1
        if position == ring:
            position = 0
            lap += 1
        if looked_at == ring:
            # A whole lap without live entries: skip to the first lap that has some.
            first = state[NEXT_SEQ]
            for p in range(ring):
                word = entries[2 * p + 1]
                if word >= 0:
                    first = min(first, (word >> 32) * ring + p)
            lap = first // ring
            position = first - lap * ring
    state[OLDEST_SEQ] = lap * ring + position
    return True


@njit(cache=True)
def remove_oldest_entries(slots: Any, entries: Any, state: Any, out_seqs: Any) -> None:
    """Remove the oldest entries, as many as fit in the output; the caller guarantees that there are enough."""
    ring = entries.size // 2
    codes = np.empty(BLOCK, dtype=np.int64)
    words = np.empty(BLOCK, dtype=np.int64)
    homes = np.empty(BLOCK, dtype=np.uint32)
    next_homes = np.empty(BLOCK, dtype=np.uint32)
    aside = np.empty(BLOCK, dtype=np.uint32)
    lap = state[OLDEST_SEQ] // ring
    position = state[OLDEST_SEQ] - lap * ring
    asked_from = asked_to = position
    for i in range(out_seqs.size):
        if (entries[2 * position + 1] >> 32) != lap:
            state[OLDEST_SEQ] = lap * ring + position
            advance_oldest(entries, state)
            lap = state[OLDEST_SEQ] // ring
            position = state[OLDEST_SEQ] - lap * ring
        if not asked_from <= position < asked_to:
            # The next entries to remove are most likely the next in the ring.
            asked_from = position
            asked_to = min(position + BLOCK, ring, position + out_seqs.size - i)
            ahead = asked_to - asked_from
            for k in range(ahead):
                codes[k] = entries[2 * (asked_from + k)]
            hash_block(slots, codes, 0, ahead, homes)
            _ask_for_block(slots, entries, codes, 0, ahead, homes, next_homes, aside, words)
        slot = find_slot(slots, entries[2 * position])
        word = slots[2 * slot + 1]
        # The oldest entry overall is the oldest of its code: the one that the code's newest entry points to.
        tail = word >> 32
        if tail == position:
            erase_slot(slots, slot)
        else:
            follower = entries[2 * position + 1] & LOW_HALF
            entries[2 * tail + 1] = (entries[2 * tail + 1] & ~LOW_HALF) | follower
            slots[2 * slot + 1] = word - 1
        out_seqs[i] = _release_entry(entries, ring, state, position)
        position += 1
        if position == ring:
            position = 0
            lap += 1
    state[OLDEST_SEQ] = lap * ring + position


@njit(cache=True)
def collect_oldest(entries: Any, state: Any, out_seqs: Any) -> None:
    """Write the numbers of the oldest entries, filling the output; the caller guarantees that there are enough."""
    ring = entries.size // 2
    lap = state[OLDEST_SEQ] // ring
    position = state[OLDEST_SEQ] - lap * ring
    for i in range(out_seqs.size):
        looked_at = 0
        while (entries[2 * position + 1] >> 32) != lap:
            position += 1
            looked_at += 1
            if position == ring:
                position = 0
                lap += 1
            if looked_at == ring:
                # A whole lap without live entries: skip to the first lap that has some.
                here = lap * ring + position
                first = state[NEXT_SEQ]
                for p in range(ring):
                    word = entries[2 * p + 1]
                    seq = (word >> 32) * ring + p
                    if word >= 0 and seq >= here:
                        first = min(first, seq)
                lap = first // ring
                position = first - lap * ring
        out_seqs[i] = lap * ring + position
        position += 1
        if position == ring:
            position = 0
            lap += 1


@njit(cache=True)
def remove_codes_entries(slots: Any, entries: Any, state: Any, codes: Any, out_seqs: Any) -> Any:
    """Remove all entries of the codes and return how many there were."""
    ring = entries.size // 2
    removed = 0
    words = np.empty(BLOCK, dtype=np.int64)
    homes = np.empty(BLOCK, dtype=np.uint32)
    next_homes = np.empty(BLOCK, dtype=np.uint32)
    aside = np.empty(BLOCK, dtype=np.uint32)
    hash_block(slots, codes, 0, min(BLOCK, codes.size), homes)
    for start in range(0, codes.size, BLOCK):
        stop = min(start + BLOCK, codes.size)
        _ask_for_block(slots, entries, codes, start, stop, homes, next_homes, aside, words)
        homes, next_homes = next_homes, homes
        for row in range(start, stop):
            slot = find_slot(slots, codes[row])
            word = slots[2 * slot + 1]
            if word == 0:
                continue
            position = entries[2 * (word >> 32) + 1] & LOW_HALF
            for _ in range(word & LOW_HALF):
                follower = entries[2 * position + 1] & LOW_HALF
                out_seqs[removed] = _release_entry(entries, ring, state, position)
                removed += 1
                position = follower
            erase_slot(slots, slot)
    return removed


@njit(cache=True)
def first_dead_seq(entries: Any, seqs: Any) -> Any:
    """Return the index of the first sequence number that is not of a live entry, or -1."""
    ring = entries.size // 2
    for i in range(seqs.size):
        if seqs[i] < 0 or (entries[2 * (seqs[i] % ring) + 1] >> 32) != seqs[i] // ring:
            return i
    return -1


@njit(cache=True)
def _remove_doomed(slots: Any, entries: Any, ring: Any, state: Any, code: Any) -> None:
    """Remove the marked entries of a code and link the remaining ones."""
    slot = find_slot(slots, code)
    word = slots[2 * slot + 1]
    position = entries[2 * (word >> 32) + 1] & POSITION
    oldest_kept = position
    newest_kept = position
    kept = 0
    for _ in range(word & LOW_HALF):
        entry_word = entries[2 * position + 1]
        if entry_word & DOOMED:
            _release_entry(entries, ring, state, position)
        else:
            if kept == 0:
                oldest_kept = position
            else:
                entries[2 * newest_kept + 1] = (entries[2 * newest_kept + 1] & ~LOW_HALF) | position
            newest_kept = position
            kept += 1
        position = entry_word & POSITION
    if kept == 0:
        erase_slot(slots, slot)
    else:
        entries[2 * newest_kept + 1] = (entries[2 * newest_kept + 1] & ~LOW_HALF) | oldest_kept
        slots[2 * slot + 1] = (newest_kept << 32) | kept


@njit(cache=True)
def remove_seqs_entries(slots: Any, entries: Any, state: Any, seqs: Any) -> Any:
    """Remove live entries by number and return how many, counting repeated numbers once.

    All victims are marked first, so that a chain is walked only once.
    """
    ring = entries.size // 2
    live_before = state[LIVE]
    victims = np.empty(BLOCK, dtype=np.int64)
    codes = np.empty(BLOCK, dtype=np.int64)
    words = np.empty(BLOCK, dtype=np.int64)
    homes = np.empty(BLOCK, dtype=np.uint32)
    next_homes = np.empty(BLOCK, dtype=np.uint32)
    aside = np.empty(BLOCK, dtype=np.uint32)
    for start in range(0, seqs.size, BLOCK):
        size = min(BLOCK, seqs.size - start)
        for k in range(size):
            victims[k] = seqs[start + k] % ring
            prefetch(entries, 2 * victims[k])
        for k in range(size):
            entries[2 * victims[k] + 1] |= DOOMED
    for start in range(0, seqs.size, BLOCK):
        size = min(BLOCK, seqs.size - start)
        for k in range(size):
            victims[k] = seqs[start + k] % ring
            codes[k] = entries[2 * victims[k]]
        hash_block(slots, codes, 0, size, homes)
        _ask_for_block(slots, entries, codes, 0, size, homes, next_homes, aside, words)
        for k in range(size):
            if entries[2 * victims[k] + 1] >= 0:  # not yet removed with an earlier victim of the same code
                _remove_doomed(slots, entries, ring, state, codes[k])
    return live_before - state[LIVE]


@njit(cache=True)
def collect_live(entries: Any, out_seqs: Any) -> None:
    """Write the numbers of all live entries in ring order."""
    ring = entries.size // 2
    found = 0
    for position in range(ring):
        word = entries[2 * position + 1]
        if word >= 0:
            out_seqs[found] = (word >> 32) * ring + position
            found += 1


@njit(cache=True)
def collect_between(entries: Any, low: Any, high: Any, start: Any, out_positions: Any) -> Any:
    """Write ring positions from `start` of live entries with a code in [low, high]; return how many, and where to
    continue."""
    ring = entries.size // 2
    found = 0
    for position in range(start, ring):
        if found == out_positions.size:
            return found, position
        code = entries[2 * position]
        if low <= code <= high and entries[2 * position + 1] >= 0:
            out_positions[found] = position
            found += 1
    return found, ring


@njit(cache=True)
def codes_at_seqs(entries: Any, seqs: Any, out_codes: Any) -> None:
    """Write the code of each live entry."""
    ring = entries.size // 2
    for i in range(seqs.size):
        out_codes[i] = entries[2 * (seqs[i] % ring)]
