"""The driver of every semi-stream join: it owns window, cache, budget and counters, and runs the phases.

A batch passes three phases. The first answers what it can at once: tuples with a NULL key, cache hits, lookups. The
others wait in the window for the disk phase, a scan or a visit, which joins a block of the relation with all waiting
tuples. A strategy is a choice of phases.

=================  ======================================================================
what               where
=================  ======================================================================
shared state       `JoinState`: spec, budget, window, output, counters
intake             an `Intake`: `Admission` with a `Front`, `Lookup`, or `OneByOne`
disk phase         a `DiskPhase`: `Scan`, `Visits`
cache              `Border`, `CachePolicy`, and what fills it, beside the scan
=================  ======================================================================
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa

from dovetail.core.errors import DovetailError, PlanError, SchemaError, StateError
from dovetail.core.memory import Budget
from dovetail.core.metrics import OperatorMetrics
from dovetail.costs.costs import CostFactors
from dovetail.costs.explain import Plan
from dovetail.joins.cache.border import Border
from dovetail.joins.cache.relation_cache import RelationCache
from dovetail.joins.explaining import explain_operator, factors_for
from dovetail.joins.output.ordering import HeldResults
from dovetail.joins.output.results import Results
from dovetail.joins.phases.admission import Offered
from dovetail.joins.phases.alone import Alone
from dovetail.joins.protocol import CODE_COLUMN, Snapshot
from dovetail.joins.spec import JoinSpec, require_positive
from dovetail.joins.state import JoinState
from dovetail.joins.window.stream_window import StreamWindow
from dovetail.joins.window.tuple_store import TupleStore, is_fixed_width

__all__ = ["DiskPhase", "Intake", "Phases", "SemiStreamOperator", "require_equality"]


class Intake(Protocol):
    """Takes in offered tuples."""

    def accept(self, offered: Offered, may_drop: bool = True) -> Iterator[pa.RecordBatch]:
        """Accept all tuples of a batch, making room with disk steps if the budget requires it."""


class DiskPhase(Protocol):
    """Joins waiting tuples with the relation."""

    def step(self) -> Iterator[pa.RecordBatch]:
        """One disk step. If `JoinState.pairs_done` is not 0, it must start with the interrupted block."""

    def before_accept(self) -> Iterator[pa.RecordBatch]:
        """Finish work that entering tuples must not see half done."""

    def restart_after(self, ticket: int) -> None:
        """Restart waiting tuples with a higher ticket; their held results are gone."""

    def save(self) -> tuple[dict[str, pa.Table], dict[str, Any]]:
        """The tables and values of a snapshot."""

    def load(self, tables: dict[str, pa.Table], values: dict[str, Any]) -> None:
        """Continue from what `save` returned; must either succeed or change nothing."""


@dataclass
class Phases:
    """The parts of one join, as composed by a strategy."""

    state: JoinState
    intake: Intake
    disk: DiskPhase
    border: Border | None = None
    alone: Alone | None = None  # a tuple that is emitted in several batches
    before_replan: Callable[[JoinSpec], None] | None = None
    after_replan: Callable[[], None] | None = None


def require_equality(kind: str, spec: JoinSpec) -> None:
    """Refuse a join without key columns."""
    if not spec.has_equality:
        raise PlanError(
            f"{kind} joins on equal keys only.", hint="Use mesh for a condition without equality, or pass on=."
        )


class SemiStreamOperator:
    """A join of one shard of a stream with one shard of a relation.

    The iterators returned by `offer`, `step` and `drain` do the work as they are consumed: exhaust each before the next
    call. If one is abandoned or raises, everything it has returned counts as delivered; the next `step` continues from
    there, and ``metrics.stream_tuples_in`` tells how many tuples were accepted.
    """

    kind: ClassVar[str]
    needs_equality: ClassVar[bool] = True

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._is_running = False

    # ================================================================ what it holds

    @property
    def spec(self) -> JoinSpec:
        """The join."""
        return self._phases.state.spec

    @property
    def metrics(self) -> OperatorMetrics:
        """Its counters."""
        return self._phases.state.metrics

    @property
    def results(self) -> Results:
        """Its output."""
        return self._phases.state.results

    @property
    def budget(self) -> Budget:
        """The most bytes that may be held."""
        return self._phases.state.budget

    @property
    def block_rows(self) -> int:
        """b: the relation rows of a disk step."""
        return self._phases.state.memory.block_rows

    @property
    def window_capacity(self) -> int:
        """The maximum number of waiting tuples within the budget."""
        return self._phases.state.window_capacity

    @property
    def pending(self) -> int:
        """Accepted stream tuples that still wait."""
        alone = self._phases.alone
        return self._phases.state.pending + (0 if alone is None else alone.pending)

    @property
    def oldest(self) -> int | None:
        """How many tuples, at most, were accepted before the oldest waiting one; None if none waits."""
        alone, waiting = self._phases.alone, self._phases.state.oldest
        emitted = None if alone is None else alone.oldest
        return min((at for at in (waiting, emitted) if at is not None), default=None)

    @property
    def cache(self) -> RelationCache | None:
        """The current cache; None for strategies without one."""
        border = self._phases.border
        return None if border is None else border.cache

    @property
    def objective(self) -> str:
        """``"rate"`` or ``"memory"``."""
        border = self._phases.border
        return "rate" if border is None else border.objective

    def hand_shed_to(self, taker: Callable[[pa.RecordBatch], None] | None) -> None:
        """Pass every row dropped for lack of room, with the stream's own columns, to `taker`, if any."""
        self._phases.state.on_shed = taker

    def size(self) -> int:
        """Bytes held now; never above the budget."""
        return self._phases.state.ledger.held_bytes

    def sizes(self) -> dict[str, int]:
        """Bytes held per component; the sum is `size`."""
        return self._phases.state.ledger.by_component()

    @property
    def output_schema(self) -> pa.Schema:
        """The schema of every output batch: join columns, the stream's others, the relation's others."""
        return self.results.plan.schema

    @property
    def stream_tuple_bytes(self) -> float:
        """v_S as declared: bytes of a stream tuple's own columns, as far as known."""
        state = self._phases.state
        return TupleStore.fixed_bytes_per_position(state.stream_columns) + state.paged_bytes

    # ================================================================ the protocol

    def offer(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Accept all tuples of the batch, making room with disk steps if the budget requires it.

        The batch is checked now; the tuples are accepted as the iterator is consumed.
        """
        self._check_batch(batch)
        rows = batch.select(self._phases.state.stream_columns.names)
        if self.spec.has_equality:
            column = batch.column(CODE_COLUMN)
            if column.null_count:
                codes = np.asarray(column.fill_null(0).to_numpy(zero_copy_only=False), np.int64)
                is_null = np.asarray(column.is_null().to_numpy(zero_copy_only=False), np.bool_)
            else:
                codes, is_null = column.to_numpy(), np.zeros(batch.num_rows, np.bool_)
        else:
            # Without equality the map is only a queue: any distinct codes will do.
            arrivals = self._phases.state.arrivals
            codes = np.arange(arrivals, arrivals + batch.num_rows, dtype=np.int64)
            is_null = np.zeros(batch.num_rows, np.bool_)
        return self._guarded(self._accept(Offered(rows, codes, is_null)))

    def step(self) -> Iterator[pa.RecordBatch]:
        """Do one disk step: join one block of the relation with all waiting tuples."""
        return self._guarded(self._one_step())

    def drain(self) -> Iterator[pa.RecordBatch]:
        """Step until nothing waits."""
        return self._guarded(self._drain())

    def _accept(self, offered: Offered) -> Iterator[pa.RecordBatch]:
        phases = self._phases
        if phases.alone is not None:
            yield from phases.alone.finish()
        yield from phases.disk.before_accept()
        yield from phases.intake.accept(offered)

    def _drain(self) -> Iterator[pa.RecordBatch]:
        while self.pending:
            yield from self._one_step()
        yield from self.results.release()

    def _one_step(self) -> Iterator[pa.RecordBatch]:
        phases, state = self._phases, self._phases.state
        state.entered_since_step = 0
        yield from state.results.release()
        if phases.alone is not None:
            yield from phases.alone.finish()
        if state.pending:
            state.metrics.disk_steps += 1
            yield from phases.disk.step()
        state.account_window()

    def retune(self, *, block_rows: int | None = None, chunk_rows: int | None = None) -> None:
        """Change b or w from the next step on; no result is lost or repeated.

        Raises a `BudgetError`, and changes nothing, if a larger block leaves too little for the waiting tuples.
        """
        self._require_idle("retune")
        require_positive("block_rows", block_rows)
        require_positive("chunk_rows", chunk_rows)
        state = self._phases.state
        changed = replace(self.spec, chunk_rows=chunk_rows or self.spec.chunk_rows)
        if block_rows is not None and block_rows != self.block_rows:
            if state.pairs_done:
                raise PlanError(
                    "block_rows cannot change while a block is partly joined: an iterator was abandoned or raised.",
                    hint="Finish the block with step, then call retune.",
                )
            changed = replace(changed, block_rows=block_rows)
            self._replan(changed)
        state.spec = changed

    def resize_budget(self, budget: str | int | Budget) -> None:
        """Change the budget; refused, with nothing changed, if the waiting tuples do not fit.

        While the window is resized, the old and the new one exist for a moment.
        """
        self._require_idle("resize_budget")
        changed = self.spec.with_budget(budget)
        self._replan(changed)
        self._phases.state.spec = changed

    def refit(self, budget: Budget, block_rows: int | None) -> None:
        """Change budget and block size together; refused, with nothing changed, if the waiting tuples do not fit."""
        self._require_idle("refit")
        changed = replace(self.spec, budget=budget, block_rows=block_rows)
        if block_rows != self.spec.block_rows and self._phases.state.pairs_done:
            changed = replace(changed, block_rows=self.spec.block_rows)
        self._replan(changed)
        self._phases.state.spec = changed

    def _replan(self, spec: JoinSpec) -> None:
        phases = self._phases
        if phases.before_replan is not None:
            phases.before_replan(spec)
        if phases.border is None:
            phases.state.replan(spec)
        else:
            phases.border.replan(spec)
        if phases.after_replan is not None:
            phases.after_replan()

    def explain(self, factors: CostFactors | None = None) -> Plan:
        """What it does now, the cost its model predicts, and what limits it.

        `factors` are the costs of operations, as measured by `dovetail.calibrate`; None: those of a typical machine and
        the shard's disk.
        """
        return explain_operator(self, factors_for(self.spec.shard) if factors is None else factors)

    # ================================================================ snapshots

    def snapshot(self) -> Snapshot:
        """The whole state, for `restore` of an operator with the same spec."""
        self._require_idle("snapshot")
        state = self._phases.state
        tables, values = self._phases.disk.save()
        if self._phases.alone is not None:
            own_tables, own_values = self._phases.alone.save()
            tables, values = {**tables, **own_tables}, {**values, **own_values}
        if state.window is not None:
            tables["window"] = state.window.to_table()
        if self.spec.ordered:
            tables["held"] = self.results.held.to_table(self.output_schema)
        chunks = [] if state.window is None else state.window.chunks.to_list()
        values |= {
            "arrivals": state.arrivals,
            "entered_since_step": state.entered_since_step,
            "pairs_done": state.pairs_done,
            "cut_ticket": self.results.cut_ticket,
            "chunks": [[c.live, c.first_arrival, c.deadline] for c in chunks],
            "shedding": None if state.shedding is None else state.shedding.save(),
            "shed": None if self.spec.shed is None else self.spec.shed.name,
            "metrics": self.metrics.as_dict(),
        }
        return Snapshot(self.kind, self.spec.fingerprint(), tables, values)

    def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot; an error changes nothing.

        Raises a `StateError` if it is of another operator, relation, version, shard or join, or is damaged; a
        `BudgetError` if its contents do not fit the budget.
        """
        self._require_idle("restore")
        self._check_fingerprint(snapshot)
        tables, values, border = dict(snapshot.tables), dict(snapshot.values), self._phases.border
        try:
            if border is None:
                self._restore(tables, values)
            else:
                border.without_cache(lambda: self._restore(tables, values))
        except DovetailError:
            raise
        except (KeyError, ValueError, TypeError, IndexError, pa.ArrowException) as error:
            raise StateError(
                f"The snapshot of {self.kind} is damaged: {type(error).__name__}: {error}",
                hint="Restore it from a copy, or start with a new operator.",
            ) from error

    def _restore(self, tables: dict[str, pa.Table], values: dict[str, Any]) -> None:
        """Build everything first, then take it over: an error leaves the operator unchanged."""
        phases, state = self._phases, self._phases.state
        chunks = [(int(live), int(arrival), int(deadline)) for live, arrival, deadline in values["chunks"]]
        self._check_window(tables.get("window"), chunks)
        window, paged_bytes = self._window_of(tables.get("window"), chunks)
        held = HeldResults.from_table(tables["held"]) if self.spec.ordered else HeldResults()
        metrics = OperatorMetrics.from_dict(values["metrics"])
        shedding = None if self.spec.shed is None else self.spec.shed.start()
        # The state of another policy is of no use to this one.
        policy = None if self.spec.shed is None else self.spec.shed.name
        if shedding is not None and values["shedding"] is not None and values.get("shed", policy) == policy:
            shedding.load(values["shedding"])
        arrivals, entered = int(values["arrivals"]), int(values["entered_since_step"])
        pairs_done, cut_ticket = int(values["pairs_done"]), values["cut_ticket"]
        window_bytes = 0 if window is None else window.nbytes
        needed = state.memory.block_bytes + window_bytes + held.nbytes + state.other_bytes("held")
        if needed > self.budget.total_bytes:
            raise state.too_small(self.spec, needed)
        phases.disk.load(tables, values)
        if phases.alone is not None:
            # Snapshots of earlier releases lack it for strategies that had none.
            phases.alone.load(tables, {"alone": None, **values})
        state.replace_window(None)
        self.results.replace_held(HeldResults())
        state.replace_window(window)
        self.results.replace_held(held)
        state.metrics = self.results.metrics = metrics
        state.shedding, state.paged_bytes = shedding, paged_bytes
        state.arrivals, state.entered_since_step = arrivals, entered
        state.pairs_done, self.results.cut_ticket = pairs_done, cut_ticket
        state.update_boundary()

    def _check_window(self, table: pa.Table | None, chunks: list[tuple[int, int, int]]) -> None:
        """Refuse a snapshot that has lost tuples, or has tuples that no chunk accounts for."""
        rows, counted = 0 if table is None else table.num_rows, sum(live for live, _, _ in chunks)
        if rows != counted or any(live < 1 for live, _, _ in chunks):
            raise StateError(
                f"The snapshot of {self.kind} is damaged: it has {rows} waiting tuples and accounts for {counted}.",
                hint="Restore it from a copy, or start with a new operator.",
            )

    def _window_of(
        self, table: pa.Table | None, chunks: list[tuple[int, int, int]]
    ) -> tuple[StreamWindow | None, float]:
        state = self._phases.state
        if self._phases.border is not None:
            self._phases.border.make_room_for_restored()
        if table is None or table.num_rows == 0:
            return None, state.paged_bytes
        paged_bytes = state.paged_bytes
        if state.has_paged_columns:
            names = [c.name for c in state.stream_columns if not is_fixed_width(c.type)]
            paged_bytes = sum(int(table.column(name).nbytes) for name in names) / table.num_rows
        capacity = state.capacity_for(state.memory, paged_bytes)
        if table.num_rows > capacity:
            raise state.too_small(self.spec, StreamWindow.bytes_for(state.stream_columns, table.num_rows))
        window = StreamWindow(state.stream_columns, capacity, self.spec.ordered, state.max_chunks())
        window.fill_from_table(table, chunks)
        return window, paged_bytes

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
                    hint="Offer batches with the schema that the join was created for.",
                )
            if batch.schema.field(found).type != column.type:
                raise SchemaError(
                    f"Column {column.name!r} of the stream batch is {batch.schema.field(found).type}; the join was "
                    f"created for {column.type}.",
                    hint="Cast it, or create another join.",
                )
        surplus = [name for name in batch.schema.names if declared.get_field_index(name) < 0]
        if surplus:
            raise SchemaError(
                f"The stream batch has a column {surplus[0]!r} that the join was not created for.",
                hint="Leave it out, or create another join.",
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
        """Run work as it is consumed, one call at a time, and measure its time."""
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
                del batch  # the consumer may have freed it, and the next batch needs its memory
        finally:
            self._is_running = False
            work.close()  # type: ignore[attr-defined]
