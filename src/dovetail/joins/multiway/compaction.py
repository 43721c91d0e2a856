"""Pieces on disk merged in tiers, and rid of what has expired, so that there are few of them and little rubbish.

Four pieces of a level, of one hash partition of one input, become one of the next level, as chunks in memory do; each
row is thus written a logarithmic number of times. A piece that has largely expired is written again without what has.

Only pieces of a domain whose results are all out are touched. For those it no longer matters when they left memory:
whatever arrives later came after that, so no event that has been can have joined it with them.
"""

from collections.abc import Iterator

from dovetail.faultpoints import fault_point
from dovetail.operators.mjoin.chunk import DIRECT, BoolArray, Chunk, merged
from dovetail.operators.mjoin.metrics import MJoinMetrics
from dovetail.operators.mjoin.spill import Piece
from dovetail.operators.mjoin.state import TIER, Domain, JoinState

__all__ = ["compact_pieces"]

Group = tuple[Domain, list[Piece]]


def compact_pieces(state: JoinState, metrics: MJoinMetrics, horizon: int | None) -> None:
    """Merge pieces where there are enough of them, and drop expired rows where they are many.

    Parameters
    ----------
    state, metrics
        Of the join.
    horizon
        The event time, or place, before which no tuple can match one that is still to arrive; None: there is none.

    Raises
    ------
    SpillError
        If the spill directory is full; nothing has changed for the input at which that happened.
    """
    for i in range(len(state.memory)):
        expired_before = horizon
        while _compact(state, metrics, i, horizon, expired_before):
            # What was merged may now be one of four of its own level; what has expired is gone, or has to stay.
            expired_before = None
    state.close_empty_domains()


def _compact(state: JoinState, metrics: MJoinMetrics, i: int, horizon: int | None, expired_before: int | None) -> bool:
    """Merge what there is of an input to be merged now; whether there was anything."""
    settled = [domain for domain in state.domains if domain.pending == 0]
    groups = [group for domain in settled for group in _groups(state, domain, i, expired_before)]
    if not groups:
        return False
    # Made as they are written, one after the other: only one group is in memory at a time.
    written = state.write(i, _merged(state, i, groups, horizon), DIRECT)
    state.store.release()
    for domain, pieces in groups:
        for piece in pieces:
            state.drop_piece(piece)
        gone = {piece.serial for piece in pieces}
        domain.pieces[i] = [piece for piece in domain.pieces[i] if piece.serial not in gone]
    state.file_pieces(i, written)
    kept_rows = sum(piece.rows for piece in written)
    metrics.purged_rows += sum(piece.rows for _, pieces in groups for piece in pieces) - kept_rows
    metrics.merges += len(written)
    metrics.merged_rows += kept_rows
    fault_point("mjoin.compacted")
    return True


def _groups(state: JoinState, domain: Domain, i: int, horizon: int | None) -> Iterator[Group]:
    """Pieces of a domain that are to become one."""
    tiers: dict[tuple[int, int], list[Piece]] = {}
    for piece in domain.pieces[i]:
        tiers.setdefault((piece.partition, piece.level), []).append(piece)
    limit = state.piece_limit_bytes
    for pieces in tiers.values():
        small = [piece for piece in pieces if piece.bytes <= limit // TIER]
        whole = [small[start : start + TIER] for start in range(0, len(small) - TIER + 1, TIER)]
        yield from ((domain, group) for group in whole)
        taken = {piece.serial for group in whole for piece in group}
        for piece in pieces:
            if piece.serial not in taken and horizon is not None and _expired_share(piece, horizon) >= 0.5:
                yield domain, [piece]


def _expired_share(piece: Piece, horizon: int) -> float:
    """About how much of a piece lies before the horizon, taking its times for evenly spread."""
    if piece.min_low >= horizon:
        return 0.0
    return (horizon - piece.min_low) / max(1, piece.max_low - piece.min_low)


def _merged(state: JoinState, i: int, groups: list[Group], horizon: int | None) -> Iterator[Chunk]:
    for _, pieces in groups:
        chunks = [state.store.load(i, piece) for piece in pieces]
        drop = [state.droppable(i, chunk, horizon) for chunk in chunks]
        keep: list[BoolArray | None] = [None if mask is None else ~mask for mask in drop]
        chunk = merged(state.next_serial(), chunks, keep, state.spec.partitions)
        if len(pieces) == 1:
            chunk.level = pieces[0].level
        if len(chunk):
            yield chunk
