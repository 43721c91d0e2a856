"""How tuples leave the window, and what is emitted for them.

The output of leaving tuples is built first; then as many leave as it holds; then it is returned. If an iterator is
abandoned, the others still wait and leave at the next step.
"""

from collections.abc import Callable, Generator, Iterator

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.joins.state import JoinState
from dovetail.joins.window.stream_window import StreamWindow
from dovetail.joins.window.tuple_store import Positions

__all__ = ["Leaving"]

OnLeft = Callable[[Positions, BoolArray], None]
_MOST_TOGETHER = 65_536


class Leaving:
    """Releases tuples from the window of a join."""

    def __init__(self, state: JoinState) -> None:
        self.state = state
        self.on_left: OnLeft | None = None  # called with tuples that have just left, and whether they matched

    @property
    def _window(self) -> StreamWindow:
        assert self.state.window is not None
        return self.state.window

    def oldest(self, count: int) -> Iterator[pa.RecordBatch]:
        """Release the ``count`` oldest tuples, which have met every row; emit what the join type requires."""
        state = self.state
        if state.spec.how == "inner":
            # Nothing is emitted for them. Few at a time: the temporary memory per tuple is not accounted for.
            while count:
                gone = self._window.take_oldest(min(count, _MOST_TOGETHER))
                if not gone.size:
                    break
                self._forget(gone)
                count -= gone.size
            yield from state.results.release()
            return
        while count:
            positions = self._window.oldest_positions(min(count, state.results.max_rows))
            count -= yield from self._together(positions, is_oldest=True)

    def at(self, positions: Positions) -> Iterator[pa.RecordBatch]:
        """Release tuples from the middle, which need no further row. Each position once; not for ordered output, where
        tuples leave by age.
        """
        if self.state.spec.how == "inner":
            self.let_go(positions)
            return
        start = 0
        while start < positions.size:
            start += yield from self._together(positions[start : start + self.state.results.max_rows])

    def codes(self, codes: Int64Array) -> Iterator[pa.RecordBatch]:
        """Release all tuples of some codes, which need no further row. Not for ordered output."""
        if self.state.spec.how == "inner":
            self._forget(self._window.take_codes(codes))
            return
        while codes.size:
            _, positions, _ = self._window.probe(codes, None, self.state.results.max_rows)
            if positions.size == 0:
                return
            yield from self.at(positions)

    def _together(self, positions: Positions, is_oldest: bool = False) -> Generator[pa.RecordBatch, None, int]:
        """Release the first of these tuples, as many as one batch of output holds; returns how many."""
        state, window, results = self.state, self._window, self.state.results
        wanted = np.flatnonzero(self._is_emitted(window.is_matched_at(positions)))
        if wanted.size == 0:
            self.let_go(positions, is_oldest)
            yield from results.release()
            return int(positions.size)
        given = positions[wanted]

        def build(start: int, stop: int) -> pa.RecordBatch:
            return results.plan.unmatched(window, given[start:stop])

        stop, batch, size_bytes = results.fit(given.size, build, widest=window.widest_gathered)
        if not state.spec.ordered:
            left = int(wanted[stop]) if stop < wanted.size else int(positions.size)
            results.reserve(size_bytes)
            self.let_go(positions[:left], is_oldest)
            yield from results.hand_out(batch, size_bytes)
            return left
        return (yield from self._in_order(positions, wanted, batch, size_bytes))

    def _in_order(
        self, positions: Positions, wanted: Int64Array, batch: pa.RecordBatch, size_bytes: int
    ) -> Generator[pa.RecordBatch, None, int]:
        """Release the oldest tuples, of which the first `wanted` ones make the batch; held results go in between."""
        results = self.state.results
        tickets = self._window.tickets_at(positions[wanted[: batch.num_rows]])
        first_held = results.held.first_ticket()
        if first_held is None or first_held > tickets[-1]:
            left = int(wanted[batch.num_rows - 1]) + 1
            results.reserve(size_bytes)
            self.let_go(positions[:left], is_oldest=True)
            yield from results.hand_out(batch, size_bytes)
        elif results.has_room_to_hold(batch, tickets):
            left = int(wanted[batch.num_rows - 1]) + 1
            results.hold(batch, tickets)
            self.let_go(positions[:left], is_oldest=True)
        elif wanted[0] > 0 or first_held <= tickets[0]:
            # The results of earlier tuples come first.
            left = int(wanted[0])
            self.let_go(positions[:left], is_oldest=True)
        else:
            run = int(np.searchsorted(tickets, first_held))
            left = int(wanted[run - 1]) + 1
            first = batch.slice(0, run)
            results.reserve(size_bytes)
            self.let_go(positions[:left], is_oldest=True)
            yield from results.hand_out(first, size_bytes)
        yield from results.release()
        return left

    def _is_emitted(self, is_matched: BoolArray) -> BoolArray:
        """Which leaving tuples are emitted by themselves."""
        how = self.state.spec.how
        if how in ("left", "anti"):
            return ~is_matched
        return is_matched if how == "semi" else np.zeros(is_matched.size, np.bool_)

    def let_go(self, positions: Positions, is_oldest: bool = False) -> None:
        """Remove tuples from the window, and count them."""
        if is_oldest:
            self._window.take_oldest(positions.size)
        else:
            self._window.take(positions)
        self._forget(positions)

    def _forget(self, positions: Positions) -> None:
        """Count tuples that have just left the window, and free them."""
        state, window = self.state, self._window
        is_matched = window.is_matched_at(positions)
        matched = int(np.count_nonzero(is_matched))
        state.metrics.matched_tuples += matched
        state.metrics.unmatched_tuples += positions.size - matched
        if self.on_left is not None:
            self.on_left(positions, is_matched)
        window.forget(positions)
        state.window_account.resize(window.nbytes + state.matcher.nbytes)
        state.update_boundary()
