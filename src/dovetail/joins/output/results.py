"""Emits results: pairs become output batches of bounded size, at once or, for ``ordered=True``, in their turn.

Every batch is accounted for while it is in flight, so a join value with a million matches stays within the budget. A
result counts as delivered when its batch is returned, and its progress is recorded before that: abandoning an iterator
neither loses nor repeats a result.

- Results of waiting tuples can be found again; progress is recorded pair by pair (`give_pairs`).
- Results of tuples that leave, or never wait, cannot. Their batch is built first, as large as fits (`fit`); only then
  do as many tuples leave, or are accepted, as it holds.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.core.errors import BudgetError
from dovetail.core.memory import Ledger, format_bytes
from dovetail.core.metrics import OperatorMetrics
from dovetail.joins.output.columns import OutputPlan, StreamSide
from dovetail.joins.output.ordering import HeldResults
from dovetail.joins.spec import JoinSpec
from dovetail.joins.window.tuple_store import Positions
from dovetail.relation.widths import row_widths, widest_row

__all__ = ["Results"]

Build = Callable[[int, int], pa.RecordBatch]


def _no_extras() -> bool:
    return False


class Results:
    """An operator's output: builds, bounds, accounts for, and orders it.

    A batch has at most `max_rows`, and as many pairs are examined together. `output_bytes` are planned for a batch in
    flight; held results do not use this part of the budget.
    """

    def __init__(
        self, spec: JoinSpec, ledger: Ledger, metrics: OperatorMetrics, max_rows: int, output_bytes: int
    ) -> None:
        self.plan = OutputPlan(spec)
        self.max_rows = max_rows
        self.output_bytes = output_bytes
        self.is_ordered = spec.ordered
        self.held = HeldResults()
        # Ordered output: results up to this ticket may be emitted; None: all. The operator keeps it up to date.
        self.boundary: int | None = None
        # Ordered output: set when held results had to be discarded to stay within the budget. Tuples with a higher
        # ticket must restart; until then their results are refused.
        self.cut_ticket: int | None = None
        self.reserved_bytes = 0  # ordered output: to leave free for others when results are held
        self.give_up_extras: Callable[[], bool] = _no_extras  # frees memory that results do not depend on, if any
        self._ledger = ledger
        self.metrics = metrics
        self._output_account = ledger.reserve("output")
        self._held_account = ledger.reserve("held") if spec.ordered else None

    # ---------------------------------------------------------------- batches

    def fit(
        self, count: int, build: Build, start: int = 0, widest: int | None = None
    ) -> tuple[int, pa.RecordBatch, int]:
        """Build a batch of as many of the next results as fit the free memory; returns its end, itself and its size.

        `build` makes a batch of results ``[start, stop)``. `widest` bounds the bytes of a result, so that no batch is
        built only to be found too large. Raises a `BudgetError` if a single result does not fit.
        """
        stop = min(start + self.max_rows, count)
        if widest:
            stop = min(stop, start + max(1, self._ledger.free_bytes // widest))
        while True:
            batch = build(start, stop)
            size_bytes = self.bytes_of(batch)
            if size_bytes <= self._ledger.free_bytes:
                return stop, batch, size_bytes
            if stop - start == 1:
                del batch
                self.require_room(size_bytes)
                continue
            stop = start + (stop - start) // 2

    def require_room(self, size_bytes: int) -> None:
        """Make room for one output row before it is built, or raise."""
        while size_bytes > self._ledger.free_bytes:
            if self.give_up_extras():
                continue
            needed = self._ledger.held_bytes + size_bytes
            raise BudgetError(
                f"One output row of {format_bytes(size_bytes)} does not fit what is free of the budget, "
                f"{format_bytes(self._ledger.free_bytes)}.",
                hint=f"Raise the budget to at least {needed} bytes.",
                minimum_bytes=needed,
            )

    def bytes_of(self, batch: pa.RecordBatch) -> int:
        """The size of a batch in flight."""
        # Counting whole buffers is far cheaper than counting their used parts, and usually the same.
        buffer_bytes = int(batch.get_total_buffer_size())
        return buffer_bytes if buffer_bytes <= self._ledger.free_bytes else int(batch.nbytes)

    def reserve(self, size_bytes: int) -> None:
        """Account for a batch that is about to be returned; may raise, so it comes before anything changes."""
        self._output_account.resize(size_bytes)

    def hand_out(self, batch: pa.RecordBatch, size_bytes: int) -> Iterator[pa.RecordBatch]:
        """Return a batch that was checked to fit."""
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
        widest: int | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Emit matching pairs of waiting tuples: those at `positions` of `side` with `rows` of `relation`.

        `tickets` are the tuples' arrival numbers, for ordered output. `on_progress` is called with the number of pairs
        delivered or held, before each batch is returned. `widest` bounds the bytes of a result; None: results are about
        as wide as planned.
        """

        def build(start: int, stop: int) -> pa.RecordBatch:
            return self.plan.joined(side, positions[start:stop], relation, rows[start:stop])

        start = 0
        while start < positions.size:
            most = self._rows_within(relation, rows, start, widest)
            stop, batch, size_bytes = self.fit(min(positions.size, start + most), build, start)
            if self.is_ordered:
                assert tickets is not None, "ordered output needs tickets"
                yield from self._give_in_order(batch, tickets[start:stop], partial(on_progress, stop))
            else:
                self.reserve(size_bytes)
                on_progress(stop)
                yield from self.hand_out(batch, size_bytes)
            del batch  # no longer accounted for, so it must not be held while the next one is built
            start = stop

    def _rows_within(self, relation: pa.RecordBatch, rows: Positions, start: int, widest: int | None) -> int:
        """How many pairs from here on fit the free memory, computed before they are built; at least one."""
        free_bytes, count = self._ledger.free_bytes, min(self.max_rows, rows.size - start)
        if widest is None or widest * count <= free_bytes:
            return count
        # Some row is very wide: count the bytes of each relation row. The stream's part is assumed to be the widest.
        of_relation = row_widths(relation, np.asarray(rows[start : start + count], np.int64))
        of_stream = max(0, widest - widest_row(relation))
        self.require_room(int(of_relation[0]))
        free_bytes = self._ledger.free_bytes
        return max(1, int(np.searchsorted(np.cumsum(of_relation + of_stream), free_bytes, side="right")))

    # ---------------------------------------------------------------- ordered output

    def _give_in_order(
        self, batch: pa.RecordBatch, tickets: Int64Array, note_progress: Callable[[], None]
    ) -> Iterator[pa.RecordBatch]:
        """Emit results whose turn it is, and hold the others."""
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
        """Hold results, for which there is room, until their turn. Pinned ones are never discarded."""
        self.held.add(batch, tickets, is_pinned)
        self._account_held()

    def release(self) -> Iterator[pa.RecordBatch]:
        """Emit held results whose turn has come."""
        if self._held_account is None:
            return
        while (ready := self.held.next_ready(self.boundary, self.max_rows, self._ledger.free_bytes)) is not None:
            self.held.let_go(ready)
            self._account_held()
            # A single row larger than the free memory is not copied, and its piece is still accounted for.
            yield from self.hand_out(ready.batch, min(int(ready.batch.nbytes), self._ledger.free_bytes))

    def has_room_to_hold(self, batch: pa.RecordBatch, tickets: Int64Array, entering_bytes: int = 0) -> bool:
        """Whether results can be held if others are about to hold `entering_bytes`."""
        wanted_bytes = int(batch.nbytes) + tickets.nbytes + self.output_bytes + self.reserved_bytes
        return self._ledger.has_room_for(wanted_bytes + entering_bytes)

    def _account_held(self) -> None:
        if self._held_account is not None:
            self._held_account.resize(self.held.nbytes)

    def _make_room(self, batch: pa.RecordBatch, tickets: Int64Array) -> None:
        """Discard results of younger waiting tuples, which will restart, if the budget leaves no other way."""
        self.held.compact()
        self._account_held()
        if self.has_room_to_hold(batch, tickets):
            return
        head = -1 if self.boundary is None else self.boundary
        if self.cut_ticket is not None and self.cut_ticket <= head:
            wanted_bytes = int(batch.nbytes) + tickets.nbytes
            minimum = self._ledger.held_bytes + self.output_bytes + wanted_bytes
            raise BudgetError(
                f"Results that must be emitted in order, {format_bytes(wanted_bytes)}, do not fit what is free of the "
                f"budget, {format_bytes(self._ledger.free_bytes)}.",
                hint=f"Raise the budget to at least {minimum} bytes.",
                minimum_bytes=minimum,
            )
        # The older half keeps its results, so most of the work is kept; if that is not enough, only the oldest tuple
        # continues, whose results are emitted directly.
        middle = self.held.middle_ticket()
        limit = head if middle is None else max(head, middle)
        if self.cut_ticket is not None and limit >= self.cut_ticket:
            limit = head
        self.cut_ticket = limit
        self.held.discard_after(limit)
        self._account_held()

    def replace_held(self, held: HeldResults) -> None:
        """Take over the results of a snapshot."""
        if self._held_account is not None:
            self._held_account.resize(held.nbytes)
            self.held = held
