"""`flow.wait_for` as a step of the commit protocol: tuples that wait for rows that come later than they do."""

from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from dovetail.runtime.wait_for import EXPIRED_TABLE, Fate, WaitingTask
from dovetail.spark.flow.sink import Sink
from dovetail.spark.flow.step import BatchClock, StepRecord
from dovetail.spark.plan.join_plan import JoinPlan
from dovetail.spark.steps.flow_enrich import EnrichStep

__all__ = ["WaitingStep"]


class WaitingStep(EnrichStep):
    """A join with the newest version of a relation, in which tuples without a match wait for one.

    The plan's join is ``left``. After the deadline a tuple goes to ``expired`` if given; otherwise it is emitted if
    ``keeps_unmatched``, else dropped.
    """

    def __init__(
        self,
        name: str,
        plan: JoinPlan,
        stream: DataFrame,
        deadline_ms: int,
        keeps_unmatched: bool,
        expired: Sink | None = None,
        rebuilt: Callable[[int], EnrichStep] | None = None,
    ) -> None:
        super().__init__(name, plan, stream, deadline_ms, "batch", rebuilt=rebuilt)
        self.deadline_ms, self.keeps_unmatched, self.side_sink = deadline_ms, keeps_unmatched, expired

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "kind": "wait_for", "keeps_unmatched": self.keeps_unmatched}

    def decide(self, previous: Mapping[str, StepRecord] | None, clock: BatchClock) -> dict[str, Any]:
        """The newest version, and the latest arrival time of tuples whose deadline has passed."""
        return {
            "version": self._pinned(self._version(), previous),
            "time_ms": clock.time_ms,
            "due_ms": clock.time_ms - self.deadline_ms,
        }

    def task(self, is_last: bool) -> WaitingTask:  # type: ignore[override]
        fate: Fate = "aside" if self.side_sink is not None else "out" if self.keeps_unmatched else "dropped"
        return WaitingTask(self.plan.recipe, self._stream_schema, fate)

    @property
    def side_schema(self) -> T.StructType:
        return self.output

    def side_rows(self, record: StepRecord, spark: SparkSession) -> DataFrame | None:
        """The rows whose deadline passed in this micro-batch."""
        rows = self._side_table(record, EXPIRED_TABLE)
        if rows is None:
            return None
        # Spark matches columns by name here, and by position in the output of tasks.
        return self.finish(spark.createDataFrame(rows.rename_columns(self.mapped_schema.names), self.mapped_schema))
