"""What a flow needs of a sink."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

__all__ = ["Receipt", "Sink", "SinkContext"]

Receipt = Mapping[str, Any]
"""What `Sink.stage` gives and the commit keeps, ready for JSON: all that `Sink.publish` needs, in any process."""


@dataclass(frozen=True)
class SinkContext:
    """The flow that a sink works for.

    Attributes
    ----------
    spark
        The session.
    flow
        The flow's name.
    schema
        The columns of its output.
    staged_root
        A directory of the flow's own, on a disk that all executors share, for what is staged.
    """

    spark: SparkSession
    flow: str
    schema: T.StructType
    staged_root: Path


class Sink(ABC):
    """Takes the output of micro-batches in two moves, so that output and state are one atomic fact.

    `stage` is called first and computes all rows, in one job. Then the flow commits, and the commit holds the receipt.
    Then `publish` makes the rows visible; it may be called again with the same receipt, after a crash also by another
    process, and must then change nothing that is already done.
    """

    kind: str

    stages_in_jvm: bool = False
    """Whether `stage` keeps the rows away from Python, where settings of the job for rows on their way there matter."""

    def open(self, context: SinkContext) -> None:
        """Get ready, or refuse with a `PlanError`; called once before a query starts."""
        self.context = context

    @abstractmethod
    def stage(self, df: DataFrame, batch: int) -> Receipt:
        """Compute all rows, in one job, and keep them where nobody sees them."""

    @abstractmethod
    def publish(self, receipt: Receipt) -> None:
        """Make what was staged visible; idempotent."""

    @abstractmethod
    def forget(self, receipt: Receipt) -> None:
        """The micro-batch is done for good: it will not be published again. What was staged may go."""
