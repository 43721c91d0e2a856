"""`flow.enrich` as a step of the commit protocol.

If nothing may wait and the relation can be mapped, it works in place: every task looks up its own rows, as in
`dovetail.enrich`. Tuples may still wait from a time when the flow had a ``max_delay``: then one micro-batch runs on
shards and drains them.
"""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from dovetail.core.errors import RelationNotFound
from dovetail.core.memory import Budget
from dovetail.core.metrics import OperatorMetrics
from dovetail.joins.options import FITTED_STRATEGIES
from dovetail.relation import Relation
from dovetail.relation.format import CODE_COLUMN, SHARD_COLUMN
from dovetail.runtime.enrich import EnrichTask, LookupTask, OperatorTask
from dovetail.runtime.enrich_shard import FlowJoinTask, waits
from dovetail.runtime.late_rows import SHED_TABLE
from dovetail.spark.flow.routing import is_sortable
from dovetail.spark.flow.sink import Sink
from dovetail.spark.flow.step import BatchClock, Step, StepExplanation, StepRecord
from dovetail.spark.flow.store import FlowStore
from dovetail.spark.plan.join_plan import JoinPlan
from dovetail.spark.plan.micro_batch import current_micro_batch
from dovetail.spark.steps.checkpoint_relation import OF_A_DATAFRAME, kept_in_checkpoint, was_of_a_dataframe
from dovetail.spark.steps.enrich import check_lookup_budget, fitted_to_rate, is_by_lookup
from dovetail.spark.steps.explain import explained
from dovetail.spark.steps.flow_pins import FlowPin
from dovetail.spark.steps.named_versions import named_versions
from dovetail.storage.state_files import ShardState, read_table

__all__ = ["EnrichStep", "Refresh"]

Refresh = Literal["query", "batch"]


