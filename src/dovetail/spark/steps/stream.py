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

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T

from dovetail.core.durations import parse_duration_ms
from dovetail.core.errors import PlanError
from dovetail.core.memory import Budget
from dovetail.core.notebook import html_text
from dovetail.costs.explain import Objective, Strategy
from dovetail.joins.conditions import Condition
from dovetail.joins.options import FlowOptions
from dovetail.joins.shedding import SheddingPolicy
from dovetail.joins.spec import KeyNames
from dovetail.spark.flow.commit import CommitProtocol
from dovetail.spark.flow.description import describe_flow
from dovetail.spark.flow.fingerprint import FlowFingerprint, saved_operators
from dovetail.spark.flow.job_settings import set_for_a_while, stream_settings
from dovetail.spark.flow.query import FlowQuery
from dovetail.spark.flow.recording import FlowRecorder
from dovetail.spark.flow.resume import resume
from dovetail.spark.flow.sink import Sink, SinkContext
from dovetail.spark.flow.stages import Diversion, Stage, Transformation
from dovetail.spark.flow.step import Step, StepExplanation
from dovetail.spark.flow.store import FEWEST_COMMITS_KEPT, FlowStore
from dovetail.spark.flow.workers import require_shared_checkpoint
from dovetail.spark.plan.built_relations import is_dataframe, relation_of
from dovetail.spark.plan.determinism import require_deterministic
from dovetail.spark.plan.join_plan import JoinName, plan_join
from dovetail.spark.steps.aggregate_closed import ClosedGroupsStep
from dovetail.spark.steps.flow_enrich import EnrichStep, Refresh
from dovetail.spark.steps.wait_for import WaitingStep
from dovetail.spark.steps.warehouse import WarehouseStages
from dovetail.storage.running import RunnerLock

__all__ = ["Flow", "FlowExplanation", "require_flow_name", "stream"]

ShedName = Literal["random", "oldest", "least_joined"]
_AVAILABLE_NOW = "available-now"
_NAME = re.compile(r"[\w.-]+")
_UNNAMED = "flow"


def stream(df: DataFrame, name: str = _UNNAMED) -> "Flow":
    """Start a flow from a streaming DataFrame.

    Parameters
    ----------
    df
        A streaming DataFrame. Expressions with other values when computed again (``rand``, ``uuid``) are refused: a
        replay must see the same rows.
    name
        The flow's name: letters, digits, ``_``, ``-`` and ``.``. Its checkpoint belongs to this name, so that a flow
        with another name cannot use it by mistake. Set it if a session runs several flows.
    """
    if not isinstance(df, DataFrame) or not df.isStreaming:
        raise PlanError(
            "A flow begins with a streaming DataFrame.", hint="For a batch DataFrame use dovetail.enrich, or Spark."
        )
    require_flow_name(name)
    require_deterministic(df, "the input")
    return Flow(name, df, ())


def require_flow_name(name: str) -> None:
    """Refuse a name that cannot be part of file and table names."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise PlanError(f"name={name!r}: a flow's name has letters, digits, '_', '-' and '.' only.")


@dataclass(frozen=True)
class FlowExplanation:
    """How the stateful stages of a flow will run; prints as text."""

    flow: str
    steps: tuple[StepExplanation, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-serializable."""
        return {"flow": self.flow, "steps": [step.as_dict() for step in self.steps]}

    def text(self) -> str:
        """Lines for a terminal."""
        if not self.steps:
            return f"{self.flow}: no stateful stage; rows go from the source to the sink."
        return "\n\n".join([f"{'flow':<13} {self.flow}", *(step.text() for step in self.steps)])

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_text(self.text())


