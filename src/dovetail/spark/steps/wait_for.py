"""`flow.wait_for` as a step of the commit protocol: tuples that wait for rows that come later than they do."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from dovetail.spark.flow_step import EnrichStep
from dovetail.spark.join_plan import JoinPlan
from dovetail.spark.sinks.base import Sink
from dovetail.spark.steps import BatchClock, StepRecord
from dovetail.spark.waiting_task import EXPIRED_TABLE, Fate, WaitingTask
from dovetail.state import read_table

__all__ = ["WaitingStep"]


class WaitingStep(EnrichStep):
    """A join with the newest version of a relation, in which tuples without a match wait for one.

    Parameters
    ----------
    name, plan, stream
        As for `EnrichStep`; the plan's join is ``left``.
    deadline_ms
        How long a tuple waits.
    keeps_unmatched
        Whether it is put out when it has waited in vain.
    expired
        Where it goes then instead; None: see `keeps_unmatched`.
    """

    def __init__(
        self,
        name: str,
        plan: JoinPlan,
        stream: DataFrame,
        deadline_ms: int,
        keeps_unmatched: bool,
        expired: Sink | None = None,
    ) -> None:
        super().__init__(name, plan, stream, deadline_ms, "batch")
        self.deadline_ms, self.keeps_unmatched, self.side_sink = deadline_ms, keeps_unmatched, expired

    def fingerprint(self) -> dict[str, Any]:
        """What its state depends on."""
        return {**super().fingerprint(), "kind": "wait_for", "keeps_unmatched": self.keeps_unmatched}

    def decide(self, previous: Mapping[str, StepRecord] | None, clock: BatchClock) -> dict[str, Any]:
        """The newest version, and since when a tuple must have waited to leave now."""
        return {
            "version": self._version(),
            "time_ms": clock.time_ms,
            "due_ms": clock.time_ms - self.deadline_ms,
        }

    def task(self, is_last: bool) -> WaitingTask:  # type: ignore[override]
        """The join of one shard."""
        fate: Fate = "aside" if self.side_sink is not None else "out" if self.keeps_unmatched else "dropped"
        return WaitingTask(self.plan.recipe, self._stream_schema, fate)

    def side_rows(self, record: StepRecord, spark: SparkSession) -> DataFrame | None:
        """The rows whose time was up in this micro-batch."""
        files = [file for state in record.states for file in state.files if file.table == EXPIRED_TABLE]
        if not files:
            return None
        rows = pa.concat_tables([read_table(self.store.state_root, file) for file in files])
        # Spark goes by names here, and by places in what tasks put out.
        return self.finish(spark.createDataFrame(rows.rename_columns(self.mapped_schema.names), self.mapped_schema))
