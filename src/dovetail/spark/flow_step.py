"""`flow.enrich` as a step of the commit protocol."""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pyspark.sql import DataFrame
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from dovetail.errors import RelationNotFound
from dovetail.memory import Budget
from dovetail.relation import Relation
from dovetail.relation.format import CODE_COLUMN, SHARD_COLUMN
from dovetail.spark.enrich_task import OperatorTask
from dovetail.spark.explain import explained
from dovetail.spark.flow_task import FlowJoinTask
from dovetail.spark.join_plan import JoinPlan
from dovetail.spark.routing import is_sortable
from dovetail.spark.steps import BatchClock, Step, StepExplanation, StepRecord

__all__ = ["EnrichStep", "Refresh"]

Refresh = Literal["query", "batch"]


class EnrichStep(Step):
    """A join with a relation whose window outlives the micro-batch.

    Parameters
    ----------
    name
        The step's name.
    plan
        The join.
    stream
        An empty DataFrame with the columns that arrive here.
    max_delay_ms
        How long a tuple may wait; None: no longer than its micro-batch.
    refresh
        When the relation's version is chosen anew.
    """

    def __init__(
        self, name: str, plan: JoinPlan, stream: DataFrame, max_delay_ms: int | None, refresh: Refresh
    ) -> None:
        self.name, self.plan = name, plan
        self.max_delay_ms, self.refresh = max_delay_ms, refresh
        self.shards, self.budget_bytes = plan.recipe.num_shards, plan.budget.total_bytes
        self.output, self.mapped_schema = plan.output, plan.mapped_schema
        self._input = stream.schema
        routed = self._placed(stream)
        own = T.StructType([field for field in routed.schema if field.name != SHARD_COLUMN])
        self._stream_schema = to_arrow_schema(own, timezone="UTC")
        first = [CODE_COLUMN] if plan.recipe.code_from is None else [plan.recipe.code_from]
        others = [field.name for field in own if field.name not in first and is_sortable(field.dataType)]
        self.sort_by = [*(name for name in first if name in own.names), *others]
        self._parallelism = max(1, stream.sparkSession.sparkContext.defaultParallelism)
        self._owner = uuid.uuid4().hex

    def fingerprint(self) -> dict[str, Any]:
        """What its state depends on."""
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
            "relation": recipe.path,
        }

    def explanation(self) -> StepExplanation:
        """The join's strategy, memory and predicted rate, for each shard."""
        plan = self.plan
        strategy = plan.strategy if plan.has_equality else "mesh"
        budget = Budget(max(1, plan.budget.total_bytes // self.shards))
        task = OperatorTask(plan.recipe, self.refresh, self.name, strategy, plan.objective, budget)
        join = explained(task, plan)
        return StepExplanation(self.name, {"kind": "enrich", "shards": self.shards}, join.as_dict(), join.text())

    def _placed(self, df: DataFrame) -> DataFrame:
        return self.plan.prepare(df, "shard" if self.plan.has_equality else "replicate", moves_rows=False)

    def route(self, inputs: Sequence[DataFrame]) -> DataFrame:
        """The stream with keys aligned, codes and shards."""
        (df,) = inputs
        return self._placed(df)

    def decide(self, previous: Mapping[str, StepRecord] | None, clock: BatchClock) -> dict[str, Any]:
        """The relation's version, and how far the disk phase goes."""
        drains = clock.is_draining or self.max_delay_ms is None
        elapsed_ms = clock.time_ms - (clock.time_ms if clock.previous_ms is None else clock.previous_ms)
        return {
            "version": self._version(),
            "time_ms": clock.time_ms,
            "drain": drains,
            "pace": 1.0 if drains else min(1.0, elapsed_ms / max(1, self.max_delay_ms or 0)),
            "due_before_ms": clock.time_ms - (self.max_delay_ms or 0),
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

    def task(self, is_last: bool) -> FlowJoinTask:
        """The join of one shard."""
        budget_bytes = self.plan.budget.split(self.shards).total_bytes
        # Together, the workers keep no more alive than the budget.
        alive_bytes = max(budget_bytes, self.plan.budget.total_bytes // self._parallelism) if is_last else 0
        return FlowJoinTask(
            recipe=self.plan.recipe,
            strategy=self.plan.strategy,
            objective=self.plan.objective,
            budget_bytes=budget_bytes,
            stream_schema=self._stream_schema,
            owner=self._owner,
            alive_bytes=alive_bytes,
        )

    def finish(self, mapped: DataFrame) -> DataFrame:
        """The columns of Spark's own join."""
        return self.plan.finish(mapped)
