"""What a stateful operator of a flow is to the commit protocol: a step.

A step routes its inputs to shards in the JVM, and runs one task per shard in Python. The task is a pure function of the
shard's state after the last commit, the shard's sorted rows, and the step's part of the intent; what it gives is output
batches, then its new state. `dovetail.spark.commit` runs any chain of steps; it knows nothing of what they compute.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import types as T

from dovetail.spark.shard_job import ShardTask
from dovetail.state import FlowStore, ShardState

__all__ = ["BatchClock", "Step", "StepRecord"]


@dataclass(frozen=True, slots=True)
class BatchClock:
    """The time of a micro-batch: read once by the driver, written into its intent, and nobody else's clock counts.

    Attributes
    ----------
    time_ms
        When the micro-batch began, milliseconds since 1970; never before an earlier one's.
    previous_ms
        The same of the micro-batch before; None for the first.
    is_draining
        Whether nothing may wait when this micro-batch ends.
    """

    time_ms: int
    previous_ms: int | None
    is_draining: bool


@dataclass(frozen=True)
class StepRecord:
    """What a commit says of one step: its shards' states and reports, by shard."""

    states: tuple[ShardState, ...]
    reports: tuple[Mapping[str, Any], ...]


class Step(ABC):
    """One stateful operator of a flow.

    Attributes
    ----------
    name
        Unique in the flow and fit for a directory: ``"1-enrich"``.
    shards
        How many slices its state has.
    output
        The columns it puts out, as the user sees them.
    mapped_schema
        The columns of what its tasks put out.
    sort_by
        The routed columns to sort by within a shard, the code first.
    """

    name: str
    shards: int
    output: T.StructType
    mapped_schema: T.StructType
    sort_by: list[str]

    budget_bytes: int | None = None
    """The most memory it takes, all shards together, where that is declared."""

    def open(self, store: FlowStore) -> None:
        """Get ready, or refuse; called once before a query starts, when the checkpoint is known to be the flow's."""
        self.store = store

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """What its state depends on, ready for JSON; see `FlowFingerprint`."""

    @abstractmethod
    def route(self, inputs: Sequence[DataFrame]) -> DataFrame:
        """The inputs, streaming or not, as one DataFrame of the columns that tasks read, ``__shard`` among them. All
        names must be free of dots and backticks."""

    @abstractmethod
    def decide(self, previous: StepRecord | None, clock: BatchClock) -> dict[str, Any]:
        """Its part of a new intent, ready for JSON. Runs on the driver, once per micro-batch, before any task."""

    @abstractmethod
    def task(self, is_last: bool) -> ShardTask:
        """What runs on executors. Only the last step's output goes to the sink without another shuffle; any other's may
        be read from two runs of the same task, which must then give the same rows."""

    @abstractmethod
    def finish(self, mapped: DataFrame) -> DataFrame:
        """What tasks put out, as the user's columns."""
