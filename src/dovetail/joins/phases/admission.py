"""The intake: which offered tuples wait, which are answered at once, and which are dropped for lack of room.

A batch is taken in piece by piece. The answer of a piece is built first, as one batch that fits the free memory; then
the piece is accepted, and the batch is returned. So a predicate that raises leaves the operator unchanged, and an
abandoned iterator has either returned a piece's answer or not accepted the piece: ``metrics.stream_tuples_in`` tells
how far it got.

A `Front` decides what is answered at once: tuples with a NULL key, codes excluded by the index, cache hits.
"""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.core.errors import BudgetError
from dovetail.core.memory import format_bytes
from dovetail.joins.memory_plan import MAX_BATCH_ROWS
from dovetail.joins.output.columns import BatchRows
from dovetail.joins.state import JoinState
from dovetail.relation.widths import widest_row

__all__ = ["Admission", "Answer", "Front", "NullKeys", "Offered"]

FEWEST_ADMITTED = 1024
_PAGE_SLACK_BYTES = 64
_FIRST = np.zeros(1, np.int64)


@dataclass(frozen=True)
class Answer:
    """What is emitted at once for rows of a piece that need not wait."""

    batch: pa.RecordBatch | None
    owners: Int64Array  # per row of the batch, its row of the piece
    matched: int
    unmatched: int


@dataclass(frozen=True)
class Offered:
    """Rows of an offered batch: the stream's own columns, the codes, and where the key has a NULL."""

    rows: pa.RecordBatch
    codes: Int64Array
    is_null: BoolArray
    # How many rows were dropped just before each of these rows, plus one number for those after the last; None if none.
    dropped_before: Int64Array | None = None

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def part(self, start: int, stop: int) -> "Offered":
        """Some of the rows; the last part includes the count of rows dropped after it."""
        dropped = self.dropped_before
        if dropped is not None:
            is_last = stop == len(self)
            dropped = np.append(dropped[start:stop], dropped[stop] if is_last else 0)
        return Offered(self.rows.slice(start, stop - start), self.codes[start:stop], self.is_null[start:stop], dropped)

    @property
    def dropped(self) -> int:
        """How many rows were dropped before, between and after these."""
        return 0 if self.dropped_before is None else int(self.dropped_before.sum())


class Front(Protocol):
    """The first phase: what is answered at once, and what must wait."""

    def rows_together(self) -> int:
        """How many rows of an offered batch to process together."""

    def select_waiting(self, offered: Offered) -> Int64Array:
        """The ascending rows of an offered part that must enter the window. Must not change anything."""

    def results_per_row(self, offered: Offered) -> Int64Array:
        """The approximate number of results of each row answered at once."""

    def prepare(self, piece: Offered, answered: Int64Array, start: int) -> Answer:
        """Build what is emitted for rows of a piece that need not wait.

        May raise, and must not change anything. The piece starts with row ``start`` of the rows processed together.
        """

    def count_answer(self, answer: Answer, piece: Offered, answered: Int64Array) -> None:
        """Count answered rows of a piece that was just accepted."""

    def widest_result(self, offered: Offered) -> int:
        """Upper bound of the bytes of a result emitted at once."""

    def finish(self) -> None:
        """Called when an `offer` has ended or was abandoned: results prepared for it may be dropped."""


class NullKeys:
    """Tuples with a NULL key match nothing and never wait; all others do."""

    def __init__(self, state: JoinState) -> None:
        self.state = state

    def rows_together(self) -> int:
        state = self.state
        room = MAX_BATCH_ROWS if state.window is None else state.window.capacity - len(state.window)
        # With ordered output, answers may have to be held: at most one batch.
        most = state.results.max_rows if state.spec.ordered else MAX_BATCH_ROWS
        return min(max(room, FEWEST_ADMITTED), most)

    def select_waiting(self, offered: Offered) -> Int64Array:
        return np.flatnonzero(~offered.is_null)

    def results_per_row(self, offered: Offered) -> Int64Array:
        return np.ones(len(offered), np.int64)

    def prepare(self, piece: Offered, answered: Int64Array, start: int) -> Answer:
        if self.state.spec.how not in ("left", "anti"):
            return Answer(None, answered[:0], 0, answered.size)
        batch = self.state.results.plan.unmatched(BatchRows(piece.rows), answered)
        return Answer(batch, answered, 0, answered.size)

    def count_answer(self, answer: Answer, piece: Offered, answered: Int64Array) -> None:
        self.state.metrics.matched_tuples += answer.matched
        self.state.metrics.unmatched_tuples += answer.unmatched

    def widest_result(self, offered: Offered) -> int:
        return widest_row(offered.rows)

    def finish(self) -> None:
        """See `Front.finish`."""


