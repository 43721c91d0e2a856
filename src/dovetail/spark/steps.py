"""What a stateful operator of a flow is to the commit protocol: a step.

A step routes its inputs to shards in the JVM, and runs one task per shard in Python. The task is a pure function of the
shard's state after the last commit, the shard's sorted rows, and the step's part of the intent; what it gives is output
batches, then its new state. `dovetail.spark.commit` runs any chain of steps; it knows nothing of what they compute.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from dovetail.spark.shard_job import ShardTask
from dovetail.state import FlowStore, ShardState

if TYPE_CHECKING:
    from dovetail.spark.sinks.base import Sink

__all__ = ["BatchClock", "Step", "StepExplanation", "StepRecord"]


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


@dataclass(frozen=True)
class StepExplanation:
    """How one step of a flow will be done.

    Attributes
    ----------
    name
        The step.
    facts
        What is known of it, ready for JSON.
    plan, plan_text
        The plan behind it, where there is one: ready for JSON, and as lines.
    """

    name: str
    facts: Mapping[str, Any]
    plan: Mapping[str, Any] | None = None
    plan_text: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"name": self.name, **self.facts, "plan": self.plan}

    def text(self) -> str:
        """Lines for a terminal."""
        lines = [f"{'step':<13} {self.name}"]
        for name, value in self.facts.items():
            if value is not None:
                shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
                lines.append(f"{name:<13} {shown}")
        return "\n".join([*lines, *([self.plan_text] if self.plan_text else [])])


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
    sort_first
        An SQL expression over the routed columns, a number that is never NULL, to sort by before `sort_by`; None: none.
    takes
        None: what the stage before it gives. Else the steps whose output it takes, besides the flow's own input.
    has_tags
        Whether ``__shard`` tells more of a row than its shard, as ``tag * shards + shard``.
    """

    name: str
    shards: int
    output: T.StructType
    mapped_schema: T.StructType
    sort_by: list[str]
    sort_first: str | None = None
    takes: tuple[str, ...] | None = None
    has_tags: bool = False

    budget_bytes: int | None = None
    """The most memory it takes, all shards together, where that is declared."""

    side_sink: "Sink | None" = None
    """Where rows go that leave the flow here, instead of to its sink."""

    def open(self, store: FlowStore) -> None:
        """Get ready, or refuse; called once before a query starts, when the checkpoint is known to be the flow's."""
        self.store = store

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """What its state depends on, ready for JSON; see `FlowFingerprint`."""

    def explanation(self) -> StepExplanation:
        """How it will be done."""
        about = self.fingerprint()
        known = ("name", "kind", "shards", "input", "output", "hash")
        settings = {name: value for name, value in about.items() if name not in known and value is not None}
        return StepExplanation(self.name, {"kind": about["kind"], "shards": self.shards, **settings})

    @abstractmethod
    def route(self, inputs: Sequence[DataFrame]) -> DataFrame:
        """The inputs, streaming or not, as one DataFrame of the columns that tasks read, ``__shard`` among them. All
        names must be free of dots and backticks. Where the step says what it `takes`, the flow's own input is first."""

    @abstractmethod
    def decide(self, previous: Mapping[str, StepRecord] | None, clock: BatchClock) -> dict[str, Any]:
        """Its part of a new intent, ready for JSON, by what the last commit says of all steps (None: there is none).

        Runs on the driver, once per micro-batch, before any task.
        """

    def publish(self, record: StepRecord, state_root: Path, batch: int) -> None:  # noqa: B027 -- most have nothing
        """Make visible what the step has to give besides its output, once the micro-batch is committed; idempotent."""

    def side_rows(self, record: StepRecord, spark: SparkSession) -> DataFrame | None:
        """What goes to the side sink of what tasks have left in their new state, with the columns of `output`; None:
        nothing does."""
        return None

    @abstractmethod
    def task(self, is_last: bool) -> ShardTask:
        """What runs on executors. Only the last step's output goes to the sink without another shuffle; any other's may
        be read from two runs of the same task, which must then give the same rows."""

    def needs_order(self, is_last: bool) -> bool:
        """Whether a shard's rows must come in the same order when its task runs again. Of the last step, output and new
        state are always those of one run, so it need not care if its results do not depend on the order."""
        return True

    @abstractmethod
    def finish(self, mapped: DataFrame) -> DataFrame:
        """What tasks put out, as the user's columns; there may be others besides."""
