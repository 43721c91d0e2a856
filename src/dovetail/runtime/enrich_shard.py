"""One shard of a flow's join with a relation, in one micro-batch.

Tuples answered by the cache or the index are emitted at once; the others wait in the operator's window, which is saved
and restored between micro-batches. The intent says how far the disk phase goes:

drain
    until nothing waits;
pace
    this part of a cycle over the shard, so that work is spread evenly over ``max_delay``;
due_before_ms
    after that, until nothing waits that arrived in a micro-batch at or before this time.

A waiting tuple is joined with the relation's version of the micro-batch in which it arrived. When the version changes,
all waiting tuples are joined with the old one first.
"""

import math
import tempfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from dovetail.core.errors import BudgetError, StateError
from dovetail.core.memory import Budget
from dovetail.core.metrics import OperatorMetrics
from dovetail.costs.explain import Objective, Strategy
from dovetail.joins import AutoJoin, SemiStreamOperator, Snapshot
from dovetail.joins.fitting import RateFitting
from dovetail.joins.shedding import SheddingPolicy
from dovetail.runtime.budget_parts import part_of_budget
from dovetail.runtime.enrich import make_operator
from dovetail.runtime.join_recipe import JoinRecipe
from dovetail.runtime.late_rows import SHED_TABLE, LateWriter
from dovetail.runtime.live_operators import LIVE
from dovetail.runtime.local_directory import local_directory
from dovetail.runtime.saved_chunks import ROWS, SavedWindow, load_window, save_window
from dovetail.runtime.shard_job import ShardInput, ShardResult
from dovetail.storage.state_files import ShardState, StateFile

__all__ = ["FlowJoinTask", "waits"]

Marks = list[tuple[int, int]]
"""Pairs (time of a micro-batch, tuples arrived by its end): they tell how long tuples have waited."""


