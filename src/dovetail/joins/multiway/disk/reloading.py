"""Brings spilled tuples back to memory where there is room, so that a burst does not leave a join on disk for good.

Only domains whose results have all been emitted come back: no stamp of theirs matters any more, since whatever arrives
later finds them in memory. Of a coordinated join, whole partitions do, and their arrivals probe again at once.

They come back while memory is at most five eighths full, and flushing begins when all of it is. So three eighths of the
memory must arrive before what came back can leave again, and no tuple goes back and forth in every micro-batch.
"""

from collections.abc import Iterator

import numpy as np

from dovetail.core.arrays import BoolArray
from dovetail.joins.multiway.chunk import IN_MEMORY, Chunk, Tuples, concatenated
from dovetail.joins.multiway.metrics import MJoinMetrics
from dovetail.joins.multiway.spill import Piece
from dovetail.joins.multiway.state import JoinState

__all__ = ["reload_settled"]

_FULL_AT = 5 / 8
_FEWEST_ROWS = 1024  # of a chunk of the second level
_TIER_BITS = 2


def reload_settled(state: JoinState, metrics: MJoinMetrics) -> None:
    """Read pieces of settled domains back to memory for as long as there is room."""
    while True:
        chosen = _chosen(state)
        if not chosen:
            return
        partitions = np.zeros(state.spec.partitions, np.bool_)
        for number, _ in chosen:
            partitions[number if state.spec.is_star else slice(None)] = True
        for i in range(len(state.memory)):
            _read(state, metrics, i, [(number, pieces[i]) for number, pieces in chosen])
            if state.is_coordinated:
                _stay(state, i, partitions)
        state.store.release()
        metrics.reloads += 1
        state.account()
        state.close_empty_domains()


def _chosen(state: JoinState) -> list[tuple[int, list[list[Piece]]]]:
    """Domains, with their pieces per input, that fit; whole ones, smallest first, if the join is coordinated."""
    # What is read exists twice while its chunk is built.
    room = min(int(_FULL_AT * state.limits.state) - state.held_bytes, state.limits.work // 2)
    settled = [n for n, domain in enumerate(state.domains) if domain.is_open and domain.pending == 0]
    sizes = {n: _bytes(state.domains[n].pieces) for n in settled}
    chosen: list[tuple[int, list[list[Piece]]]] = []
    for number in sorted(settled, key=lambda n: (sizes[n], n)):
        pieces = state.domains[number].pieces
        if state.is_coordinated:
            if sizes[number] > room:
                break
            picked = [list(of_input) for of_input in pieces]
        else:
            picked = [list(_fitting(of_input, room // len(pieces))) for of_input in pieces]
            if not any(picked):
                continue
        room -= _bytes(picked)
        chosen.append((number, picked))
    return chosen


def _bytes(pieces: list[list[Piece]]) -> int:
    return sum(piece.bytes for of_input in pieces for piece in of_input)


def _fitting(pieces: list[Piece], room: int) -> Iterator[Piece]:
    for piece in sorted(pieces, key=lambda piece: piece.serial, reverse=True):
        room -= piece.bytes
        if room >= 0:
            yield piece


def _read(state: JoinState, metrics: MJoinMetrics, i: int, chosen: list[tuple[int, list[Piece]]]) -> None:
    """Make one chunk in memory of pieces of an input."""
    parts: list[Tuples] = []
    size = sum(piece.bytes for _, pieces in chosen for piece in pieces)
    if not size:
        return
    state.work.resize(min(2 * size, state.limits.work))
    for _, pieces in chosen:
        parts += [state.store.load(i, piece).tuples for piece in pieces]
    metrics.bytes_read += state.store.bytes_read
    state.store.bytes_read = 0
    tuples = concatenated(parts)
    rows = len(tuples.arrivals)
    level = max(0, (rows // _FEWEST_ROWS).bit_length() - 1) // _TIER_BITS
    chunk = Chunk.build(state.next_serial(), tuples, state.spec.partitions, level)
    parts.clear()
    # In front, where the large chunks are: arrivals are merged from the end.
    state.memory[i].insert(0, chunk)
    for number, pieces in chosen:
        gone = {piece.serial for piece in pieces}
        for piece in pieces:
            state.drop_piece(piece)
        of_domain = state.domains[number].pieces
        of_domain[i] = [piece for piece in of_domain[i] if piece.serial not in gone]
    metrics.reloaded_rows += rows
    state.account()
    state.work.resize(0)


def _stay(state: JoinState, i: int, partitions: BoolArray) -> None:
    """Keep the tuples of some partitions that were on their way to disk."""
    left: list[Chunk] = []
    for chunk in state.direct[i]:
        stays = np.repeat(partitions, np.diff(chunk.partition_offsets(state.spec.partitions)))
        if not stays.any():
            left.append(chunk)
            continue
        state.count_direct(chunk, -1)
        state.work.resize(min(2 * chunk.nbytes, state.limits.work))
        if not stays.all():
            rest = state.part_of(chunk, ~stays)
            state.count_direct(rest, 1)
            left.append(rest)
        kept = state.part_of(chunk, stays)
        kept.departure = IN_MEMORY
        state.memory[i].append(kept)
        state.work.resize(0)
    state.direct[i] = left
