"""`flow.wait_for` as a step of the commit protocol: tuples that wait for rows that come later than they do."""

from collections.abc import Mapping
from typing import Any

from pyspark.sql import DataFrame

from dovetail.spark.flow_step import EnrichStep
from dovetail.spark.join_plan import JoinPlan
from dovetail.spark.steps import BatchClock, StepRecord
from dovetail.spark.waiting_task import WaitingTask

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
    """

    def __init__(self, name: str, plan: JoinPlan, stream: DataFrame, deadline_ms: int, keeps_unmatched: bool) -> None:
        super().__init__(name, plan, stream, deadline_ms, "batch")
        self.deadline_ms, self.keeps_unmatched = deadline_ms, keeps_unmatched

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
        return WaitingTask(self.plan.recipe, self._stream_schema, self.keeps_unmatched)
