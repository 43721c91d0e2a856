"""The way out: pairs become output batches of bounded size, at once or, for ``ordered=True``, when it is their turn.

Every batch is accounted for while it is on its way, so a join value with a million matches stays within the budget. A
result counts as delivered when its batch is handed out: whoever gives up an iterator loses nothing and gets nothing
twice, because progress is noted (`on_progress`) before the batch leaves.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.errors import BudgetError
from dovetail.memory import Ledger, format_bytes
from dovetail.metrics import OperatorMetrics
from dovetail.operators.ordering import HeldResults
from dovetail.operators.output import OutputPlan, StreamSide
from dovetail.operators.spec import JoinSpec
from dovetail.operators.tuple_store import Positions

__all__ = ["Results"]

Int64Array = npt.NDArray[np.int64]
Progress = Callable[[int], None]
Build = Callable[[int, int], pa.RecordBatch]


def _no_progress(_: int) -> None:
    pass


class Results:
    """An operator's output: assembles, bounds, accounts, and orders it.

    Parameters
    ----------
    spec, ledger, metrics
        The operator's.
    max_rows
        The most rows of a batch, and the most pairs looked at together.
    output_bytes
        What is planned for a batch on its way; results are not held in this part of the budget.

    Attributes
    ----------
    boundary
        Ordered output only: results up to this ticket may go out; None: all may. The operator keeps it up to date.
    floor
        Ordered output only: no result above this ticket may go out yet, whatever `boundary` says, because tuples that
        do not wait are being answered one after the other; None: no such limit.
    cut_ticket
        Ordered output only: set when held results had to be discarded to stay within the budget. Tuples with a higher
        ticket must begin again; until the operator has seen to that, results of theirs are refused.
    """

    def __init__(
        self, spec: JoinSpec, ledger: Ledger, metrics: OperatorMetrics, max_rows: int, output_bytes: int
    ) -> None:
        self.plan = OutputPlan(spec)
        self.max_rows = max_rows
        self.output_bytes = output_bytes
        self.is_ordered = spec.ordered
        self.held = HeldResults()
        self.boundary: int | None = None
        self.floor: int | None = None
        self.cut_ticket: int | None = None
        self._ledger = ledger
        self.metrics = metrics
        self._output_account = ledger.reserve("output")
        self._held_account = ledger.reserve("held") if spec.ordered else None

    # ---------------------------------------------------------------- giving

    def give_pairs(
        self,
        side: StreamSide,
        positions: Positions,
        relation: pa.RecordBatch,
        rows: Positions | None,
        tickets: Int64Array | None = None,
        is_pinned: bool = False,
        on_progress: Progress = _no_progress,
    ) -> Iterator[pa.RecordBatch]:
        """Put out pairs that are matches; a row number of -1 stands for a relation row of NULLs.

        Parameters
        ----------
        side, positions
            Where the stream's half is, and which tuples.
        relation, rows
            Where the relation's half is, and which rows; None: its rows are those of the pairs, one by one.
        tickets
            The tuples' arrival numbers; needed for ordered output.
        is_pinned
            Whether the tuples wait no more, so that the results cannot be found again.
        on_progress
            Called with the number of pairs that are delivered or held, before each batch leaves.
        """

        def build(start: int, stop: int) -> pa.RecordBatch:
            if rows is None:
                return self.plan.joined(side, positions[start:stop], relation.slice(start, stop - start), None)
            return self.plan.joined(side, positions[start:stop], relation, rows[start:stop])

        return self._give(positions.size, build, tickets, is_pinned, on_progress)

    def give_tuples(
        self,
        side: StreamSide,
        positions: Positions,
        tickets: Int64Array | None = None,
        is_pinned: bool = True,
        on_progress: Progress = _no_progress,
    ) -> Iterator[pa.RecordBatch]:
        """Put out tuples by themselves: the unmatched of left and anti, the matched of semi."""

        def build(start: int, stop: int) -> pa.RecordBatch:
            return self.plan.unmatched(side, positions[start:stop])

        return self._give(positions.size, build, tickets, is_pinned, on_progress)

    def _give(
        self, count: int, build: Build, tickets: Int64Array | None, is_pinned: bool, on_progress: Progress
    ) -> Iterator[pa.RecordBatch]:
        for start, stop, batch, size_bytes in self._bounded(count, build):
            if not self.is_ordered:
                # May refuse, so it comes before the batch counts as delivered.
                self._output_account.resize(size_bytes)
                on_progress(stop)
                yield from self._hand_out(batch, size_bytes)
                continue
            assert tickets is not None, "ordered output needs tickets"
            # Pinned results come in the order of their tickets: what is above the last of them is not answered yet.
            up_to = None if stop == count or not is_pinned else int(tickets[stop - 1])
            yield from self._give_in_order(batch, tickets[start:stop], is_pinned, up_to, partial(on_progress, stop))

    def _bounded(self, count: int, build: Build) -> Iterator[tuple[int, int, pa.RecordBatch, int]]:
        """Build batches of at most `max_rows` rows that fit what is free of the budget; give their bytes, too."""
        start, size = 0, min(count, self.max_rows)
        while start < count:
            stop = min(start + size, count)
            batch = build(start, stop)
            size_bytes = self._bytes_of(batch)
            if size_bytes > self._ledger.free_bytes and stop - start > 1:
                size = (stop - start) // 2
                continue
            yield start, stop, batch, size_bytes
            start = stop

    def _bytes_of(self, batch: pa.RecordBatch) -> int:
        # Counting whole buffers is far cheaper than counting what is used of them, and mostly the same.
        buffer_bytes = int(batch.get_total_buffer_size())
        return buffer_bytes if buffer_bytes <= self._ledger.free_bytes else int(batch.nbytes)

    def _hand_out(self, batch: pa.RecordBatch, size_bytes: int | None = None) -> Iterator[pa.RecordBatch]:
        self._output_account.resize(int(batch.nbytes) if size_bytes is None else size_bytes)
        self.metrics.output_rows += batch.num_rows
        try:
            yield batch
        finally:
            self._output_account.resize(0)

    # ---------------------------------------------------------------- ordered output

    def _give_in_order(
        self,
        batch: pa.RecordBatch,
        tickets: Int64Array,
        is_pinned: bool,
        up_to: int | None,
        note_progress: Callable[[], None],
    ) -> Iterator[pa.RecordBatch]:
        """Put out results whose turn it is, and hold the others."""
        while True:
            if self.cut_ticket is not None and not is_pinned:
                kept = np.flatnonzero(tickets <= self.cut_ticket)
                if kept.size < tickets.size:
                    batch, tickets = batch.take(pa.array(kept)), tickets[kept]
            limit = self._limit(None)
            is_their_turn = tickets.size == 0 or limit is None or int(tickets.max()) <= limit
            if is_their_turn and not self.held.has_ready(limit):
                order = np.argsort(tickets, kind="stable")
                ready = batch if is_pinned else batch.take(pa.array(order))
                self._output_account.resize(int(ready.nbytes))
                note_progress()
                yield from self._hand_out(ready)
                return
            if self._has_room_to_hold(batch, tickets):
                break
            if is_their_turn and is_pinned:
                note_progress()
                yield from self._merge_one_by_one(batch, tickets)
                return
            self._make_room(batch, tickets)
        self.held.add(batch, tickets, is_pinned)
        self._account_held()
        note_progress()
        yield from self.release(up_to)

    def _merge_one_by_one(self, batch: pa.RecordBatch, tickets: Int64Array) -> Iterator[pa.RecordBatch]:
        """Put out results between those that are held, where there is no room to hold them all."""
        for row, ticket in enumerate(tickets.tolist()):
            yield from self.release(ticket)
            yield from self._hand_out(batch.slice(row, 1))
        yield from self.release()

    def release(self, up_to: int | None = None) -> Iterator[pa.RecordBatch]:
        """Put out held results whose turn has come, at most up to a ticket."""
        if self._held_account is None:
            return
        limit = self._limit(up_to)
        while (batch := self.held.release(limit, self.max_rows, self._ledger.free_bytes)) is not None:
            self._account_held()
            yield from self._hand_out(batch)

    def room_to_hold(self, count: int) -> bool:
        """Whether about ``count`` more results could be held without discarding any."""
        return count == 0 or self._ledger.has_room_for(self.output_bytes + int(count * (self.plan.row_bytes + 8)))

    def _limit(self, up_to: int | None) -> int | None:
        return min((limit for limit in (self.boundary, self.floor, up_to) if limit is not None), default=None)

    def _has_room_to_hold(self, batch: pa.RecordBatch, tickets: Int64Array) -> bool:
        return self._ledger.has_room_for(int(batch.nbytes) + tickets.nbytes + self.output_bytes)

    def _account_held(self) -> None:
        if self._held_account is not None:
            self._held_account.resize(self.held.nbytes)

    def _make_room(self, batch: pa.RecordBatch, tickets: Int64Array) -> None:
        """Discard results of younger waiting tuples, which will begin again, where the budget leaves no other way."""
        self.held.compact()
        self._account_held()
        if self._has_room_to_hold(batch, tickets):
            return
        head = -1 if self.boundary is None else self.boundary
        if self.cut_ticket is not None and self.cut_ticket <= head:
            wanted_bytes = int(batch.nbytes) + tickets.nbytes
            minimum = self._ledger.held_bytes + self.output_bytes + wanted_bytes
            raise BudgetError(
                f"Results that must be put out in order, {format_bytes(wanted_bytes)}, do not fit what is free of the "
                f"budget, {format_bytes(self._ledger.free_bytes)}.",
                hint=f"Raise the budget to at least {minimum} bytes.",
                minimum_bytes=minimum,
            )
        # The older half keeps its results, so that most of the work done is kept; with nothing to keep, the oldest
        # tuple alone goes on, whose results leave as they come.
        middle = self.held.middle_ticket()
        limit = head if middle is None else max(head, middle)
        if self.cut_ticket is not None and limit >= self.cut_ticket:
            limit = head
        self.cut_ticket = limit
        self.held.discard_after(limit)
        self._account_held()

    def replace_held(self, held: HeldResults) -> None:
        """Take over results out of a snapshot."""
        if self._held_account is not None:
            self._held_account.resize(held.nbytes)
            self.held = held
