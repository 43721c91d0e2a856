"""The way in: which offered tuples wait, which are answered at once, and which are dropped for lack of room.

A batch is taken in piece by piece. What is answered of a piece is made first, as one batch that fits what is free; then
the piece is accepted, and the batch is handed out. So a predicate that raises leaves the operator as it was, and an
iterator that is given up has either had a piece's answer or not had the piece accepted: ``metrics.stream_tuples_in``
tells how far it got.
"""

from abc import abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.errors import BudgetError
from dovetail.memory import format_bytes
from dovetail.operators.core import JoinCore
from dovetail.operators.memory_plan import MAX_BATCH_ROWS
from dovetail.operators.output import BatchRows
from dovetail.operators.spec import JoinSpec

__all__ = ["Admission", "Answer"]

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
_FEWEST_ADMITTED = 1024
_PAGE_SLACK_BYTES = 64
_FIRST = np.zeros(1, np.int64)


@dataclass(frozen=True)
class Answer:
    """What is put out at once for rows of a piece that need not wait.

    Attributes
    ----------
    batch
        The output; None if there is none.
    owners
        For each row of it, the row of the piece that it belongs to.
    matched, unmatched
        How many rows of the piece match, and do not.
    """

    batch: pa.RecordBatch | None
    owners: Int64Array
    matched: int
    unmatched: int


@dataclass(frozen=True)
class Offered:
    """Rows of an offered batch.

    Attributes
    ----------
    rows, codes, is_null
        The stream's own columns, the codes, and where the key has a NULL.
    dropped_before
        How many rows were dropped out of the batch before each of these rows since the one before, and, as one number
        more, after the last; None if none were.
    """

    rows: pa.RecordBatch
    codes: Int64Array
    is_null: BoolArray
    dropped_before: Int64Array | None = None

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def part(self, start: int, stop: int) -> "Offered":
        """Some of the rows; the last of all brings those along that were dropped after it."""
        dropped = self.dropped_before
        if dropped is not None:
            is_last = stop == len(self)
            dropped = np.append(dropped[start:stop], dropped[stop] if is_last else 0)
        return Offered(self.rows.slice(start, stop - start), self.codes[start:stop], self.is_null[start:stop], dropped)

    @property
    def dropped(self) -> int:
        """How many rows were dropped before, between and after these."""
        return 0 if self.dropped_before is None else int(self.dropped_before.sum())


