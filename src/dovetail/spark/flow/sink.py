"""The interface of a sink."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from dovetail.spark.flow.ownership import Owner

__all__ = ["Receipt", "Sink", "SinkContext"]

Receipt = Mapping[str, Any]
"""Returned by `Sink.stage` and stored in the commit as JSON: all that `Sink.publish` needs, in any process."""


@dataclass(frozen=True)
class SinkContext:
    """The flow that a sink works for.

    Attributes
    ----------
    schema
        The columns of its output.
    staged_root
        The flow's own directory for staged files, on a disk that all executors share.
    place
        Which of the flow's sinks it is: ``"main"``, or the name of a side output.
    """

    spark: SparkSession
    flow: str
    schema: T.StructType
    staged_root: Path
    place: str = "main"


class Sink(ABC):
    """Takes the output of micro-batches in two phases, so that output and state are atomic.

    First `stage` computes all rows, in one job. Its receipt has ``rows``, the number of staged rows, counted where they
    are. Then the flow commits, and the commit holds the receipt. Then `publish` makes the rows visible. After a crash
    it may be called again with the same receipt, also by another process, and must not repeat what is already done.
    """

    kind: str

    stages_in_jvm: bool = False
    """Whether `stage` sends no rows to Python, so that the job's settings for such rows concern the steps only."""

    def open(self, context: SinkContext) -> None:
        """Prepare, or refuse with a `PlanError`; called once before a query starts."""
        self.context = context

    def claim(self, owner: Owner, batch: int | None, receipt: Receipt | None) -> None:
        """Take the target over from other drivers of this flow; called once, before the first micro-batch.

        From now on, a driver with a lower epoch must fail to stage or publish. A target that has micro-batches of this
        flow which the checkpoint does not know is refused with a `StateError`: the checkpoint is an older copy. A sink
        that can do neither publishes at least once, and documents it.

        ``batch`` is the newest commit of the checkpoint, ``receipt`` what it has staged here; it may not be published
        yet.
        """
        self.owner = owner

    @abstractmethod
    def stage(self, df: DataFrame, batch: int) -> Receipt:
        """Compute all rows, in one job, and store them where no reader sees them."""

    @abstractmethod
    def publish(self, receipt: Receipt) -> None:
        """Make the staged rows visible; idempotent."""

    @abstractmethod
    def forget(self, receipt: Receipt) -> None:
        """The micro-batch will not be published again: its staged files may be removed."""
