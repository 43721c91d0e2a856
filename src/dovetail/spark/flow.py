"""Flows: stateful dataflows with exactly-once results.

::

    flow = dt.stream(orders, name="orders").enrich(customers, on="id", max_delay="5 seconds")
    query = flow.write(dt.sinks.parquet(path), checkpoint=checkpoint, trigger="2 seconds")
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pyspark.sql import DataFrame
from pyspark.sql import types as T

from dovetail.errors import PlanError
from dovetail.memory import Budget
from dovetail.operators.conditions import Condition
from dovetail.operators.spec import KeyNames
from dovetail.spark.built_relations import relation_of
from dovetail.spark.closed_groups import ClosedGroupsStep
from dovetail.spark.commit import CommitProtocol, Stage
from dovetail.spark.determinism import require_deterministic
from dovetail.spark.diverting import Diversion
from dovetail.spark.durations import parse_duration_ms
from dovetail.spark.flow_query import FlowQuery
from dovetail.spark.flow_step import EnrichStep, Refresh
from dovetail.spark.join_plan import plan_join
from dovetail.spark.sinks.base import Sink, SinkContext
from dovetail.spark.steps import Step, StepExplanation
from dovetail.spark.waiting_step import WaitingStep
from dovetail.spark.warehouse_stages import WarehouseStages
from dovetail.state import FlowFingerprint, FlowStore
from dovetail.state.store import FEWEST_COMMITS_KEPT

__all__ = ["Flow", "FlowExplanation", "require_flow_name", "stream"]

_AVAILABLE_NOW = "available-now"
_NAME = re.compile(r"[\w.-]+")
_UNNAMED = "flow"


def stream(df: DataFrame, name: str = _UNNAMED) -> "Flow":
    """Begin a flow with a streaming DataFrame.

    Parameters
    ----------
    df
        A streaming DataFrame. Expressions that give other values when they are computed again (``rand``, ``uuid``) are
        refused: a replay must see the same rows.
    name
        The flow's name: letters, digits, ``_``, ``-`` and ``.``. Its checkpoint belongs to this name, so that a flow
        with another name cannot take it over by mistake. Give one where a session runs several flows.
    """
    if not isinstance(df, DataFrame) or not df.isStreaming:
        raise PlanError(
            "A flow begins with a streaming DataFrame.", hint="For a batch DataFrame use dovetail.enrich, or Spark."
        )
    require_flow_name(name)
    require_deterministic(df, "the input")
    return Flow(name, df, ())


def require_flow_name(name: str) -> None:
    """Refuse a name that could not be a part of file and table names."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PlanError(f"name={name!r}: a flow's name has letters, digits, '_', '-' and '.' only.")


@dataclass(frozen=True)
class FlowExplanation:
    """How the stateful stages of a flow will be done; prints as text."""

    flow: str
    steps: tuple[StepExplanation, ...]

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"flow": self.flow, "steps": [step.as_dict() for step in self.steps]}

    def text(self) -> str:
        """Lines for a terminal."""
        if not self.steps:
            return f"{self.flow}: no stateful stage; rows go from the source to the sink."
        return "\n\n".join([f"{'flow':<13} {self.flow}", *(step.text() for step in self.steps)])

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