class EnrichStep(Step):
    """A join with a relation: by index if nothing may wait, else with a window that outlives the micro-batch.

    ``stream`` is an empty DataFrame with the input columns. A tuple waits at most ``max_delay_ms``; None: until the end
    of its micro-batch. ``shed_to`` receives rows dropped for lack of room, as they arrived. ``rebuilt`` makes the same
    step with another number of shards, if the relation was built from a DataFrame.
    """

    accounts_for_tuples = True

    def __init__(
        self,
        name: str,
        plan: JoinPlan,
        stream: DataFrame,
        max_delay_ms: int | None,
        refresh: Refresh,
        shed_to: Sink | None = None,
        rebuilt: "Callable[[int], EnrichStep] | None" = None,
    ) -> None:
        self.name, self.plan = name, plan
        self._rebuilt = rebuilt
        self._pin: FlowPin | None = None
        self._described_relation = plan.recipe.path if rebuilt is None else OF_A_DATAFRAME
        self.max_delay_ms, self.refresh, self.side_sink = max_delay_ms, refresh, shed_to
        self.shards, self.budget_bytes = plan.recipe.num_shards, plan.budget.total_bytes
        self.output, self.mapped_schema = plan.output, plan.mapped_schema
        self.carried, self.takes_carried = plan.carried, plan.takes_encoded
        self.may_work_in_place = is_by_lookup(plan) and max_delay_ms is None
        self._input = stream.schema
        routed = self.route([stream])
        own = T.StructType([field for field in routed.schema if field.name != SHARD_COLUMN])
        self._stream_schema = to_arrow_schema(own, timezone="UTC")
        first = [CODE_COLUMN] if plan.recipe.code_from is None else [plan.recipe.code_from]
        others = [field.name for field in own if field.name not in first and is_sortable(field.dataType)]
        self.sort_by = [*(name for name in first if name in own.names), *others]
        self._parallelism = max(1, stream.sparkSession.sparkContext.defaultParallelism)
        self._owner = uuid.uuid4().hex
        is_fitted = plan.objective == "memory" and plan.strategy in FITTED_STRATEGIES
        self._follows_rate = is_fitted and plan.rate is None
        self._fitted = None if self.may_work_in_place else fitted_to_rate(plan, self._on_shards())
        if self.may_work_in_place:
            check_lookup_budget(plan, self._lookup(plan.recipe.version))

    def fingerprint(self) -> dict[str, Any]:
        recipe = self.plan.recipe
        return {
            "name": self.name,
            "kind": f"enrich {self.plan.strategy}",
            "shards": self.shards,
            "hash": f"{recipe.code_kind}, pmod(xxhash64(code, 42), shards)",
            "input": [f"{field.name} {field.dataType.simpleString()}" for field in self._input],
            "output": [f"{field.name} {field.dataType.simpleString()}" for field in self.output],
            "on": [f"{ours} = {theirs}" for ours, theirs in self.plan.on],
            "how": recipe.how,
            "condition": None if recipe.condition is None else recipe.condition.describe(),
            "relation": self._described_relation,
        }

    def as_saved(self, saved: Mapping[str, Any]) -> "EnrichStep":
        """With the checkpoint's number of shards, if the relation was built from a DataFrame."""
        if self._rebuilt is None:
            return self
        taken_up = self if saved["shards"] == self.shards else self._rebuilt(saved["shards"])
        if was_of_a_dataframe(saved):
            taken_up._described_relation = saved["relation"]
        return taken_up

    def open(self, store: FlowStore) -> None:
        """Copy a relation built from a DataFrame to the checkpoint; protect needed versions from vacuums."""
        super().open(store)
        if self._rebuilt is not None:
            self.plan = kept_in_checkpoint(self.plan, store, self.name)
        recipe = self.plan.recipe
        if recipe.filesystem is None:
            self._pin = FlowPin(recipe.path, store, self.name)
            self._pin.hold({recipe.version, *(named_versions(store, self.name) or ())})

    def _pinned(self, version: int, previous: Mapping[str, StepRecord] | None) -> int:
        """The version of a new intent, pinned together with the one that waiting tuples are joined with."""
        if self._pin is not None:
            before = () if previous is None else previous[self.name].states
            self._pin.hold({version, *(int(state.values["version"]) for state in before if "version" in state.values)})
        return version

    def explanation(self) -> StepExplanation:
        plan = self.plan
        # Tasks are given a version in every micro-batch; `refresh` says when it changes.
        task: EnrichTask = replace(self._lookup(plan.recipe.version), refresh=self.refresh)
        if not self.may_work_in_place:
            task = replace(self._on_shards(), fitted=self._fitted)
        join = explained(task, plan)
        facts = {
            "kind": "enrich",
            "shards": self.shards,
            "memory for": "the rate that is observed" if self._follows_rate else None,
            "sheds": None if plan.shed is None else plan.shed.name,
        }
        known = {name: value for name, value in facts.items() if value is not None}
        return StepExplanation(self.name, known, join.as_dict(), join.text())

    def _on_shards(self) -> OperatorTask:
        """The join of a shard, as `dovetail.enrich` runs it."""
        plan, budget = self.plan, Budget(max(1, self.plan.budget.total_bytes // self.shards))
        return OperatorTask(
            plan.recipe, self.refresh, self.name, current_micro_batch, plan.strategy, plan.objective, budget
        )

    def route(self, inputs: Sequence[DataFrame]) -> DataFrame:
        """The stream with keys aligned, codes and shards."""
        (df,) = inputs
        return self.place(self.prepare(df))

    def route_carried(self, rows: DataFrame, names: Sequence[str]) -> DataFrame:
        """The same for the output of another step."""
        return self.place(self.prepare_carried(rows, names))

    def decide(self, previous: Mapping[str, StepRecord] | None, clock: BatchClock) -> dict[str, Any]:
        """The relation's version, how far the disk phase goes, and whether there is one."""
        drains = clock.is_draining or self.max_delay_ms is None
        elapsed_ms = clock.time_ms - (clock.time_ms if clock.previous_ms is None else clock.previous_ms)
        return {
            "version": self._pinned(self._version(), previous),
            "time_ms": clock.time_ms,
            "drain": drains,
            "pace": 1.0 if drains else min(1.0, elapsed_ms / max(1, self.max_delay_ms or 0)),
            "due_before_ms": clock.time_ms - (self.max_delay_ms or 0),
            "elapsed_ms": elapsed_ms,
            "in_place": self.may_work_in_place and not (previous and _waits(previous[self.name])),
        }

    def _version(self) -> int:
        recipe = self.plan.recipe
        if self.refresh == "query":
            return recipe.version
        try:
            newest = Relation.open(recipe.path, filesystem=recipe.filesystem)
        except RelationNotFound as error:
            raise RelationNotFound(
                str(error), hint="Nothing was lost: put the relation back, and start the flow again."
            ) from None
        recipe.check(newest)
        return newest.version

    # ================================================================ in place

    def is_in_place(self, intent: Mapping[str, Any]) -> bool:
        """As the intent says. An intent of an older Dovetail does not say so. If it does, but the step may wait since
        the last start, shards give the same result: the intent also tells them to drain.
        """
        return self.may_work_in_place and bool(intent.get("in_place"))

    def prepare(self, rows: DataFrame) -> DataFrame:
        return self.plan.prepare(rows)

    def prepare_carried(self, rows: DataFrame, names: Sequence[str]) -> DataFrame:
        return self.plan.prepare_carried(rows, names)

    def place(self, prepared: DataFrame) -> DataFrame:
        return self.plan.place(prepared, "shard" if self.plan.has_equality else "replicate")

    def task_in_place(self, intent: Mapping[str, Any]) -> LookupTask:
        return self._lookup(intent["version"])

    def _lookup(self, version: int) -> LookupTask:
        recipe = replace(self.plan.recipe, version=version, is_bound=True)
        return LookupTask(
            recipe,
            "query",
            self.name,
            current_micro_batch,
            self.plan.budget,
            tasks=self.plan.tasks,
            reports_metrics=True,
        )

    # ================================================================ on shards

    def states(self, record: StepRecord) -> tuple[ShardState, ...]:
        """The shards' states. After a micro-batch in place there is only one, which has nothing but counters."""
        nothing = OperatorMetrics().as_dict()
        values = {"carried": nothing, "values": {"metrics": nothing}}
        missing = self.shards - len(record.states)
        return (*record.states, *(ShardState(uuid.uuid4().hex, (), values) for _ in range(missing)))

    def task(self, is_last: bool) -> FlowJoinTask:
        budget_bytes = self.plan.budget.split(self.shards).total_bytes
        # All workers together keep at most the budget alive.
        alive_bytes = max(budget_bytes, self.plan.budget.total_bytes // self._parallelism) if is_last else 0
        return FlowJoinTask(
            recipe=self.plan.recipe,
            strategy=self.plan.strategy,
            objective=self.plan.objective,
            budget_bytes=budget_bytes,
            stream_schema=self._stream_schema,
            owner=self._owner,
            alive_bytes=alive_bytes,
            shed=self.plan.shed,
            shed_columns=() if self.side_sink is None else self.plan.stream_names,
            fitted_bytes=None if self._fitted is None else self._fitted.budget_bytes,
            block_rows=None if self._fitted is None else self._fitted.block_rows,
            follows_rate=self._follows_rate,
        )

    @property
    def side_schema(self) -> T.StructType:
        return self._input

    def side_rows(self, record: StepRecord, spark: SparkSession) -> DataFrame | None:
        """The rows dropped in this micro-batch."""
        rows = self._side_table(record, SHED_TABLE)
        return None if rows is None else self.plan.as_arrived(spark, rows, self._input)

    def _side_table(self, record: StepRecord, name: str) -> pa.Table | None:
        files = [file for state in record.states for file in state.files if file.table == name]
        return pa.concat_tables([read_table(self.store.state_root, file) for file in files]) if files else None

    def finish(self, mapped: DataFrame) -> DataFrame:
        return self.plan.finish(mapped)


def _waits(record: StepRecord) -> bool:
    return any(map(waits, record.states))
