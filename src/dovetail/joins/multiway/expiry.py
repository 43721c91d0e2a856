"""What happens to tuples that no later arrival can match: their results and their unmatched rows come out first.

Every input has its own horizon, an event time or a place before which its tuples are expired. It is None where no bound
says how much later a match may be: such an input never expires.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray
from dovetail.joins.multiway.chunk import Chunk
from dovetail.joins.multiway.results import ResultWriter
from dovetail.joins.multiway.state import JoinState

__all__ = ["Expiry"]


class Expiry:
    """Finds expired tuples, and emits those of preserved inputs that have not matched."""

    def __init__(self, state: JoinState, writer: ResultWriter) -> None:
        self._state = state
        self._writer = writer

    def needs_results(self, number: int, horizons: Sequence[int | None]) -> bool:
        """Whether a domain must be joined completely before its expired tuples can be dropped."""
        state = self._state
        for i, horizon in enumerate(horizons):
            if horizon is None:
                continue
            pieces = state.domains[number].pieces[i]
            if not state.spec.gives_unmatched:
                lows = [piece.max_low for piece in pieces]
            else:
                lows = [piece.min_low for piece in pieces]
                lows += [chunk.min_low for chunk in (*state.memory[i], *state.direct[i])]
            if any(low < horizon for low in lows):
                return True
        return False

    def unmatched_before(self, horizons: Sequence[int | None]) -> Iterator[pa.RecordBatch]:
        """Unmatched rows of preserved inputs before their horizons."""
        for i, horizon in enumerate(horizons):
            if horizon is not None:
                yield from self._unmatched(i, horizon)

    def all_unmatched(self) -> Iterator[pa.RecordBatch]:
        """All unmatched rows of preserved inputs."""
        for i in range(len(self._state.memory)):
            yield from self._unmatched(i, None)

    def _unmatched(self, i: int, horizon: int | None) -> Iterator[pa.RecordBatch]:
        """Unmatched rows of an input before a horizon; all of them if it is None."""
        state = self._state
        if not state.spec.preserved[i]:
            return
        for chunk in [*state.memory[i], *state.direct[i]]:
            yield from self._unmatched_in(i, chunk, horizon)
        for domain in state.domains:
            for piece in domain.pieces[i]:
                if horizon is None or piece.min_low < horizon:
                    chunk = state.store.load(i, piece)
                    yield from self._unmatched_in(i, chunk, horizon)
                    state.store.keep_done(piece, 0, chunk)
        state.store.release()

    def _unmatched_in(self, i: int, chunk: Chunk, horizon: int | None) -> Iterator[pa.RecordBatch]:
        expired: BoolArray | None = np.ones(len(chunk), np.bool_) if horizon is None else chunk.expired_rows(horizon)
        if expired is None:
            return
        settled = self._state.is_settled()
        if not settled.all():
            expired = expired & np.repeat(settled, np.diff(chunk.partition_offsets(self._state.spec.partitions)))
        yield from self._writer.unmatched_of(i, chunk, expired)