@dataclass(frozen=True)
class Flow(WarehouseStages):
    """A dataflow that is described but does not run yet; made by `stream`, and every method gives a new one."""

    name: str
    _source: DataFrame
    _stages: tuple[Stage, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        """The stateful stages, in order."""
        return tuple(stage for stage in self._stages if isinstance(stage, Step))

    def explanation(self) -> "FlowExplanation":
        """How the flow's stateful stages will be done; what `dovetail.explain` gives."""
        return FlowExplanation(self.name, tuple(step.explanation() for step in self.steps))

    # ================================================================ stages

    def enrich(
        self,
        relation: Any,
        *,
        on: KeyNames | None = None,
        how: str = "inner",
        budget: str | int | Budget = "256MB",
        strategy: str = "auto",
        objective: str = "rate",
        select: str | Sequence[str] | None = None,
        condition: str | Condition | None = None,
        max_delay: str | None = None,
        refresh: Refresh = "query",
    ) -> "Flow":
        """Join with a relation, within a budget.

        Parameters
        ----------
        relation
            A relation, the path of one, or a Spark DataFrame, of which one is built.
        on, how, select, condition, strategy, objective
            As for `dovetail.enrich`.
        budget
            The most bytes that all shards of the operator hold together.
        max_delay
            How long a tuple may wait for the disk: what the cache knows goes out at once, the rest within this span
            plus one trigger, whether more arrives or not. None: everything leaves with its micro-batch.
        refresh
            ``"query"``: the relation's version is the one of the start. ``"batch"``: each micro-batch takes the newest;
            tuples that wait are still joined with the version that they arrived under.

        Raises
        ------
        PlanError
            Naming the column or option at fault and what would work.
        """
        if refresh not in ("query", "batch"):
            raise PlanError(f"refresh={refresh!r} is not known.", hint="Use 'query' or 'batch'.")
        max_delay_ms = None if max_delay is None else parse_duration_ms("max_delay", max_delay)
        here = self._here()
        plan = plan_join(
            here,
            relation_of(here.sparkSession, relation, on, None),
            on=on,
            how=how,
            select=select,
            condition=condition,
            budget=budget,
            strategy=strategy,
            objective=objective,
        )
        return self._then(EnrichStep(self._step_name("enrich"), plan, here, max_delay_ms, refresh))

    def wait_for(
        self,
        relation: Any,
        *,
        on: KeyNames | None = None,
        deadline: str,
        how: Literal["left", "inner"] = "left",
        expired: Sink | None = None,
        select: str | Sequence[str] | None = None,
        condition: str | Condition | None = None,
    ) -> "Flow":
        """Join with a relation whose rows may come later than the tuples that need them: early facts.

        A tuple that finds its row leaves at once. One that does not waits, and is tried again whenever the relation has
        a new version; nothing else waits for it. Rows that wait stay in the checkpoint when the flow ends, also under
        ``"available-now"``.

        Parameters
        ----------
        relation, on, select, condition
            As for `enrich`; each micro-batch takes the relation's newest version.
        deadline
            How long a tuple waits at most, such as ``"10 minutes"``, give or take one trigger.
        how
            What becomes of a tuple that has waited in vain: ``"left"``: NULLs; ``"inner"``: it is dropped.
        expired
            Another sink, to which such tuples go instead, exactly once, with NULLs for the relation's columns.
        """
        if how not in ("left", "inner"):
            raise PlanError(f"how={how!r} is not known.", hint="Use 'left' or 'inner'.")
        if expired is not None:
            _require_sink(expired)
        deadline_ms = parse_duration_ms("deadline", deadline)
        here = self._here()
        opened = relation_of(here.sparkSession, relation, on, None)
        plan = plan_join(here, opened, on=on, how="left", select=select, condition=condition)
        if not plan.has_equality:
            raise PlanError("wait_for joins on equal keys.", hint="Pass on=.")
        return self._then(WaitingStep(self._step_name("wait_for"), plan, here, deadline_ms, how == "left", expired))

    def aggregate_closed(self, aggregates: Mapping[str, str | tuple[str, str]]) -> "Flow":
        """Aggregate the results of a `multi_join` by its join columns; each group comes out once, when it is closed.

        A group is closed when the join has been promised that no later result has its join value (``punctuations=``)
        and all its results are out; the join tells so in its column of notices. Until then the group is a row of this
        step's state. Groups without any result come out, too. Rows without a join value are in no group.

        Parameters
        ----------
        aggregates
            For each column of the result: ``"count"``, of rows; or a pair of ``"count"``, ``"sum"``, ``"min"`` or
            ``"max"`` and a column, such as ``("sum", "price")``. NULLs are left out of these.

        Raises
        ------
        PlanError
            If no join before it tells what is closed, or a column cannot be aggregated like this.
        """
        join = self.steps[-1] if self.steps else None
        return self._then(ClosedGroupsStep(self._step_name("aggregate_closed"), join, self._here(), aggregates))

    def transform(self, function: Callable[[DataFrame], DataFrame]) -> "Flow":
        """Apply any stateless change: ``function`` is given the rows of each micro-batch as a DataFrame, and gives one.

        It is called once per micro-batch and must only describe: an action in it runs a job of its own.
        """
        if not callable(function):
            raise PlanError(f"transform takes a function of a DataFrame, not {function!r}.")
        result = function(self._here())
        if not isinstance(result, DataFrame) or result.isStreaming:
            raise PlanError(
                f"The function of transform gave {type(result).__name__ if result is not None else 'nothing'}.",
                hint="It must give the changed DataFrame that it was given.",
            )
        require_deterministic(result, "a transformation")
        return self._then(function)

    def divert(
        self, where: str, to: Sink, *, columns: Sequence[str] = ("*",), drop: str | Sequence[str] = ()
    ) -> "Flow":
        """Send rows to a sink of their own, before the flow's first operator: exactly once, as the others.

        Parameters
        ----------
        where
            SQL: the rows that leave. A row for which it is NULL stays.
        to
            Where they go.
        columns
            SQL expressions: what that sink gets of them.
        drop
            Columns that the flow goes on without.

        Raises
        ------
        PlanError
            If an operator stands before it, or the SQL has no meaning.
        """
        if any(isinstance(stage, Step) for stage in self._stages):
            raise PlanError(
                "divert stands before the first operator: after one, rows would be computed twice.",
                hint="Move it to the front, or filter in the sink.",
            )
        _require_sink(to)
        dropped = (drop,) if isinstance(drop, str) else tuple(drop)
        diversion = Diversion(where, tuple(columns), dropped, to)
        for rows in (diversion.leaving(self._here()), diversion.staying(self._here())):
            require_deterministic(rows, "a diversion")
        return self._then(diversion)

    def _step_name(self, kind: str) -> str:
        return f"{1 + sum(isinstance(stage, Step) for stage in self._stages)}-{kind}"

    def _then(self, stage: Stage) -> "Flow":
        return replace(self, _stages=(*self._stages, stage))

    def _here(self) -> DataFrame:
        """An empty DataFrame with the columns that the flow has at this point."""
        spark = self._source.sparkSession
        rows = spark.createDataFrame([], self._source.schema)
        for stage in self._stages:
            rows = spark.createDataFrame([], self._after(stage, rows))
        return rows

    @staticmethod
    def _after(stage: Stage, rows: DataFrame) -> T.StructType:
        if isinstance(stage, Step):
            return stage.output
        return (stage.staying(rows) if isinstance(stage, Diversion) else stage(rows)).schema

    def _open_side_sinks(self, store: FlowStore) -> None:
        spark = self._source.sparkSession
        rows, found = spark.createDataFrame([], self._source.schema), []
        for stage in self._stages:
            if isinstance(stage, Diversion):
                found.append((stage.sink, stage.leaving(rows).schema))
            elif isinstance(stage, Step) and stage.side_sink is not None:
                found.append((stage.side_sink, stage.output))
            rows = spark.createDataFrame([], self._after(stage, rows))
        for number, (sink, schema) in enumerate(found):
            place = store.staged_root / f"side-{number}"
            place.mkdir(exist_ok=True)
            sink.open(SinkContext(spark, self.name, schema, place))

    def budgets(self) -> dict[str, int]:
        """The budget of each stateful operator that has one, in bytes, by the operator's name."""
        steps = [stage for stage in self._stages if isinstance(stage, Step)]
        return {step.name: step.budget_bytes for step in steps if step.budget_bytes is not None}

    def write(
        self,
        sink: Sink,
        *,
        checkpoint: str | os.PathLike[str],
        trigger: str | None = None,
        keep_commits: int = 10,
    ) -> FlowQuery:
        """Start the flow, or go on with it where its checkpoint says.

        Parameters
        ----------
        sink
            Where the output goes: one of `dovetail.sinks`.
        checkpoint
            A directory of the flow's own: local or, on a cluster, one that all nodes mount.
        trigger
            How often a micro-batch begins, such as ``"5 seconds"``; ``"available-now"``: take what is there, leave
            nothing waiting, and end. None: as often as possible.
        keep_commits
            How many commits, with the state they name, are kept; at least 2.

        Raises
        ------
        StateError
            If the checkpoint is of another flow, or damaged.
        """
        _require_sink(sink)
        if isinstance(keep_commits, bool) or not isinstance(keep_commits, int) or keep_commits < FEWEST_COMMITS_KEPT:
            raise PlanError(f"keep_commits={keep_commits!r}: a replay needs at least {FEWEST_COMMITS_KEPT}.")
        ends_by_itself = trigger == _AVAILABLE_NOW
        interval_ms = 0 if trigger is None or ends_by_itself else parse_duration_ms("trigger", trigger)
        spark = self._source.sparkSession
        store = FlowStore(checkpoint)
        store.open(FlowFingerprint(self.name, tuple(step.fingerprint() for step in self.steps)))
        for step in self.steps:
            step.open(store)
        sink.open(SinkContext(spark, self.name, self._here().schema, store.staged_root))
        self._open_side_sinks(store)
        protocol = CommitProtocol(self._stages, store, sink, drains_always=ends_by_itself, keep_commits=keep_commits)
        query = FlowQuery(protocol, self.name)
        writer = (
            protocol.input_of(self._source)
            .writeStream.foreachBatch(query.run_batch)
            .queryName(self.name)
            .option("checkpointLocation", str(store.checkpoint))
        )
        if ends_by_itself:
            writer = writer.trigger(availableNow=True)
        else:
            writer = writer.trigger(processingTime=f"{interval_ms} milliseconds")
        query.attach(writer.start())
        return query


def _require_sink(sink: object) -> None:
    if not isinstance(sink, Sink):
        raise PlanError(f"{sink!r} is not a sink.", hint="Use one of dovetail.sinks, such as sinks.parquet(path).")
