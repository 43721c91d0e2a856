"""Compacts the pieces on disk: merges them in tiers and drops expired rows.

Four pieces of one level, hash partition and input become one of the next level, like chunks in memory, so each row is
written a logarithmic number of times. A piece that has mostly expired is rewritten without its expired rows.

Only domains whose results have all been emitted are compacted. For them the departure stamps no longer matter: a tuple
that arrives later cannot have been joined with them by an earlier event.
"""

from collections.abc import Iterator, Sequence

from dovetail.core.arrays import BoolArray
from dovetail.core.faultpoints import fault_point
from dovetail.joins.multiway.chunk import DIRECT, Chunk, merged
from dovetail.joins.multiway.metrics import MJoinMetrics
from dovetail.joins.multiway.spill import Piece
from dovetail.joins.multiway.state import TIER, Domain, JoinState

__all__ = ["compact_pieces"]

Group = tuple[Domain, list[Piece]]


def compact_pieces(state: JoinState, metrics: MJoinMetrics, horizons: Sequence[int | None]) -> None:
    """Merge pieces where a tier is full, and rewrite pieces that are mostly expired.

    No tuple of an input before its horizon (an event time or a place) can match a later arrival; None if there is no
    such bound. A `SpillError` leaves the input that was being compacted unchanged.
    """
    for i, horizon in enumerate(horizons):
        expired_before = horizon
        while _compact(state, metrics, i, horizon, expired_before):
            # A merged piece may complete the next tier. Expired rows are handled in the first round.
            expired_before = None
    state.close_empty_domains()


def _compact(state: JoinState, metrics: MJoinMetrics, i: int, horizon: int | None, expired_before: int | None) -> bool:
    """Merge what can be merged of one input; returns whether anything was."""
    settled = [domain for domain in state.domains if domain.pending == 0]
    groups = [group for domain in settled for group in _groups(state, domain, i, expired_before)]
    if not groups:
        return False
    # Merged lazily: only one group is in memory at a time.
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
    """The groups of pieces to merge into one."""
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
    """The estimated share of a piece before the horizon, assuming evenly spread times."""
    if piece.min_low >= horizon:
        return 0.0
    return (horizon - piece.min_low) / max(1, piece.max_low - piece.min_low)


def _merged(state: JoinState, i: int, groups: list[Group], horizon: int | None) -> Iterator[Chunk]:
    for _, pieces in groups:
        chunks = [state.store.load(i, piece) for piece in pieces]
        drop = [state.droppable(chunk, horizon) for chunk in chunks]
        keep: list[BoolArray | None] = [None if mask is None else ~mask for mask in drop]
        chunk = merged(state.next_serial(), chunks, keep, state.spec.partitions)
        if len(pieces) == 1:
            chunk.level = pieces[0].level
        if len(chunk):
            yield chunk