class RoomLimit(Protocol):
    """Limits how many tuples may enter the window, besides the window itself: the border to a cache."""

    def limit(self, room: int, waiting: int, count_room: Callable[[], int]) -> int:
        """How many of the waiting rows may enter if the window has room for ``room``; `count_room` recounts."""


class Admission:
    """Takes in offered tuples.

    `deadline` returns the deadline of tuples that enter now; `step` does one disk step, to make room.
    """

    def __init__(
        self,
        state: JoinState,
        front: Front,
        deadline: Callable[[], int],
        step: Callable[[], Iterator[pa.RecordBatch]],
        room_limit: RoomLimit | None = None,
    ) -> None:
        self.state, self._front = state, front
        self._deadline, self._step = deadline, step
        self._room_limit = room_limit

    # ================================================================ accepting

    def accept(self, offered: Offered, may_drop: bool = True) -> Iterator[pa.RecordBatch]:
        """Accept all rows, making room with disk steps if the budget requires it."""
        try:
            yield from self._accept(offered, may_drop)
        finally:
            self._front.finish()

    def _accept(self, offered: Offered, may_drop: bool) -> Iterator[pa.RecordBatch]:
        state = self.state
        start = 0
        # Results that were ready when an iterator was abandoned come first.
        yield from state.results.release()
        while start < len(offered):
            if state.pairs_done:
                yield from self._step()
            part = offered.part(start, min(start + self._front.rows_together(), len(offered)))
            waiting = self._front.select_waiting(part)
            try:
                room = self._room_for(part.rows, waiting)
            except BudgetError:
                if not state.extras.give_up():
                    raise
                continue
            if waiting.size > room:
                if room == 0 and waiting[0] == 0:
                    if may_drop and self._drops_arriving():
                        yield from self._accept_rest(part, waiting)
                        start += len(part)
                    elif not (may_drop and (yield from self._drop_waiting(waiting.size))):
                        yield from self._step()
                    continue
                part, waiting = part.part(0, int(waiting[room])), waiting[:room]
            taken = yield from self._take_in(part, waiting)
            if taken < len(part):
                taken += yield from self._take_in_hard(part.part(taken, taken + 1))
            start += taken

    def _take_in(self, part: Offered, waiting: Int64Array) -> Generator[pa.RecordBatch, None, int]:
        """Let the waiting rows of a part enter if there is room, and answer the others, piece by piece.

        Returns how many rows were accepted: all, or those before one whose answer does not fit the free memory.
        """
        state = self.state
        if waiting.size == len(part):
            self._enter(part, waiting)
            return len(part)
        is_answered = np.ones(len(part), np.bool_)
        is_answered[waiting] = False
        ends = np.cumsum(np.where(is_answered, np.maximum(self._front.results_per_row(part), 1), 0))
        widest = self._front.widest_result(part)
        start = 0
        while start < len(part):
            # Cut before building: a very wide row with many results must not be built only to be found too large.
            together = min(state.results.max_rows, max(1, state.ledger.free_bytes // max(1, widest)))
            most = (int(ends[start - 1]) if start else 0) + together
            stop = max(start + 1, int(np.searchsorted(ends, most, side="right")))
            while True:
                piece, answered = part.part(start, stop), np.flatnonzero(is_answered[start:stop])
                low, high = np.searchsorted(waiting, [start, stop]).tolist()
                entering = waiting[low:high] - start
                answer = self._front.prepare(piece, answered, start) if answered.size else None
                if answer is None or self._has_room(answer, piece, entering):
                    break
                if stop - start == 1:
                    return start
                stop = start + (stop - start) // 2
            yield from self._take_in_piece(piece, entering, answer, answered)
            del answer  # no longer accounted for, so it must not be held while the next one is built
            start = stop
        return start

    def _take_in_piece(
        self, piece: Offered, entering: Int64Array, answer: Answer | None, answered: Int64Array
    ) -> Iterator[pa.RecordBatch]:
        """Accept a piece, and return its answer, for which there is room."""
        state = self.state
        goes_at_once = answer is None or not state.spec.ordered or self._goes_at_once(answer, entering)
        first_ticket = state.arrivals
        self._enter(piece, entering)
        if answer is None:
            return
        self._front.count_answer(answer, piece, answered)
        if answer.batch is None or answer.batch.num_rows == 0:
            return
        if goes_at_once:
            # It fits; the tuples that entered with it may take slightly more than expected, which must not lose it.
            size_bytes = min(state.results.bytes_of(answer.batch), state.ledger.free_bytes)
            yield from state.results.hand_out(answer.batch, size_bytes)
        else:
            state.results.hold(answer.batch, first_ticket + answer.owners)
            yield from state.results.release()

    def _goes_at_once(self, answer: Answer, entering: Int64Array) -> bool:
        """Whether nothing precedes an answer in the order of the stream."""
        state = self.state
        if state.pending or state.results.held.num_rows:
            return False
        return entering.size == 0 or answer.owners.size == 0 or int(answer.owners.max()) < int(entering[0])

    def _has_room(self, answer: Answer, piece: Offered, entering: Int64Array) -> bool:
        """Whether an answer fits beside the tuples that enter with it."""
        state = self.state
        if answer.batch is None:
            return True
        entering_bytes = 0
        if entering.size and state.has_paged_columns and state.window is not None:
            entering_bytes = state.window.paged_bytes_of(piece.rows) + _PAGE_SLACK_BYTES * piece.rows.num_columns
        if not state.spec.ordered or self._goes_at_once(answer, entering):
            return state.ledger.has_room_for(entering_bytes + state.results.bytes_of(answer.batch))
        return state.results.has_room_to_hold(answer.batch, answer.owners, entering_bytes)

    def _take_in_hard(self, one: Offered) -> Generator[pa.RecordBatch, None, int]:
        """Accept a row whose answer does not fit: it waits and is answered in several batches; with a NULL key, once it
        fits.

        Returns how many rows were accepted: one, or none if it is worth trying again.
        """
        state = self.state
        if one.is_null[0]:
            if not state.pending:
                raise self._one_does_not_fit(int(one.rows.nbytes))
            yield from self._step()
            return 0
        while self._room_for(one.rows, _FIRST) == 0:
            yield from self._step()
        self._enter(one, _FIRST)
        return 1

    def _enter(self, piece: Offered, entering: Int64Array) -> None:
        """Count a piece as accepted, and let rows of it enter the window."""
        state = self.state
        first_ticket = state.arrivals
        state.arrivals += len(piece)
        state.metrics.stream_tuples_in += len(piece) + piece.dropped
        self._count_shed(piece.dropped)
        state.metrics.null_key_tuples += int(np.count_nonzero(piece.is_null))
        if entering.size:
            window = state.window_for(piece.rows)
            rows, codes = piece.rows, piece.codes
            if entering.size < len(piece):
                rows, codes = rows.take(pa.array(entering)), codes[entering]
            tickets = first_ticket + entering if state.spec.ordered else None
            window.insert(codes, rows, first_ticket + int(entering[0]), self._deadline(), tickets)
            state.entered += entering.size
            state.entered_since_step += entering.size
            state.account_window()
            state.update_boundary()

    def _room_for(self, part: pa.RecordBatch, waiting: Int64Array) -> int:
        """How many of the waiting rows of a part can enter now."""
        if waiting.size == 0:
            return 0
        room = self._room_in_window(part, waiting)
        if self._room_limit is None:
            return room
        return self._room_limit.limit(room, waiting.size, lambda: self._room_in_window(part, waiting))

    def _room_in_window(self, part: pa.RecordBatch, waiting: Int64Array) -> int:
        state = self.state
        window = state.window_for(part)
        if window.chunks.is_full and window.chunks.newest.deadline != self._deadline():
            return 0
        room = min(window.capacity - len(window), waiting.size)
        if state.spec.chunk_rows is not None:
            room = min(room, max(0, state.spec.chunk_rows - state.entered_since_step))
        if not state.has_paged_columns:
            return room
        free_bytes = state.ledger.free_bytes - state.memory.output_bytes
        if len(window):
            free_bytes -= state.extras.planned_bytes()
        while room and window.paged_bytes_of(part.slice(0, int(waiting[room - 1]) + 1)) > free_bytes:
            room //= 2
        if room == 0 and len(window) == 0 and state.entered_since_step == 0:
            raise self._one_does_not_fit(state.memory.output_bytes + window.paged_bytes_of(part.slice(0, 1)))
        return room

    def _one_does_not_fit(self, wanted_bytes: int) -> BudgetError:
        state = self.state
        needed = state.ledger.held_bytes + wanted_bytes
        return BudgetError(
            f"One stream tuple does not fit: {needed} bytes ({format_bytes(needed)}) are needed, the budget has "
            f"{state.budget.total_bytes}.",
            minimum_bytes=needed,
        )

    # ================================================================ shedding

    def _drops_arriving(self) -> bool:
        state = self.state
        return state.shedding is not None and self._is_full() and state.shedding.drops_arriving

    def _is_full(self) -> bool:
        """Whether the budget, and not w, keeps tuples from entering."""
        state = self.state
        limit = state.spec.chunk_rows
        return limit is None or state.entered_since_step < limit

    def _accept_rest(self, part: Offered, waiting: Int64Array) -> Iterator[pa.RecordBatch]:
        """Drop some of the rows that would have to wait for room, and accept the others whatever it takes.

        A dropped row counts as accepted with the next row that was not dropped, so the accepted rows are always the
        first rows of the batch.
        """
        state = self.state
        assert state.shedding is not None
        is_dropped = np.zeros(len(part), np.bool_)
        is_dropped[waiting[state.shedding.drop_arriving(waiting.size)]] = True
        if state.on_shed is not None and is_dropped.any():
            state.on_shed(part.rows.filter(pa.array(is_dropped)))
        kept = np.flatnonzero(~is_dropped)
        dropped_before = np.diff(kept, prepend=-1, append=len(part)) - 1
        if kept.size == 0:
            state.metrics.stream_tuples_in += len(part)
            self._count_shed(len(part))
            return
        rest = Offered(part.rows.take(pa.array(kept)), part.codes[kept], part.is_null[kept], dropped_before)
        yield from self._accept(rest, may_drop=False)

    def _drop_waiting(self, count: int) -> Generator[pa.RecordBatch, None, bool]:
        """Drop as many waiting tuples without results as want to enter; returns whether any was dropped."""
        state = self.state
        window = state.window
        if state.shedding is None or window is None or not self._is_full():
            return False
        positions = window.live_positions()
        positions = positions[~window.is_matched_at(positions)]
        order = state.shedding.rank_waiting(window.codes_at(positions))
        if order is None or positions.size == 0:
            return False
        dropped = positions[order[:count]]
        self._hand_over(dropped)
        window.take(dropped)
        window.forget(dropped)
        self._count_shed(dropped.size)
        state.account_window()
        state.update_boundary()
        yield from state.results.release()
        return True

    def _hand_over(self, dropped: Int64Array) -> None:
        """Pass waiting tuples that are about to be dropped to `on_shed`, in batches."""
        state = self.state
        if state.on_shed is None or state.window is None:
            return
        columns = list(range(len(state.stream_columns)))
        for start in range(0, dropped.size, max(1, state.results.max_rows)):
            part = dropped[start : start + max(1, state.results.max_rows)]
            state.on_shed(pa.RecordBatch.from_arrays(state.window.gather(part, columns), schema=state.stream_columns))

    def _count_shed(self, count: int) -> None:
        state = self.state
        if count:
            assert state.spec.shed is not None
            state.metrics.count_shed(state.spec.shed.name, int(count))
