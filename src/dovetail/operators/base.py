"""What all semi-stream joins share besides their core and the way in: the protocol, tuning, saving and restoring.

An operator is a subclass of `SemiStreamOperator` that adds its disk phase and, if it has one, its cache:

=====================  ===============================================================================================
`_disk_step`           one disk step; reads with `_read_block`, joins with `_join_block`, lets tuples leave with
                       `_leave` or `_leave_oldest`
`_select_waiting`      which rows of an offered part must wait; the others are answered from memory
`_prepare`             makes the answers of those others; the default knows NULL keys only
`_deadline`            the deadline of tuples that enter now, for operators that scan
`_plan_memory`         how the budget is divided, where there is more than block, output and window
`_note_left`           learns of tuples that leave
`_restart_after`       lets young tuples begin again, when ordered results had to be discarded
`_save`, `_load`       the operator's own part of a snapshot
=====================  ===============================================================================================
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from dovetail.errors import DovetailError, PlanError, SchemaError, StateError
from dovetail.memory import Budget
from dovetail.metrics import OperatorMetrics
from dovetail.model.costs import CostFactors
from dovetail.model.explain import Plan
from dovetail.operators.admission import Admission, Offered
from dovetail.operators.explaining import explain_operator, factors_for
from dovetail.operators.ordering import HeldResults
from dovetail.operators.protocol import CODE_COLUMN, Snapshot
from dovetail.operators.spec import JoinSpec, require_positive
from dovetail.operators.tuple_store import TupleStore, is_fixed_width
from dovetail.operators.window import StreamWindow

__all__ = ["SemiStreamOperator"]


class SemiStreamOperator(Admission, ABC):
    """The frame of a semi-stream join; see `dovetail.operators.protocol.SemiStreamJoin` for its promises."""

    def __init__(self, spec: JoinSpec) -> None:
        super().__init__(spec)
        self._is_running = False

    # ================================================================ for subclasses

    @abstractmethod
    def _disk_step(self) -> Iterator[pa.RecordBatch]:
        """One disk step. If `_pairs_done` is not 0, it must begin with the block that was interrupted."""

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
            if column.null_count:
                codes = np.asarray(column.fill_null(0).to_numpy(zero_copy_only=False), np.int64)
                is_null = np.asarray(column.is_null().to_numpy(zero_copy_only=False), np.bool_)
            else:
                codes, is_null = column.to_numpy(), np.zeros(batch.num_rows, np.bool_)
        else:
            # Without equality the map is only a queue: any different codes will do.
            codes = np.arange(self._arrivals, self._arrivals + batch.num_rows, dtype=np.int64)
            is_null = np.zeros(batch.num_rows, np.bool_)
        return self._guarded(self._accept(Offered(rows, codes, is_null), may_drop=True))

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
        chunks = [] if self._window is None else self._window.chunks.to_list()
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

    # ================================================================ explain

    @property
    def stream_tuple_bytes(self) -> float:
        """v_S as declared: bytes of a stream tuple's own columns, as far as known."""
        return TupleStore.fixed_bytes_per_position(self._stream_columns) + self._paged_bytes

    def explain(self, factors: CostFactors | None = None) -> Plan:
        """What it does now, what its cost model predicts of that, and what limits it.

        Parameters
        ----------
        factors
            What operations cost here, as `dovetail.calibrate` tells; None: a usual machine's, and the shard's disk.
        """
        return explain_operator(self, factors_for(self.spec.shard) if factors is None else factors)

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
                del batch  # whoever took it may have let it go, and its memory is wanted for the next one
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
        window = StreamWindow(self._stream_columns, capacity, self.spec.ordered, self._max_chunks(self._memory))
        window.fill_from_table(table, chunks)
        return window, paged_bytes
