"""The way out: pairs become output batches of bounded size, at once or, for ``ordered=True``, when it is their turn.

Every batch is accounted for while it is on its way, so a join value with a million matches stays within the budget. A
result counts as delivered when its batch is handed out, and everything that goes with it is noted before: whoever gives
up an iterator loses nothing and gets nothing twice.

- Results of waiting tuples can be found again, and progress is noted pair by pair (`give_pairs`).
- Results of tuples that leave, or never wait, cannot. Their batch is made first, as large as fits (`fit`); only then do
  as many tuples leave, or are accepted, as it holds.
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
Build = Callable[[int, int], pa.RecordBatch]


def _no_extras() -> bool:
    return False


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
    cut_ticket
        Ordered output only: set when held results had to be discarded to stay within the budget. Tuples with a higher
        ticket must begin again; until the operator has seen to that, results of theirs are refused.
    reserved_bytes
        Ordered output only: what is to be left free besides, when results are held, for what others plan to hold.
    give_up_extras
        Lets go of memory that results do not depend on, and tells whether there was any.
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
        self.cut_ticket: int | None = None
        self.reserved_bytes = 0
        self.give_up_extras: Callable[[], bool] = _no_extras
        self._ledger = ledger
        self.metrics = metrics
        self._output_account = ledger.reserve("output")
        self._held_account = ledger.reserve("held") if spec.ordered else None

    # ---------------------------------------------------------------- batches

    def fit(self, count: int, build: Build, start: int = 0) -> tuple[int, pa.RecordBatch, int]:
        """Make a batch out of as many of the next results as fit what is free: where it stops, and its bytes.

        Parameters
        ----------
        count
            How many results there are.
        build
            Makes a batch of results ``[start, stop)``.
        start
            The first one.

        Raises
        ------
        BudgetError
            If one result alone does not fit.
        """
        stop = min(start + self.max_rows, count)
        while True:
            batch = build(start, stop)
            size_bytes = self.bytes_of(batch)
            if size_bytes <= self._ledger.free_bytes:
                return stop, batch, size_bytes
            if stop - start == 1:
                if self.give_up_extras():
                    continue
                needed = self._ledger.held_bytes + size_bytes
                raise BudgetError(
                    f"One output row of {format_bytes(size_bytes)} does not fit what is free of the budget, "
                    f"{format_bytes(self._ledger.free_bytes)}.",
                    hint=f"Raise the budget to at least {needed} bytes.",
                    minimum_bytes=needed,
                )
            stop = start + (stop - start) // 2

    def bytes_of(self, batch: pa.RecordBatch) -> int:
        """Bytes that a batch on its way holds."""
        # Counting whole buffers is far cheaper than counting what is used of them, and mostly the same.
        buffer_bytes = int(batch.get_total_buffer_size())
        return buffer_bytes if buffer_bytes <= self._ledger.free_bytes else int(batch.nbytes)

    def reserve(self, size_bytes: int) -> None:
        """Account for a batch that is about to be handed out; may refuse, so it comes before anything changes."""
        self._output_account.resize(size_bytes)

    def hand_out(self, batch: pa.RecordBatch, size_bytes: int) -> Iterator[pa.RecordBatch]:
        """Hand out a batch; it was checked that it fits."""
        self._output_account.resize(size_bytes)
        self.metrics.output_rows += batch.num_rows
        try:
            yield batch
        finally:
            self._output_account.resize(0)

    # ---------------------------------------------------------------- results that can be found again

    def give_pairs(
        self,
        side: StreamSide,
        positions: Positions,
        relation: pa.RecordBatch,
        rows: Positions,
        tickets: Int64Array | None,
        on_progress: Callable[[int], None],
    ) -> Iterator[pa.RecordBatch]:
        """Put out pairs that are matches, of tuples that wait.

        Parameters
        ----------
        side, positions
            Where the stream's half is, and which tuples.
        relation, rows
            Where the relation's half is, and which rows.
        tickets
            The tuples' arrival numbers; needed for ordered output.
        on_progress
            Called with the number of pairs that are delivered or held, before each batch leaves.
        """

        def build(start: int, stop: int) -> pa.RecordBatch:
            return self.plan.joined(side, positions[start:stop], relation, rows[start:stop])

        start = 0
        while start < positions.size:
            stop, batch, size_bytes = self.fit(positions.size, build, start)
            if self.is_ordered:
                assert tickets is not None, "ordered output needs tickets"
                yield from self._give_in_order(batch, tickets[start:stop], partial(on_progress, stop))
            else:
                self.reserve(size_bytes)
                on_progress(stop)
                yield from self.hand_out(batch, size_bytes)
            del batch  # no longer accounted for, so it must not be held while the next one is made
            start = stop

    # ---------------------------------------------------------------- ordered output

    def _give_in_order(
        self, batch: pa.RecordBatch, tickets: Int64Array, note_progress: Callable[[], None]
    ) -> Iterator[pa.RecordBatch]:
        """Put out results whose turn it is, and hold the others."""
        while True:
            if self.cut_ticket is not None:
                kept = np.flatnonzero(tickets <= self.cut_ticket)
                if kept.size < tickets.size:
                    batch, tickets = batch.take(pa.array(kept)), tickets[kept]
            is_their_turn = tickets.size == 0 or self.boundary is None or int(tickets.max()) <= self.boundary
            if is_their_turn and not self.held.has_ready(self.boundary):
                ready = batch.take(pa.array(np.argsort(tickets, kind="stable")))
                self.reserve(int(ready.nbytes))
                note_progress()
                yield from self.hand_out(ready, int(ready.nbytes))
                return
            if self.has_room_to_hold(batch, tickets):
                break
            self._make_room(batch, tickets)
        self.hold(batch, tickets, is_pinned=False)
        note_progress()
        yield from self.release()

    def hold(self, batch: pa.RecordBatch, tickets: Int64Array, is_pinned: bool = True) -> None:
        """Hold results until it is their turn; it was checked that there is room. Pinned ones are never discarded."""
        self.held.add(batch, tickets, is_pinned)
        self._account_held()

    def release(self) -> Iterator[pa.RecordBatch]:
        """Put out held results whose turn has come."""
        if self._held_account is None:
            return
        while (ready := self.held.next_ready(self.boundary, self.max_rows, self._ledger.free_bytes)) is not None:
            self.held.let_go(ready)
            self._account_held()
            # One row that is larger than what is free is not copied, and its piece is still accounted for.
            yield from self.hand_out(ready.batch, min(int(ready.batch.nbytes), self._ledger.free_bytes))

    def has_room_to_hold(self, batch: pa.RecordBatch, tickets: Int64Array, entering_bytes: int = 0) -> bool:
        """Whether results can be held, so many bytes being about to be held by others."""
        wanted_bytes = int(batch.nbytes) + tickets.nbytes + self.output_bytes + self.reserved_bytes
        return self._ledger.has_room_for(wanted_bytes + entering_bytes)

    def _account_held(self) -> None:
        if self._held_account is not None:
            self._held_account.resize(self.held.nbytes)

    def _make_room(self, batch: pa.RecordBatch, tickets: Int64Array) -> None:
        """Discard results of younger waiting tuples, which will begin again, where the budget leaves no other way."""
        self.held.compact()
        self._account_held()
        if self.has_room_to_hold(batch, tickets):
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
