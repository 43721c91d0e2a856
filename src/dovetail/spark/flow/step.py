"""A step: an operator of a flow, as the commit protocol sees it.

A step routes its inputs to shards in the JVM, and runs one task per shard in Python. The task is a pure function of the
shard's state after the last commit, the shard's sorted rows, and the step's part of the intent; it returns output
batches, then its new state. `dovetail.spark.flow.commit` runs any chain of steps, whatever they compute.

A step that needs no state may work *in place*: on the rows of each partition, without a shuffle. Its output depends
only on its rows and its part of the intent.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from dovetail.runtime.in_place import InPlaceTask
from dovetail.runtime.shard_job import ShardTask
from dovetail.spark.flow.store import FlowStore
from dovetail.storage.state_files import ShardState

if TYPE_CHECKING:
    from dovetail.spark.flow.late_rows import SideFiles
    from dovetail.spark.flow.sink import Sink

__all__ = ["BatchClock", "Step", "StepExplanation", "StepRecord"]


@dataclass(frozen=True, slots=True)
class BatchClock:
    """The time of a micro-batch: read once by the driver and written into its intent; no other clock counts."""

    time_ms: int  # start of the micro-batch, milliseconds since 1970; never decreases
    previous_ms: int | None  # that of the previous micro-batch
    is_draining: bool  # whether nothing may wait when this micro-batch ends


@dataclass(frozen=True)
class StepRecord:
    """A commit's record of one step: states and reports, by shard."""

    states: tuple[ShardState, ...]
    reports: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class StepExplanation:
    """How one step of a flow will run; ``facts`` and ``plan`` are JSON-serializable."""

    name: str
    facts: Mapping[str, Any]
    plan: Mapping[str, Any] | None = None
    plan_text: str | None = None

    def as_dict(self) -> dict[str, Any]:
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
    """One operator of a flow."""

    name: str  # unique in the flow and usable as a directory: "1-enrich"
    shards: int  # slices of its state
    output: T.StructType  # the user's columns
    mapped_schema: T.StructType  # the columns that its tasks emit
    sort_by: list[str]  # routed columns to sort by within a shard, the code first
    sort_first: str | None = None  # SQL: a number that is never NULL, to sort by before `sort_by`
    takes: tuple[str, ...] | None = None  # steps whose output it takes, with the flow's input; None: the previous stage
    has_tags: bool = False  # whether ``__shard`` is ``tag * shards + shard``
    carried: tuple[str, ...] | None = None  # the names of `output` in what tasks emit; None: only `finish` knows
    takes_carried: bool = False  # whether it takes rows as tasks emit them; then there is `route_carried`
    may_work_in_place: bool = False  # without a shuffle; then there are `prepare`, `place` and `task_in_place`
    accounts_for_tuples: bool = False  # every tuple taken is matched, unmatched, shed or waiting
    budget_bytes: int | None = None  # over all shards, if declared
    side_files: "tuple[SideFiles, ...]" = ()  # for rows that tasks leave in tables of their state, after the commit
    side_sink: "Sink | None" = None  # for rows that leave the flow here

    @property
    def side_schema(self) -> T.StructType:
        """The columns of the side sink's rows."""
        return self.output

    def open(self, store: FlowStore) -> None:
        """Prepare, or refuse; called once before a query starts, when the checkpoint is known to be the flow's."""
        self.store = store

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """What its state depends on, JSON-serializable; see `FlowFingerprint`."""

    def as_saved(self, saved: Mapping[str, Any]) -> "Step":
        """The step with the checkpoint's values of what the user left open; `saved` is its fingerprint there."""
        return self

    def explanation(self) -> StepExplanation:
        about = self.fingerprint()
        known = ("name", "kind", "shards", "input", "output", "hash")
        settings = {name: value for name, value in about.items() if name not in known and value is not None}
        return StepExplanation(self.name, {"kind": about["kind"], "shards": self.shards, **settings})

    state_ignores: tuple[str, ...] = ("name",)
    """The parts of `fingerprint` that a new flow may change and still use the state; see `resume_from`."""

    def can_go_on_from(self, saved: Mapping[str, Any]) -> bool:
        """Whether it can continue with the state of a step of an older flow with this fingerprint."""
        ours = self.fingerprint()
        return all(ours.get(name) == saved.get(name) for name in {*ours, *saved} - {*self.state_ignores})

    @abstractmethod
    def route(self, inputs: Sequence[DataFrame]) -> DataFrame:
        """The inputs, streaming or not, as one DataFrame of the columns that tasks read, including ``__shard``.

        Names must not contain dots or backticks. If the step has `takes`, the flow's own input comes first.
        """

    def route_carried(self, rows: DataFrame, names: Sequence[str]) -> DataFrame:
        """Like `route`, for the output of the previous step's tasks under its `carried` names, not decoded."""
        raise NotImplementedError

    @abstractmethod
    def decide(self, previous: Mapping[str, StepRecord] | None, clock: BatchClock) -> dict[str, Any]:
        """Its part of a new intent, JSON-serializable, from the last commit's records of all steps, if any.

        Runs on the driver, once per micro-batch, before any task.
        """

    def published(self, record: StepRecord, batch: int) -> None:  # noqa: B027 -- most have nothing to do
        """A micro-batch was committed and published; may be called again for the same one."""

    def settle(self, record: StepRecord, batch: int) -> None:  # noqa: B027 -- most have nothing
        """Make visible what the newest commit, of micro-batch ``batch``, holds, when a run has ended normally;
        idempotent.
        """

    def side_rows(self, record: StepRecord, spark: SparkSession) -> DataFrame | None:
        """The rows that tasks left in their new state for the side sink, with the columns of `side_schema`, if any."""
        return None

    def states(self, record: StepRecord) -> tuple[ShardState, ...]:
        """The state of each shard, from the last commit's record."""
        return record.states

    @abstractmethod
    def task(self, is_last: bool) -> ShardTask:
        """The task for executors.

        Only the last step's output reaches the sink without another shuffle. Any other's may be read from two runs of
        the same task, which must then emit the same rows.
        """

    def needs_order(self, is_last: bool) -> bool:
        """Whether a shard's rows must be in the same order when its task runs again.

        The last step's output and new state always come from one run, so it does not if its results are independent of
        the order.
        """
        return True

    # ================================================================ in place

    def is_in_place(self, intent: Mapping[str, Any]) -> bool:
        """Whether a micro-batch with this intent runs without a shuffle."""
        return False

    def prepare(self, rows: DataFrame) -> DataFrame:
        """Rows with the user's columns, streaming or not, as tasks in place read them."""
        raise NotImplementedError

    def prepare_carried(self, rows: DataFrame, names: Sequence[str]) -> DataFrame:
        """Like `prepare`, for the output of the previous step's tasks under its `carried` names."""
        raise NotImplementedError

    def place(self, prepared: DataFrame) -> DataFrame:
        """Prepared rows as `route` returns them, for a micro-batch that is not in place after all."""
        raise NotImplementedError

    def task_in_place(self, intent: Mapping[str, Any]) -> InPlaceTask:
        """The task for executors in place."""
        raise NotImplementedError

    @abstractmethod
    def finish(self, mapped: DataFrame) -> DataFrame:
        """The output of tasks as the user's columns; there may be others as well."""