@dataclass(frozen=True)
class FlowJoinTask:
    """The join of one shard; see `dovetail.runtime.shard_job.ShardTask`."""

    recipe: JoinRecipe
    strategy: Strategy
    objective: Objective
    budget_bytes: int  # per shard
    stream_schema: pa.Schema  # of the routed rows
    owner: str  # unique to the step of a running query: the key of its live operators
    # The most that live operators, with what they have learned, may take in a worker. 0 if two runs of a task must emit
    # the same rows: only the saved state is the same for both.
    alive_bytes: int
    shed: SheddingPolicy | None = None  # what to drop when more arrives than may wait; None: nothing
    shed_columns: tuple[str, ...] = ()  # columns of dropped rows to keep; empty: none are kept
    fitted_bytes: int | None = None  # the memory that serves the requested rate; None: the whole budget
    block_rows: int | None = None  # the block size that belongs to `fitted_bytes`
    follows_rate: bool = False  # whether memory follows the observed rate between micro-batches

    def run(self, given: ShardInput) -> Generator[pa.RecordBatch, None, ShardResult]:
        """Join the shard's rows as far as the intent says."""
        with part_of_budget(self.recipe.num_shards):
            return (yield from self._run(given))

    def _run(self, given: ShardInput) -> Generator[pa.RecordBatch, None, ShardResult]:
        shard, state, intent = given.shard, given.state, given.intent
        carried = OperatorMetrics()
        marks: Marks = []
        join: SemiStreamOperator | None = None
        if state is not None:
            carried = OperatorMetrics.from_dict(state.values["carried"])
            join = self._continued(given, state)
            if join is None:
                # Nothing waited, so nothing is restored except the counters.
                carried.merge(OperatorMetrics.from_dict(state.values["values"]["metrics"]))
            elif state.values["version"] == intent["version"]:
                marks = [(int(time_ms), int(arrivals)) for time_ms, arrivals in state.values["marks"]]
            else:
                yield from self._emit(join.drain())
                carried.merge(join.metrics)
                join = None
        if join is None:
            join = self._operator(shard, intent["version"], *self._fitted(_memory_of(state)))
        arrived_before = join.metrics.stream_tuples_in
        if isinstance(join, AutoJoin):
            join.expect(self._expected(state, intent))
        with self._dropped_by(join) as dropped:
            for batch in given.batches:
                yield from self._emit(join.offer(self._stream_batch(batch)))
            arrived = join.metrics.stream_tuples_in - arrived_before
            yield from self._emit(self._disk_phase(join, marks, intent))
            tables = [] if dropped is None else dropped.tables()
        memory = self._follow(join, _memory_of(state), intent, arrived) if self.follows_rate else None
        result = self._result(shard, state, join, carried, marks, intent, arrived, memory)
        return replace(result, tables=(*result.tables, *tables))

    @contextmanager
    def _dropped_by(self, join: SemiStreamOperator) -> Iterator[LateWriter | None]:
        """Keep the rows that an operator drops while the task runs, if they are wanted."""
        if not self.shed_columns:
            yield None
            return
        with tempfile.TemporaryDirectory(prefix="dovetail-shed-", dir=local_directory()) as directory:
            writer = LateWriter(Path(directory))
            join.hand_shed_to(lambda rows: writer.add_shed(rows.select(list(self.shed_columns))))
            try:
                yield writer
            finally:
                join.hand_shed_to(None)

    # ================================================================ the operator

    def _continued(self, given: ShardInput, state: ShardState) -> SemiStreamOperator | None:
        """The operator as of the last commit, live or restored; None if a new one does as well."""
        alive: SemiStreamOperator | None = LIVE.take(self.owner, given.shard, state.state_id)
        if alive is not None:
            return alive
        files = _window_files(state)
        if not files:
            return None
        saved = state.values
        if saved["relation_id"] != self.recipe.relation_id:
            waiting = sum(chunk[0] for chunk in saved["values"]["chunks"])
            raise StateError(
                f"{waiting} tuples of shard {given.shard} wait for a relation that was at {self.recipe.path} and has "
                "been replaced.",
                hint="Put the old relation back, or start the flow with a new checkpoint.",
            )
        tables = {number: given.read(file) for number, file in enumerate(files)}
        window = load_window(files, tables, saved["values"]["chunks"], saved["places"])
        snapshot = Snapshot(saved["kind"], saved["fingerprint"], {ROWS: window}, saved["values"])
        fitted = self._fitted(_memory_of(state))
        join = self._operator(given.shard, saved["version"], *fitted)
        try:
            join.restore(snapshot)
        except BudgetError:
            if fitted == (self.budget_bytes, None):
                raise
            # The waiting tuples were admitted for a higher rate.
            join = self._operator(given.shard, saved["version"], self.budget_bytes, None)
            join.restore(snapshot)
        return join

    # ================================================================ memory for a rate

    def _fitted(self, memory: Mapping[str, Any] | None) -> tuple[int, int | None]:
        """Budget and block size of a new operator: those of the requested or observed rate, if any."""
        if memory is not None and self.follows_rate:
            return min(int(memory["budget_bytes"]), self.budget_bytes), memory["block_rows"]
        return self.fitted_bytes or self.budget_bytes, self.block_rows

    def _follow(
        self, join: SemiStreamOperator, memory: Mapping[str, Any] | None, intent: Mapping[str, Any], arrived: int
    ) -> dict[str, Any] | None:
        """Give an operator the memory that the observed rate needs; returns the observations for the next micro-batch.

        Observations are in the state and the intent, never from a clock, so two runs of a task agree.
        """
        known = memory or {"tuner": None, "budget_bytes": self.budget_bytes, "block_rows": None}
        spec = replace(join.spec, budget=Budget(self.budget_bytes), block_rows=None)
        whole = make_operator(self.strategy, spec, self.objective, self.recipe)
        try:
            fitting = RateFitting(self.strategy, whole, self.recipe.factors(spec.shard))
        except BudgetError:
            return None  # the budget is too small for a choice
        tuner = fitting.tuner
        if known["tuner"] is not None:
            tuner.restore(known["tuner"])
        tuner.observe(arrived, intent.get("elapsed_ms", 0) / 1000)
        before = tuner.as_dict()
        proposed = tuner.propose()
        if proposed is not None:
            fitted = fitting.of(proposed)
            try:
                join.refit(Budget(fitted.budget_bytes), fitted.block_rows)
            except BudgetError:
                return {**known, "tuner": before}  # the waiting tuples do not fit: tried again later
            known = {"budget_bytes": fitted.budget_bytes, "block_rows": fitted.block_rows}
        return {**known, "tuner": tuner.as_dict()}

    # ================================================================ the operator itself

    def _operator(self, shard: int, version: int, budget_bytes: int, block_rows: int | None) -> SemiStreamOperator:
        LIVE.make_room(self.budget_bytes, self.alive_bytes)
        relation = replace(self.recipe, is_bound=True).open(version)
        reader = relation.shard(
            shard,
            columns=list(self.recipe.relation_columns),
            io=self.recipe.io,
            include_null_keys=not self.recipe.on,
        )
        identity = {"version": relation.version, "shard": shard}
        schema = self._operator_schema()
        spec = self.recipe.spec(reader, schema, Budget(budget_bytes), identity, self.shed, block_rows)
        if self.strategy != "auto":
            return make_operator(self.strategy, spec, self.objective, self.recipe)
        # Two runs of a task with shuffled output must leave the same tuples waiting: no choice may depend on a clock.
        return make_operator("auto", spec, self.objective, self.recipe, observes=self.alive_bytes > 0)

    def _operator_schema(self) -> pa.Schema:
        return self.recipe.stream_batch(pa.RecordBatch.from_pylist([], schema=self.stream_schema)).schema

    @staticmethod
    def _expected(state: ShardState | None, intent: Mapping[str, Any]) -> float | None:
        """How many tuples will share a cycle of the scan, judging by the last micro-batch."""
        arrived = None if state is None else state.values.get("arrived")
        return None if arrived is None else arrived / max(intent["pace"], 1e-6)

    # ================================================================ rows

    def _stream_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not batch.schema.equals(self.stream_schema):
            # The same values in another representation, such as timestamps in the session's time zone.
            batch = batch.cast(self.stream_schema)
        return self.recipe.stream_batch(batch)

    def _emit(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield self.recipe.output_batch(batch)

    def _disk_phase(
        self, join: SemiStreamOperator, marks: Marks, intent: Mapping[str, Any]
    ) -> Iterator[pa.RecordBatch]:
        if intent["drain"]:
            yield from join.drain()
            return
        cycle_steps = -(-join.spec.shard.num_rows // join.block_rows)
        # At least one step: in a small shard that answers all waiting tuples.
        for _ in range(math.ceil(intent["pace"] * cycle_steps)):
            if not join.pending:
                return
            yield from join.step()
        due = max((arrivals for time_ms, arrivals in marks if time_ms <= intent["due_before_ms"]), default=0)
        while join.oldest is not None and join.oldest < due:
            yield from join.step()

    # ================================================================ the result

    def _result(
        self,
        shard: int,
        last: ShardState | None,
        join: SemiStreamOperator,
        carried: OperatorMetrics,
        marks: Marks,
        intent: Mapping[str, Any],
        arrived: int,
        memory: dict[str, Any] | None,
    ) -> ShardResult:
        snapshot = join.snapshot()
        oldest = join.oldest
        marks = [*marks, (int(intent["time_ms"]), int(snapshot.values["arrivals"]))]
        waiting = [] if oldest is None else [mark for mark in marks if mark[1] > oldest]
        saved = self._saved(snapshot, last)
        totals = carried.copy()
        totals.merge(join.metrics)
        values = {
            "kind": snapshot.kind,
            "fingerprint": dict(snapshot.fingerprint),
            "values": dict(snapshot.values) if join.pending else {"metrics": join.metrics.as_dict()},
            "marks": waiting,
            "places": saved.places,
            "version": intent["version"],
            "relation_id": self.recipe.relation_id,
            "carried": carried.as_dict(),
            "arrived": arrived,
        }
        if memory is not None:
            values["memory"] = memory
        report = {
            "pending": join.pending,
            "oldest_ms": waiting[0][0] if waiting else None,
            "memory": join.sizes(),
            "metrics": totals.as_dict(),
            "version": intent["version"],
        }

        def keep(state: ShardState) -> None:
            LIVE.keep(self.owner, shard, state.state_id, join)

        return ShardResult(saved.tables, saved.kept, values, report, keep if self.alive_bytes else None)

    def _saved(self, snapshot: Snapshot, last: ShardState | None) -> SavedWindow:
        """The window, reusing files of the last state where they are unchanged."""
        window = snapshot.tables.get(ROWS)
        if window is None or window.num_rows == 0:
            return SavedWindow((), (), ())
        chunks = snapshot.values["chunks"]
        files = () if last is None else _window_files(last)
        if last is None or not files or last.values["fingerprint"] != snapshot.fingerprint:
            return save_window(window, chunks)
        return save_window(window, chunks, files, last.values["values"]["chunks"], last.values["places"])


def _memory_of(state: ShardState | None) -> Mapping[str, Any] | None:
    """The observations of the last micro-batch for the memory of the observed rate."""
    return None if state is None else state.values.get("memory")


def waits(state: ShardState) -> bool:
    """Whether tuples of a shard wait."""
    return bool(_window_files(state))


def _window_files(state: ShardState) -> tuple[StateFile, ...]:
    """The files of waiting tuples; those of dropped rows come after them."""
    return tuple(file for file in state.files if file.table != SHED_TABLE)