@dataclass(frozen=True, repr=False)
class Flow(WarehouseStages):
    """A dataflow that is described but not running; made by `stream`. Every method returns a new one."""

    name: str
    _source: DataFrame
    _stages: tuple[Stage, ...]
    _labels: tuple[str, ...] = ()  # what its sources are called where people look at the flow

    @property
    def steps(self) -> tuple[Step, ...]:
        """The stateful stages, in order."""
        return tuple(stage for stage in self._stages if isinstance(stage, Step))

    def explanation(self) -> "FlowExplanation":
        """How the stateful stages will run; see `dovetail.explain`."""
        return FlowExplanation(self.name, tuple(step.explanation() for step in self.steps))

    def __repr__(self) -> str:
        """Its stages and columns, without starting or measuring anything."""
        stages = [stage.name if isinstance(stage, Step) else type(stage).__name__.lower() for stage in self._stages]
        return f"Flow({self.name!r}: {' -> '.join(['source', *stages])}; columns {', '.join(self._schema.names)})"

    def _repr_html_(self) -> str:
        return html_text(repr(self))

    # ================================================================ stages

    def enrich(
        self,
        relation: Any,
        *,
        on: KeyNames | None = None,
        how: JoinName = "inner",
        budget: str | int | Budget = "256MB",
        strategy: Strategy = "auto",
        objective: Objective = "rate",
        rate: float | None = None,
        select: str | Sequence[str] | None = None,
        condition: str | Condition | None = None,
        max_delay: str | None = None,
        refresh: Refresh = "query",
        shed: ShedName | SheddingPolicy | None = None,
        shed_to: Sink | None = None,
    ) -> "Flow":
        """Join with a relation, within a budget.

        Parameters
        ----------
        relation
            A relation, its path, or a Spark DataFrame, from which a relation is built when the flow is described and
            kept in the checkpoint. If the DataFrame has other rows at the next start, they are a new version.
        on, how, select, condition, strategy, objective
            As for `dovetail.enrich`.
        budget
            The maximum bytes that all shards of the operator hold.
        max_delay
            How long a tuple may wait for the disk: cache hits are emitted at once, the rest within this time plus one
            trigger, whether or not more arrives. None: everything is emitted in its micro-batch; then, unless
            `strategy` says otherwise, every task looks up its own rows, without a shuffle and without state.
        refresh
            ``"query"``: the relation's version at the start. ``"batch"``: each micro-batch uses the newest; waiting
            tuples are still joined with the version they arrived under.
        rate
            With ``objective="memory"``, the tuples per second to serve, all shards together. None: the observed rate,
            which the memory follows between micro-batches.
        shed
            What to drop when more arrives than may wait: ``"random"`` (half of what finds no room), ``"oldest"``,
            ``"least_joined"``, or a policy of `dovetail.operators`. Counted per policy in ``totals.shed`` of the
            progress. None: nothing is dropped; the scan continues until there is room.
        shed_to
            A sink for the dropped rows, as they arrived, exactly once.

        Raises
        ------
        PlanError
            Names the column or option at fault and what would work.
        """
        if refresh not in ("query", "batch"):
            raise PlanError(f"refresh={refresh!r} is not known.", hint="Use 'query' or 'batch'.")
        max_delay_ms = None if max_delay is None else parse_duration_ms("max_delay", max_delay)
        if shed_to is not None:
            _require_sink(shed_to)
        here, name = self._here(), self._step_name("enrich")

        def step(shards: int | None) -> EnrichStep:
            plan = plan_join(
                here,
                relation_of(here.sparkSession, relation, on, shards),
                on=on,
                how=how,
                select=select,
                condition=condition,
                budget=budget,
                strategy=strategy,
                objective=objective,
                rate=rate,
                flow=FlowOptions(max_delay, shed, shed_to is not None),
            )
            return EnrichStep(
                name, plan, here, max_delay_ms, refresh, shed_to, step if is_dataframe(relation) else None
            )

        return self._then(step(None))

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
        """Join with a relation whose rows may arrive later than the tuples that need them: early facts.

        A tuple that finds its row is emitted at once. Another waits, and is tried again whenever the relation has a new
        version; nothing else waits for it. Waiting rows stay in the checkpoint when the flow ends, also under
        ``"available-now"``.

        Parameters
        ----------
        relation, on, select, condition
            As for `enrich`; each micro-batch uses the relation's newest version.
        deadline
            The longest wait of a tuple, such as ``"10 minutes"``, give or take one trigger.
        how
            What to do with a tuple after the deadline: ``"left"``: emit it with NULLs; ``"inner"``: drop it.
        expired
            Another sink that gets such tuples instead, exactly once, with NULLs for the relation's columns.
        """
        if how not in ("left", "inner"):
            raise PlanError(f"how={how!r} is not known.", hint="Use 'left' or 'inner'.")
        if expired is not None:
            _require_sink(expired)
        deadline_ms = parse_duration_ms("deadline", deadline)
        here, name = self._here(), self._step_name("wait_for")

        def step(shards: int | None) -> WaitingStep:
            opened = relation_of(here.sparkSession, relation, on, shards)
            plan = plan_join(here, opened, on=on, how="left", select=select, condition=condition)
            if not plan.has_equality:
                raise PlanError("wait_for joins on equal keys.", hint="Pass on=.")
            rebuilt = step if is_dataframe(relation) else None
            return WaitingStep(name, plan, here, deadline_ms, how == "left", expired, rebuilt)

        return self._then(step(None))

    def aggregate_closed(self, aggregates: Mapping[str, str | tuple[str, str]]) -> "Flow":
        """Aggregate the results of a `multi_join` by its join columns; each group is emitted once, when it is closed.

        A group is closed when the join has been promised that no later result has its join value (``punctuations=``)
        and all its results are emitted; the join reports this in its column of notices. Until then the group is a row
        of this step's state. Groups without any result are emitted, too. Rows without a join value are in no group.

        Parameters
        ----------
        aggregates
            For each output column: ``"count"`` of rows; or a pair of ``"count"``, ``"sum"``, ``"min"`` or ``"max"`` and
            a column, such as ``("sum", "price")``. NULLs are left out of these.

        Raises
        ------
        PlanError
            If no join before it reports what is closed, or a column cannot be aggregated like this.
        """
        join = self.steps[-1] if self.steps else None
        return self._then(ClosedGroupsStep(self._step_name("aggregate_closed"), join, self._here(), aggregates))

    def transform(self, function: Callable[[DataFrame], DataFrame]) -> "Flow":
        """Apply any stateless change: ``function`` takes the rows of each micro-batch as a DataFrame and returns one.

        It is called once here, with no rows, and once per micro-batch. It must only describe: an action in it runs a
        job of its own.
        """
        if not callable(function):
            raise PlanError(f"transform takes a function of a DataFrame, not {function!r}.")
        result = function(self._here())
        if not isinstance(result, DataFrame) or result.isStreaming:
            raise PlanError(
                f"The function of transform returned {type(result).__name__ if result is not None else 'nothing'}.",
                hint="It must return the changed DataFrame.",
            )
        require_deterministic(result, "a transformation")
        return self._then(Transformation(function, result.schema))

    def divert(
        self, where: str, to: Sink, *, columns: Sequence[str] = ("*",), drop: str | Sequence[str] = ()
    ) -> "Flow":
        """Send rows to another sink, before the flow's first operator: exactly once, like the others.

        Parameters
        ----------
        where
            SQL: the rows that leave. A row for which it is NULL stays.
        to
            The other sink.
        columns
            SQL expressions: the columns that this sink gets.
        drop
            Columns that the flow continues without.

        Raises
        ------
        PlanError
            If an operator is before it, or the SQL is invalid.
        """
        if any(isinstance(stage, Step) for stage in self._stages):
            raise PlanError(
                "divert must come before the first operator: after one, rows would be computed twice.",
                hint="Move it to the front, or filter in the sink.",
            )
        _require_sink(to)
        dropped = (drop,) if isinstance(drop, str) else tuple(drop)
        diversion, here = Diversion(where, tuple(columns), dropped, to), self._here()
        leaving, staying = diversion.leaving(here), diversion.staying(here)
        for rows in (leaving, staying):
            require_deterministic(rows, "a diversion")
        return self._then(replace(diversion, diverted=leaving.schema, output=staying.schema))

    def _with_columns(self, function: Callable[[DataFrame], DataFrame]) -> "Flow":
        """With columns that ``function`` adds: to the source if nothing is before, since a transformation costs a plan
        per micro-batch, and adaptive planning.
        """
        if self._stages:
            return self._then(Transformation(function, function(self._here()).schema))
        return replace(self, _source=function(self._source))

    def _step_name(self, kind: str) -> str:
        return f"{1 + sum(isinstance(stage, Step) for stage in self._stages)}-{kind}"

    def _then(self, stage: Stage) -> "Flow":
        return replace(self, _stages=(*self._stages, stage))

    def _here(self) -> DataFrame:
        """An empty DataFrame with the flow's columns at this point."""
        return self._source.sparkSession.createDataFrame([], self._schema)

    @property
    def _schema(self) -> T.StructType:
        return self._stages[-1].output if self._stages else self._source.schema

    def _open_side_sinks(self, store: FlowStore) -> None:
        spark, found = self._source.sparkSession, []
        for stage in self._stages:
            if isinstance(stage, Diversion):
                found.append((stage.sink, stage.diverted))
            elif isinstance(stage, Step) and stage.side_sink is not None:
                found.append((stage.side_sink, stage.side_schema))
        for number, (sink, schema) in enumerate(found):
            place = f"side-{number}"
            (store.staged_root / place).mkdir(exist_ok=True)
            sink.open(SinkContext(spark, self.name, schema, store.staged_root / place, place))

    def _as_saved(self, store: FlowStore, resume_from: str | os.PathLike[str] | None) -> "Flow":
        """With the checkpoint's values of what the user left open; unchanged for a new checkpoint."""
        operators = saved_operators(store.root)
        if not operators and resume_from is not None:
            operators = saved_operators(FlowStore(resume_from).root)
        saved = {operator["name"]: operator for operator in operators}
        return replace(
            self,
            _stages=tuple(
                stage.as_saved(saved[stage.name]) if isinstance(stage, Step) and stage.name in saved else stage
                for stage in self._stages
            ),
        )

    def budgets(self) -> dict[str, int]:
        """The budget in bytes of each stateful operator that has one, by the operator's name."""
        steps = [stage for stage in self._stages if isinstance(stage, Step)]
        return {step.name: step.budget_bytes for step in steps if step.budget_bytes is not None}

    def write(
        self,
        sink: Sink,
        *,
        checkpoint: str | os.PathLike[str],
        trigger: str | None = None,
        keep_commits: int = 10,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> FlowQuery:
        """Start the flow, or continue it from its checkpoint.

        Parameters
        ----------
        sink
            One of `dovetail.sinks`.
        checkpoint
            A directory for this flow only: local or, on a cluster, one that all nodes mount.
        trigger
            How often a micro-batch starts, such as ``"5 seconds"``; ``"available-now"``: process what is there, leave
            nothing waiting, and end. None: as often as possible.
        keep_commits
            How many commits are kept, with their state; at least 2.
        resume_from
            The checkpoint of an older form of this flow, stopped with ``stop(drain=True)``: `checkpoint`, a new
            directory, continues with its source offsets, batch numbers and the state of every unchanged step. Steps and
            columns may come and go; a step that is changed or gone must hold no rows. The sources and their order stay.
            The old checkpoint is refused from then on.

        Raises
        ------
        StateError
            If the checkpoint belongs to another flow, or is damaged.
        """
        _require_sink(sink)
        if isinstance(keep_commits, bool) or not isinstance(keep_commits, int) or keep_commits < FEWEST_COMMITS_KEPT:
            raise PlanError(f"keep_commits={keep_commits!r}: a replay needs at least {FEWEST_COMMITS_KEPT}.")
        ends_by_itself = trigger == _AVAILABLE_NOW
        interval_ms = 0 if trigger is None or ends_by_itself else parse_duration_ms("trigger", trigger)
        spark = self._source.sparkSession
        store = FlowStore(checkpoint)
        lock = RunnerLock(store.checkpoint, "query")
        try:
            _require_free_name(spark, self.name)
            flow = self._as_saved(store, resume_from)
            fingerprint = FlowFingerprint(self.name, tuple(step.fingerprint() for step in flow.steps))
            if resume_from is not None:
                resume(store, os.fspath(resume_from), fingerprint, flow.steps)
            store.open(fingerprint)
            require_shared_checkpoint(spark, store)
            for step in flow.steps:
                step.open(store)
            sink.open(SinkContext(spark, self.name, self._schema, store.staged_root))
            self._open_side_sinks(store)
            protocol = CommitProtocol(
                flow._stages, store, sink, drains_always=ends_by_itself, keep_commits=keep_commits
            )
            protocol.start()
            recorder = FlowRecorder(store.root, self.name)
            query = FlowQuery(protocol, self.name, lock, recorder)
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
            picture = describe_flow(flow._stages, sink, self._labels)
            recorder.started({"trigger": trigger, "budgets": self.budgets(), "picture": picture})
            try:
                with set_for_a_while(spark, stream_settings(self._source)):
                    query.attach(writer.start())
            except BaseException as error:
                recorder.ended(error)
                raise
        except BaseException:
            lock.release()
            raise
        return query


def _require_free_name(spark: SparkSession, name: str) -> None:
    """Spark refuses a second query of a name, but only after the flow has taken its checkpoint and its target."""
    if any(query.name == name for query in spark.streams.active):
        raise PlanError(
            f"A query named {name!r} already runs in this Spark session.",
            hint="Stop it first, or give this flow another name and a checkpoint of its own.",
        )


def _require_sink(sink: object) -> None:
    if not isinstance(sink, Sink):
        raise PlanError(f"{sink!r} is not a sink.", hint="Use one of dovetail.sinks, such as sinks.parquet(path).")
