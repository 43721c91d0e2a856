"""One shard of a flow's join with a relation, in one micro-batch.

What the cache or the index answers goes out at once; the rest waits in the operator's window, which is saved and
restored from micro-batch to micro-batch. How far the disk phase goes is the intent's to say:

drain
    until nothing waits;
pace
    that part of a cycle over the shard, so that the work is spread evenly over ``max_delay``;
due_before_ms
    on from there until nothing waits that arrived in a micro-batch of that time or before.

Tuples that wait were promised the relation's version of the micro-batch that they arrived in. When the version changes,
they are joined with the old one to the end, before any tuple meets the new one.
"""

import math
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dovetail.errors import RelationError, RelationNotFound, StateError
from dovetail.memory import Budget
from dovetail.metrics import OperatorMetrics
from dovetail.model.explain import Objective, Strategy
from dovetail.operators import SemiStreamOperator, Snapshot
from dovetail.spark.enrich_task import make_operator
from dovetail.spark.join_recipe import JoinRecipe
from dovetail.spark.live_operators import LIVE
from dovetail.spark.shard_job import ShardInput, ShardResult
from dovetail.state import ShardState
from dovetail.state.chunks import ROWS, SavedWindow, load_window, save_window

__all__ = ["FlowJoinTask"]

Marks = list[tuple[int, int]]
"""Pairs (time of a micro-batch, tuples that had arrived by its end): how long what waits has waited."""


@dataclass(frozen=True)
class FlowJoinTask:
    """The join of one shard; see `dovetail.spark.shard_job.ShardTask`.

    Attributes
    ----------
    recipe
        The join.
    strategy, objective
        The operator, and what it is to do with its memory.
    budget_bytes
        What one shard may hold.
    stream_schema
        The columns of the routed rows.
    owner
        Unique to the step of a running query: whose living operators these are.
    alive_bytes
        How much the operators may take that go on living in a worker, with what they have learned. None may (0) where
        two runs of a task must give the same rows: only what is in its state is promised to both.
    """

    recipe: JoinRecipe
    strategy: Strategy
    objective: Objective
    budget_bytes: int
    stream_schema: pa.Schema
    owner: str
    alive_bytes: int

    def run(self, given: ShardInput) -> Generator[pa.RecordBatch, None, ShardResult]:
        """Join the shard's rows as far as the intent says."""
        shard, state, intent = given.shard, given.state, given.intent
        carried = OperatorMetrics()
        marks: Marks = []
        join: SemiStreamOperator | None = None
        if state is not None:
            carried = OperatorMetrics.from_dict(state.values["carried"])
            join = self._continued(given, state)
            if join is None:
                # Nothing waited, so nothing is restored: only what was counted goes on.
                carried.merge(OperatorMetrics.from_dict(state.values["values"]["metrics"]))
            elif state.values["version"] == intent["version"]:
                marks = [(int(time_ms), int(arrivals)) for time_ms, arrivals in state.values["marks"]]
            else:
                yield from self._put_out(join.drain())
                carried.merge(join.metrics)
                join = None
        if join is None:
            join = self._operator(shard, intent["version"])
        for batch in given.batches:
            yield from self._put_out(join.offer(self._stream_batch(batch)))
        yield from self._put_out(self._disk_phase(join, marks, intent))
        return self._result(shard, state, join, carried, marks, intent)

    # ================================================================ the operator

    def _continued(self, given: ShardInput, state: ShardState) -> SemiStreamOperator | None:
        """The operator as it was after the last commit, still alive or restored; None if a new one does as well."""
        alive: SemiStreamOperator | None = LIVE.take(self.owner, given.shard, state.state_id)
        if alive is not None:
            return alive
        if not state.files:
            return None
        saved = state.values
        if saved["relation_id"] != self.recipe.relation_id:
            waiting = sum(chunk[0] for chunk in saved["values"]["chunks"])
            raise StateError(
                f"{waiting} tuples of shard {given.shard} wait for a relation that was at {self.recipe.path} and is "
                "another one now.",
                hint="Put the old relation back, or start the flow with a new checkpoint.",
            )
        join = self._operator(given.shard, saved["version"])
        tables = {number: given.read(file) for number, file in enumerate(state.files)}
        window = load_window(state.files, tables, saved["values"]["chunks"], saved["places"])
        join.restore(Snapshot(saved["kind"], saved["fingerprint"], {ROWS: window}, saved["values"]))
        return join

    def _operator(self, shard: int, version: int) -> SemiStreamOperator:
        LIVE.make_room(self.budget_bytes, self.alive_bytes)
        try:
            relation = self.recipe.open(version)
        except RelationNotFound as error:
            raise RelationNotFound(
                str(error), hint="Nothing was lost: put the relation back, and start the flow again."
            ) from None
        if relation.relation_id != self.recipe.relation_id:
            raise RelationError(
                f"The relation at {self.recipe.path} was removed and built anew while the flow was running.",
                hint="Nothing was lost: start the flow again with the new relation.",
            )
        reader = relation.shard(
            shard,
            columns=list(self.recipe.relation_columns),
            io=self.recipe.io,
            include_null_keys=not self.recipe.on,
        )
        identity = {"version": relation.version, "shard": shard}
        spec = self.recipe.spec(reader, self._operator_schema(), Budget(self.budget_bytes), identity)
        return make_operator(self.strategy, spec, self.objective)

    def _operator_schema(self) -> pa.Schema:
        return self.recipe.stream_batch(pa.RecordBatch.from_pylist([], schema=self.stream_schema)).schema

    # ================================================================ rows

    def _stream_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not batch.schema.equals(self.stream_schema):
            # The same values in another form, such as moments told in the session's time zone.
            batch = batch.cast(self.stream_schema)
        return self.recipe.stream_batch(batch)

    def _put_out(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield self.recipe.output_batch(batch)

    def _disk_phase(
        self, join: SemiStreamOperator, marks: Marks, intent: Mapping[str, Any]
    ) -> Iterator[pa.RecordBatch]:
        if intent["drain"]:
            yield from join.drain()
            return
        cycle_steps = -(-join.spec.shard.num_rows // join.block_rows)
        # At least one step: where the shard is small, it answers everything that waits.
        for _ in range(math.ceil(intent["pace"] * cycle_steps)):
            if not join.pending:
                return
            yield from join.step()
        due = max((arrivals for time_ms, arrivals in marks if time_ms <= intent["due_before_ms"]), default=0)
        while join.oldest is not None and join.oldest < due:
            yield from join.step()

    # ================================================================ what is left behind

    def _result(
        self,
        shard: int,
        last: ShardState | None,
        join: SemiStreamOperator,
        carried: OperatorMetrics,
        marks: Marks,
        intent: Mapping[str, Any],
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
        }
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
        """The window, with what is already in files of the last state named again."""
        window = snapshot.tables.get(ROWS)
        if window is None or window.num_rows == 0:
            return SavedWindow((), (), ())
        chunks = snapshot.values["chunks"]
        if last is None or not last.files or last.values["fingerprint"] != snapshot.fingerprint:
            return save_window(window, chunks)
        return save_window(window, chunks, last.files, last.values["values"]["chunks"], last.values["places"])