class Admission(JoinCore):
    """A join core with a way in."""

    def __init__(self, spec: JoinSpec) -> None:
        super().__init__(spec)
        self._arrivals = 0
        self._entered_since_step = 0

    # ================================================================ for subclasses

    @abstractmethod
    def _one_step(self) -> Iterator[pa.RecordBatch]:
        """One disk step, to make room."""

    def _select_waiting(self, offered: Offered) -> Int64Array:
        """The rows of an offered part that must enter the window, ascending. Must not change anything."""
        return np.flatnonzero(~offered.is_null)

    def _results_per_row(self, offered: Offered) -> Int64Array:
        """About how many results each row has if it is answered at once."""
        return np.ones(len(offered), np.int64)

    def _prepare(self, piece: Offered, answered: Int64Array, start: int) -> Answer:
        """Make what is put out for rows of a piece that need not wait; here those with a NULL key, which match nothing.

        May raise, and must not change anything. The piece begins with row ``start`` of what was looked at together.
        """
        if self.spec.how not in ("left", "anti"):
            return Answer(None, answered[:0], 0, answered.size)
        batch = self.results.plan.unmatched(BatchRows(piece.rows), answered)
        return Answer(batch, answered, 0, answered.size)

    def _count_answer(self, answer: Answer, piece: Offered, answered: Int64Array) -> None:
        """Count rows that were answered; the piece has just been accepted."""
        self.metrics.matched_tuples += answer.matched
        self.metrics.unmatched_tuples += answer.unmatched

    def _deadline(self) -> int:
        """The deadline of tuples that enter now."""
        return 0

    def _admission_rows(self) -> int:
        """How many rows of an offered batch to look at together."""
        room = MAX_BATCH_ROWS if self._window is None else self._window.capacity - len(self._window)
        # With ordered output those that are answered at once may have to be held, a batch of output at most.
        most = self.results.max_rows if self.spec.ordered else MAX_BATCH_ROWS
        return min(max(room, _FEWEST_ADMITTED), most)

    # ================================================================ accepting

    def _accept(self, offered: Offered, may_drop: bool) -> Iterator[pa.RecordBatch]:
        start = 0
        # What was ready when an iterator was given up goes before anything new.
        yield from self.results.release()
        while start < len(offered):
            if self._pairs_done:
                yield from self._one_step()
            part = offered.part(start, min(start + self._admission_rows(), len(offered)))
            waiting = self._select_waiting(part)
            try:
                room = self._room_for(part.rows, waiting)
            except BudgetError:
                if not self._give_up_extras():
                    raise
                continue
            if waiting.size > room:
                if room == 0 and waiting[0] == 0:
                    if may_drop and self._drops_arriving():
                        yield from self._accept_rest(part, waiting)
                        start += len(part)
                    elif not (may_drop and (yield from self._drop_waiting(waiting.size))):
                        yield from self._one_step()
                    continue
                part, waiting = part.part(0, int(waiting[room])), waiting[:room]
            taken = yield from self._take_in(part, waiting)
            if taken < len(part):
                taken += yield from self._take_in_hard(part.part(taken, taken + 1))
            start += taken

    def _take_in(self, part: Offered, waiting: Int64Array) -> Generator[pa.RecordBatch, None, int]:
        """Let the waiting rows of a part enter, for which there is room, and answer the others, piece by piece.

        Returns
        -------
        int
            How many rows were accepted: all, or those before one whose answer does not fit what is free.
        """
        if waiting.size == len(part):
            self._enter(part, waiting)
            return len(part)
        is_answered = np.ones(len(part), np.bool_)
        is_answered[waiting] = False
        ends = np.cumsum(np.where(is_answered, np.maximum(self._results_per_row(part), 1), 0))
        start = 0
        while start < len(part):
            most = (int(ends[start - 1]) if start else 0) + self.results.max_rows
            stop = max(start + 1, int(np.searchsorted(ends, most, side="right")))
            while True:
                piece, answered = part.part(start, stop), np.flatnonzero(is_answered[start:stop])
                low, high = np.searchsorted(waiting, [start, stop]).tolist()
                entering = waiting[low:high] - start
                answer = self._prepare(piece, answered, start) if answered.size else None
                if answer is None or self._has_room(answer, piece, entering):
                    break
                if stop - start == 1:
                    return start
                stop = start + (stop - start) // 2
            yield from self._take_in_piece(piece, entering, answer, answered)
            del answer  # no longer accounted for, so it must not be held while the next one is made
            start = stop
        return start

    def _take_in_piece(
        self, piece: Offered, entering: Int64Array, answer: Answer | None, answered: Int64Array
    ) -> Iterator[pa.RecordBatch]:
        """Accept a piece, and hand out its answer, for which there is room."""
        goes_at_once = answer is None or not self.spec.ordered or self._goes_at_once(answer, entering)
        first_ticket = self._arrivals
        self._enter(piece, entering)
        if answer is None:
            return
        self._count_answer(answer, piece, answered)
        if answer.batch is None or answer.batch.num_rows == 0:
            return
        if goes_at_once:
            # It fits; what entered with it may take a few bytes more than was expected, and that must not lose it.
            size_bytes = min(self.results.bytes_of(answer.batch), self._ledger.free_bytes)
            yield from self.results.hand_out(answer.batch, size_bytes)
        else:
            self.results.hold(answer.batch, first_ticket + answer.owners)
            yield from self.results.release()

    def _goes_at_once(self, answer: Answer, entering: Int64Array) -> bool:
        """Whether nothing comes before an answer in the order of the stream."""
        if self.pending or self.results.held.num_rows:
            return False
        return entering.size == 0 or answer.owners.size == 0 or int(answer.owners.max()) < int(entering[0])

    def _has_room(self, answer: Answer, piece: Offered, entering: Int64Array) -> bool:
        """Whether an answer fits besides the tuples that enter with it."""
        if answer.batch is None:
            return True
        entering_bytes = 0
        if entering.size and self._has_paged_columns and self._window is not None:
            entering_bytes = self._window.paged_bytes_of(piece.rows) + _PAGE_SLACK_BYTES * piece.rows.num_columns
        if not self.spec.ordered or self._goes_at_once(answer, entering):
            return self._ledger.has_room_for(entering_bytes + self.results.bytes_of(answer.batch))
        return self.results.has_room_to_hold(answer.batch, answer.owners, entering_bytes)

    def _take_in_hard(self, one: Offered) -> Generator[pa.RecordBatch, None, int]:
        """Take in a row whose answer does not fit: it waits, and is answered bit by bit; with a NULL key, when it fits.

        Returns
        -------
        int
            How many rows were accepted: one, or none where it is worth trying again.
        """
        if one.is_null[0]:
            if not self.pending:
                raise self._one_does_not_fit(int(one.rows.nbytes))
            yield from self._one_step()
            return 0
        while self._room_for(one.rows, _FIRST) == 0:
            yield from self._one_step()
        self._enter(one, _FIRST)
        return 1

    def _enter(self, piece: Offered, entering: Int64Array) -> None:
        """Count a piece as accepted, and let rows of it enter the window."""
        first_ticket = self._arrivals
        self._arrivals += len(piece)
        self.metrics.stream_tuples_in += len(piece) + piece.dropped
        self._count_shed(piece.dropped)
        self.metrics.null_key_tuples += int(np.count_nonzero(piece.is_null))
        if entering.size:
            window = self._window_for(piece.rows)
            rows, codes = piece.rows, piece.codes
            if entering.size < len(piece):
                rows, codes = rows.take(pa.array(entering)), codes[entering]
            tickets = first_ticket + entering if self.spec.ordered else None
            window.insert(codes, rows, first_ticket + int(entering[0]), self._deadline(), tickets)
            self._entered_since_step += entering.size
            self._account_window()
            self._update_boundary()

    def _room_for(self, part: pa.RecordBatch, waiting: Int64Array) -> int:
        """How many of the waiting rows of a part can enter now."""
        if waiting.size == 0:
            return 0
        window = self._window_for(part)
        if window.chunks.is_full and window.chunks.newest.deadline != self._deadline():
            return 0
        room = min(window.capacity - len(window), waiting.size)
        if self.spec.chunk_rows is not None:
            room = min(room, max(0, self.spec.chunk_rows - self._entered_since_step))
        if not self._has_paged_columns:
            return room
        free_bytes = self._ledger.free_bytes - self._memory.output_bytes
        if len(window):
            free_bytes -= self._planned_bytes()
        while room and window.paged_bytes_of(part.slice(0, int(waiting[room - 1]) + 1)) > free_bytes:
            room //= 2
        if room == 0 and len(window) == 0 and self._entered_since_step == 0:
            raise self._one_does_not_fit(self._memory.output_bytes + window.paged_bytes_of(part.slice(0, 1)))
        return room

    def _one_does_not_fit(self, wanted_bytes: int) -> BudgetError:
        needed = self._ledger.held_bytes + wanted_bytes
        return BudgetError(
            f"One stream tuple does not fit: {needed} bytes ({format_bytes(needed)}) are needed, the budget has "
            f"{self.budget.total_bytes}.",
            minimum_bytes=needed,
        )

    # ================================================================ shedding

    def _drops_arriving(self) -> bool:
        return self._shedding is not None and self._is_full() and self._shedding.drops_arriving

    def _is_full(self) -> bool:
        """Whether it is the budget, and not w, that keeps tuples from entering."""
        limit = self.spec.chunk_rows
        return limit is None or self._entered_since_step < limit

    def _accept_rest(self, part: Offered, waiting: Int64Array) -> Iterator[pa.RecordBatch]:
        """Drop some of the rows that would have to wait for room, and accept the others whatever it takes.

        A row that was dropped counts as accepted with the next row that was not, so that those that count are always
        the first rows of what was offered.
        """
        assert self._shedding is not None
        is_dropped = np.zeros(len(part), np.bool_)
        is_dropped[waiting[self._shedding.drop_arriving(waiting.size)]] = True
        kept = np.flatnonzero(~is_dropped)
        dropped_before = np.diff(kept, prepend=-1, append=len(part)) - 1
        if kept.size == 0:
            self.metrics.stream_tuples_in += len(part)
            self._count_shed(len(part))
            return
        rest = Offered(part.rows.take(pa.array(kept)), part.codes[kept], part.is_null[kept], dropped_before)
        yield from self._accept(rest, may_drop=False)

    def _drop_waiting(self, count: int) -> Generator[pa.RecordBatch, None, bool]:
        """Drop waiting tuples that have given nothing yet, as many as want to enter; tell whether any was."""
        window = self._window
        if self._shedding is None or window is None or not self._is_full():
            return False
        positions = window.live_positions()
        positions = positions[~window.is_matched_at(positions)]
        order = self._shedding.rank_waiting(window.codes_at(positions))
        if order is None or positions.size == 0:
            return False
        dropped = positions[order[:count]]
        window.take(dropped)
        window.forget(dropped)
        self._count_shed(dropped.size)
        self._account_window()
        self._update_boundary()
        yield from self.results.release()
        return True

    def _count_shed(self, count: int) -> None:
        if count:
            assert self.spec.shed is not None
            self.metrics.count_shed(self.spec.shed.name, int(count))
