"""What all semi-stream joins share besides their core: the way in, shedding, tuning, saving and restoring.

An operator is a subclass of `SemiStreamOperator` that adds its disk phase and, if it has one, its cache:

=====================  ===============================================================================================
`_disk_step`           one disk step; reads with `_read_block`, joins with `_join_block`, lets tuples leave with
                       `_leave` or `_leave_oldest`
`_select_waiting`      which rows of an offered part must wait; the others are answered from memory
`_answer`              answers those others; the default knows NULL keys only
`_deadline`            the deadline of tuples that enter now, for operators that scan
`_plan_memory`         how the budget is divided, where there is more than block, output and window
`_observe_matches`     learns of matches, for operators that count them
`_restart_after`       lets young tuples begin again, when ordered results had to be discarded
`_save`, `_load`       the operator's own part of a snapshot
=====================  ===============================================================================================
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.errors import BudgetError, DovetailError, PlanError, SchemaError, StateError
from dovetail.memory import Budget, format_bytes
from dovetail.metrics import OperatorMetrics
from dovetail.operators.core import JoinCore
from dovetail.operators.memory_plan import MAX_BATCH_ROWS
from dovetail.operators.ordering import HeldResults
from dovetail.operators.protocol import CODE_COLUMN, Snapshot
from dovetail.operators.spec import JoinSpec, require_positive
from dovetail.operators.tuple_store import is_fixed_width
from dovetail.operators.window import StreamWindow

__all__ = ["SemiStreamOperator"]

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
_FEWEST_ADMITTED = 1024


class SemiStreamOperator(JoinCore, ABC):
    """The frame of a semi-stream join; see `dovetail.operators.protocol.SemiStreamJoin` for its promises."""

    def __init__(self, spec: JoinSpec) -> None:
        super().__init__(spec)
        self._arrivals = 0
        self._entered_since_step = 0
        self._is_running = False

    # ================================================================ for subclasses

    @abstractmethod
    def _disk_step(self) -> Iterator[pa.RecordBatch]:
        """One disk step. If `_pairs_done` is not 0, it must begin with the block that was interrupted."""

    def _select_waiting(self, batch: pa.RecordBatch, codes: Int64Array, is_null: BoolArray) -> Int64Array:
        """The rows of an offered part that must enter the window, ascending. Must not change anything."""
        return np.flatnonzero(~is_null)

    def _answer(
        self, batch: pa.RecordBatch, codes: Int64Array, is_null: BoolArray, rows: Int64Array, tickets: Int64Array
    ) -> Iterator[pa.RecordBatch]:
        """Answer the rows (ascending) that need not wait; here those with a NULL key, which match nothing."""
        yield from self._give_unmatched_rows(batch, rows, tickets)

    def _deadline(self) -> int:
        """The deadline of tuples that enter now."""
        return 0

    def _admission_rows(self) -> int:
        """How many rows of an offered batch to look at together."""
        room = MAX_BATCH_ROWS if self._window is None else self._window.capacity - len(self._window)
        # With ordered output those that are answered at once may have to be held, a batch of output at most.
        most = self.results.max_rows if self.spec.ordered else MAX_BATCH_ROWS
        return min(max(room, _FEWEST_ADMITTED), most)

    def _restart_after(self, ticket: int) -> None:
        """Let waiting tuples with a higher ticket begin again; their held results are gone."""
        if self._window is not None:
            self._window.restart_after(ticket, self._deadline())

    def _save(self) -> tuple[dict[str, pa.Table], dict[str, Any]]:
        """The operator's own tables and values of a snapshot."""
        return {}, {}

    def _load(self, tables: dict[str, pa.Table], values: dict[str, Any]) -> None:
        """Take over what `_save` gave; called last, and must either succeed or change nothing."""

    # ================================================================ the protocol

    @property
    def output_schema(self) -> pa.Schema:
        """Columns of every batch given: join columns, the stream's others, the relation's others."""
        return self.results.plan.schema

    def offer(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Accept all tuples of the batch, making room with disk steps where the budget asks for it.

        The batch is checked now; the tuples are accepted as the iterator is consumed.
        """
        self._check_batch(batch)
        rows = batch.select(self._stream_columns.names)
        if self.spec.has_equality:
            column = batch.column(CODE_COLUMN)
            codes = np.asarray(column.fill_null(0).to_numpy(zero_copy_only=False), np.int64)
            is_null = np.asarray(column.is_null().to_numpy(zero_copy_only=False), np.bool_)
        else:
            # Without equality the map is only a queue: any different codes will do.
            codes = np.arange(self._arrivals, self._arrivals + batch.num_rows, dtype=np.int64)
            is_null = np.zeros(batch.num_rows, np.bool_)
        return self._guarded(self._accept(rows, codes, is_null, may_drop=True))

    def step(self) -> Iterator[pa.RecordBatch]:
        """Do one disk step: one block of the relation against everything that waits."""
        return self._guarded(self._one_step())

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Step until nothing waits."""
        return self._guarded(self._drain())

    def _drain(self) -> Iterator[pa.RecordBatch]:
        while self.pending:
            yield from self._one_step()
        yield from self.results.release()

    def _one_step(self) -> Iterator[pa.RecordBatch]:
        self._entered_since_step = 0
        yield from self.results.release()
        if self.pending:
            self.metrics.disk_steps += 1
            yield from self._disk_step()
        self._account_window()

    def retune(self, *, block_rows: int | None = None, chunk_rows: int | None = None) -> None:
        """Change b or w from the next step on; no result is lost or repeated.

        Raises
        ------
        BudgetError
            If a larger block leaves too little for what waits. Nothing changes then.
        """
        self._require_idle("retune")
        require_positive("block_rows", block_rows)
        require_positive("chunk_rows", chunk_rows)
        changed = replace(self.spec, chunk_rows=chunk_rows or self.spec.chunk_rows)
        if block_rows is not None and block_rows != self._memory.block_rows:
            if self._pairs_done:
                raise PlanError(
                    "block_rows cannot change while a block is joined in part: an iterator was given up or raised.",
                    hint="Finish the block with step, then call retune.",
                )
            changed = replace(changed, block_rows=block_rows)
            self._replan(changed)
        self.spec = changed

    def resize_budget(self, budget: str | int | Budget) -> None:
        """Work within another budget from now on; refused, with nothing changed, if what waits does not fit.

        While the window moves to its new size, both exist for a moment.
        """
        self._require_idle("resize_budget")
        changed = self.spec.with_budget(budget)
        self._replan(changed)
        self.spec = changed

    def snapshot(self) -> Snapshot:
        """The whole state, to be given to `restore` of an operator with the same spec."""
        self._require_idle("snapshot")
        tables, values = self._save()
        if self._window is not None:
            tables["window"] = self._window.to_table()
        if self.spec.ordered:
            tables["held"] = self.results.held.to_table(self.output_schema)
        chunks = [] if self._window is None else self._window.chunks
        values |= {
            "arrivals": self._arrivals,
            "entered_since_step": self._entered_since_step,
            "pairs_done": self._pairs_done,
            "cut_ticket": self.results.cut_ticket,
            "chunks": [[c.live, c.first_arrival, c.deadline] for c in chunks],
            "shedding": None if self._shedding is None else self._shedding.save(),
            "metrics": self.metrics.as_dict(),
        }
        return Snapshot(self.kind, self.spec.fingerprint(), tables, values)

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot; refused, with nothing changed, if it is of something else.

        Raises
        ------
        StateError
            If it is of another operator, relation, version, shard or join, or is damaged.
        BudgetError
            If what it holds does not fit this operator's budget.
        """
        self._require_idle("restore")
        self._check_fingerprint(snapshot)
        try:
            self._restore_checked(dict(snapshot.tables), dict(snapshot.values))
        except DovetailError:
            raise
        except (KeyError, ValueError, TypeError, IndexError, pa.ArrowException) as error:
            raise StateError(
                f"The snapshot of {self.kind} is damaged: {type(error).__name__}: {error}",
                hint="Restore it from a copy, or start with a new operator.",
            ) from error

    # ================================================================ the way in

    def _accept(
        self, batch: pa.RecordBatch, codes: Int64Array, is_null: BoolArray, may_drop: bool
    ) -> Iterator[pa.RecordBatch]:
        start = 0
        while start < batch.num_rows:
            if self._pairs_done:
                yield from self._one_step()
            stop = min(start + self._admission_rows(), batch.num_rows)
            part, part_codes, part_null = batch.slice(start, stop - start), codes[start:stop], is_null[start:stop]
            waiting = self._select_waiting(part, part_codes, part_null)
            room = self._room_for(part, waiting)
            if waiting.size > room:
                if room == 0 and waiting[0] == 0:
                    if may_drop and self._drops_arriving():
                        yield from self._accept_rest(part, part_codes, part_null, waiting)
                        start = stop
                    elif not (may_drop and (yield from self._drop_waiting(waiting.size))):
                        yield from self._one_step()
                    continue
                stop = start + int(waiting[room])
                part, part_codes, part_null = batch.slice(start, stop - start), codes[start:stop], is_null[start:stop]
                waiting = waiting[:room]
            if part.num_rows - waiting.size > self.results.max_rows:
                # What is answered at once counts as accepted with its batch: no more of it than one batch holds.
                stop = start + _rows_with_answers(part.num_rows, waiting, self.results.max_rows)
                part, part_codes, part_null = batch.slice(start, stop - start), codes[start:stop], is_null[start:stop]
                waiting = waiting[waiting < stop - start]
            if self.spec.ordered and not self.results.room_to_hold(part.num_rows - waiting.size):
                if self.pending:
                    yield from self._one_step()
                    continue
                # What is answered at once needs no room as long as nothing waits before it: take in one kind alone.
                waiting, stop = _first_of_one_kind(waiting, start, stop)
                part, part_codes, part_null = batch.slice(start, stop - start), codes[start:stop], is_null[start:stop]
            yield from self._take_in(part, part_codes, part_null, waiting)
            start = stop

    def _take_in(
        self, part: pa.RecordBatch, codes: Int64Array, is_null: BoolArray, waiting: Int64Array
    ) -> Iterator[pa.RecordBatch]:
        """Let the waiting rows of a part enter, which has room for them, and answer the others."""
        tickets = np.arange(self._arrivals, self._arrivals + part.num_rows, dtype=np.int64)
        self._arrivals += part.num_rows
        self.metrics.stream_tuples_in += part.num_rows
        self.metrics.null_key_tuples += int(np.count_nonzero(is_null))
        if waiting.size:
            window = self._window_for(part)
            entering = part if waiting.size == part.num_rows else part.take(pa.array(waiting))
            arrival = int(tickets[waiting[0]])
            window.insert(
                codes[waiting], entering, arrival, self._deadline(), tickets[waiting] if self.spec.ordered else None
            )
            self._entered_since_step += waiting.size
            self._account_window()
            self._update_boundary()
        if waiting.size < part.num_rows:
            is_answered = np.ones(part.num_rows, np.bool_)
            is_answered[waiting] = False
            yield from self._answer(part, codes, is_null, np.flatnonzero(is_answered), tickets)

    def _room_for(self, part: pa.RecordBatch, waiting: Int64Array) -> int:
        """How many of the waiting rows of a part can enter now."""
        if waiting.size == 0:
            return 0
        window = self._window_for(part)
        room = min(window.capacity - len(window), waiting.size)
        if self.spec.chunk_rows is not None:
            room = min(room, max(0, self.spec.chunk_rows - self._entered_since_step))
        if not self._has_paged_columns:
            return room
        free_bytes = self._ledger.free_bytes - self._memory.output_bytes
        while room and window.paged_bytes_of(part.slice(0, int(waiting[room - 1]) + 1)) > free_bytes:
            room //= 2
        if room == 0 and len(window) == 0 and self._entered_since_step == 0:
            needed = self._ledger.held_bytes + self._memory.output_bytes + window.paged_bytes_of(part.slice(0, 1))
            raise BudgetError(
                f"One stream tuple does not fit: {needed} bytes ({format_bytes(needed)}) are needed, the budget has "
                f"{self.budget.total_bytes}.",
                minimum_bytes=needed,
            )
        return room

    # ---------------------------------------------------------------- shedding

    def _drops_arriving(self) -> bool:
        return self._shedding is not None and self._is_full() and self._shedding.drops_arriving

    def _is_full(self) -> bool:
        """Whether it is the budget, and not w, that keeps tuples from entering."""
        limit = self.spec.chunk_rows
        return limit is None or self._entered_since_step < limit

    def _accept_rest(
        self, part: pa.RecordBatch, codes: Int64Array, is_null: BoolArray, waiting: Int64Array
    ) -> Iterator[pa.RecordBatch]:
        """Drop some of the rows that would have to wait for room, and accept the others whatever it takes."""
        assert self._shedding is not None
        dropped = waiting[self._shedding.drop_arriving(waiting.size)]
        self.metrics.stream_tuples_in += dropped.size
        self._count_shed(dropped.size)
        kept = np.delete(np.arange(part.num_rows), dropped)
        yield from self._accept(part.take(pa.array(kept)), codes[kept], is_null[kept], may_drop=False)

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
        assert self.spec.shed is not None
        if count:
            self.metrics.count_shed(self.spec.shed.name, int(count))

    # ================================================================ checks

    def _check_batch(self, batch: pa.RecordBatch) -> None:
        self._require_idle("offer")
        if not isinstance(batch, pa.RecordBatch):
            raise PlanError(f"offer takes a pyarrow RecordBatch, not {type(batch).__name__}.")
        declared = self.spec.stream_schema
        if batch.schema.equals(declared):
            return
        for column in declared:
            found = batch.schema.get_field_index(column.name)
            if found < 0:
                raise SchemaError(
                    f"The stream batch has no column {column.name!r}: it has {', '.join(batch.schema.names)}.",
                    hint="Offer batches of the schema that the join was made for.",
                )
            if batch.schema.field(found).type != column.type:
                raise SchemaError(
                    f"Column {column.name!r} of the stream batch is {batch.schema.field(found).type}; the join was "
                    f"made for {column.type}.",
                    hint="Cast it, or make another join.",
                )
        surplus = [name for name in batch.schema.names if declared.get_field_index(name) < 0]
        if surplus:
            raise SchemaError(
                f"The stream batch has a column {surplus[0]!r} that the join was not made for.",
                hint="Leave it out, or make another join.",
            )

    def _check_fingerprint(self, snapshot: Snapshot) -> None:
        if snapshot.kind != self.kind:
            raise StateError(
                f"This snapshot is of {snapshot.kind!r}, the operator is {self.kind!r}.",
                hint=f"Restore it into a {snapshot.kind!r}.",
            )
        expected = self.spec.fingerprint()
        for name in sorted(expected.keys() | snapshot.fingerprint.keys()):
            saved, ours = snapshot.fingerprint.get(name), expected.get(name)
            if saved != ours:
                raise StateError(
                    f"This snapshot has {name} {saved!r}, the operator has {ours!r}.",
                    hint="Restore it into an operator of the same join on the same relation version.",
                )

    def _require_idle(self, action: str) -> None:
        if self._is_running:
            raise PlanError(
                f"{action} was called while the iterator of an earlier call is not finished.",
                hint="Exhaust or close that iterator first.",
            )

    def _guarded(self, work: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run work as it is consumed, one call at a time, and keep the time that it takes."""
        self._require_idle("An iterator")
        self._is_running = True
        try:
            while True:
                began, disk_before = time.perf_counter(), self.metrics.disk_seconds
                try:
                    batch = next(work)
                except StopIteration:
                    return
                finally:
                    spent = time.perf_counter() - began
                    self.metrics.cpu_seconds += max(0.0, spent - (self.metrics.disk_seconds - disk_before))
                yield batch
        finally:
            self._is_running = False
            work.close()  # type: ignore[attr-defined]

    # ================================================================ restoring

    def _restore_checked(self, tables: dict[str, pa.Table], values: dict[str, Any]) -> None:
        """Build everything first, then take it over: an error on the way leaves the operator as it was."""
        chunks = [(int(live), int(arrival), int(deadline)) for live, arrival, deadline in values["chunks"]]
        self._check_window(tables.get("window"), chunks)
        window, paged_bytes = self._window_of(tables.get("window"), chunks)
        held = HeldResults.from_table(tables["held"]) if self.spec.ordered else HeldResults()
        metrics = OperatorMetrics.from_dict(values["metrics"])
        shedding = None if self.spec.shed is None else self.spec.shed.start()
        if shedding is not None:
            shedding.load(values["shedding"])
        arrivals, entered = int(values["arrivals"]), int(values["entered_since_step"])
        pairs_done, cut_ticket = int(values["pairs_done"]), values["cut_ticket"]
        window_bytes = 0 if window is None else window.nbytes
        needed = self._memory.block_bytes + window_bytes + held.nbytes + self._other_bytes("held")
        if needed > self.budget.total_bytes:
            raise self._too_small(self.spec, needed)
        self._load(tables, values)
        self._replace_window(None)
        self.results.replace_held(HeldResults())
        self._replace_window(window)
        self.results.replace_held(held)
        self.metrics = self.results.metrics = metrics
        self._shedding, self._paged_bytes = shedding, paged_bytes
        self._arrivals, self._entered_since_step = arrivals, entered
        self._pairs_done, self.results.cut_ticket = pairs_done, cut_ticket
        self._update_boundary()

    def _check_window(self, table: pa.Table | None, chunks: list[tuple[int, int, int]]) -> None:
        """Refuse a snapshot that has lost tuples, or has some that no chunk accounts for."""
        rows, counted = 0 if table is None else table.num_rows, sum(live for live, _, _ in chunks)
        if rows != counted or any(live < 1 for live, _, _ in chunks):
            raise StateError(
                f"The snapshot of {self.kind} is damaged: it has {rows} waiting tuples and accounts for {counted}.",
                hint="Restore it from a copy, or start with a new operator.",
            )

    def _window_of(
        self, table: pa.Table | None, chunks: list[tuple[int, int, int]]
    ) -> tuple[StreamWindow | None, float]:
        if table is None or table.num_rows == 0:
            return None, self._paged_bytes
        paged_bytes = self._paged_bytes
        if self._has_paged_columns:
            names = [c.name for c in self._stream_columns if not is_fixed_width(c.type)]
            paged_bytes = sum(int(table.column(name).nbytes) for name in names) / table.num_rows
        capacity = self._capacity_for(paged_bytes, self._memory)
        if table.num_rows > capacity:
            raise self._too_small(self.spec, StreamWindow.bytes_for(self._stream_columns, table.num_rows))
        window = StreamWindow(self._stream_columns, capacity, self.spec.ordered)
        window.fill_from_table(table, chunks)
        return window, paged_bytes


def _rows_with_answers(rows: int, waiting: Int64Array, most: int) -> int:
    """How many of the first rows have at most so many among them that do not wait."""
    is_answered = np.ones(rows, np.bool_)
    is_answered[waiting] = False
    return int(np.searchsorted(np.cumsum(is_answered), most, side="right"))


def _first_of_one_kind(waiting: Int64Array, start: int, stop: int) -> tuple[Int64Array, int]:
    """Cut a part short so that all its rows wait, or none does; give those that do and where the part then stops."""
    if waiting.size == 0:
        return waiting, stop
    if waiting[0] > 0:
        return waiting[:0], start + int(waiting[0])
    is_gap = waiting != np.arange(waiting.size)
    count = int(np.argmax(is_gap)) if is_gap.any() else waiting.size
    return waiting[:count], start + count
