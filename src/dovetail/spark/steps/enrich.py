"""`enrich`: the join of a streaming or batch DataFrame with a relation, as a DataFrame again."""

import os
import uuid
from collections.abc import Sequence
from typing import Literal, cast

from pyspark.sql import DataFrame

from dovetail.core.errors import BudgetError, PlanError
from dovetail.core.memory import Budget, format_bytes
from dovetail.costs.explain import Objective, Strategy
from dovetail.joins.conditions import Condition
from dovetail.joins.fitting import Fitted, RateFitting
from dovetail.joins.spec import KeyNames, require_positive
from dovetail.relation import Disk, IoMode, Relation
from dovetail.runtime.enrich import CACHED_STRATEGIES, EnrichTask, LookupTask, OperatorTask, Refresh
from dovetail.runtime.pins import check_can_pin
from dovetail.runtime.process_pins import pin_for_this_process
from dovetail.spark.plan.built_relations import relation_of
from dovetail.spark.plan.join_plan import JoinName, JoinPlan, Routing, plan_join
from dovetail.spark.plan.keys_only import KeysOnlyPlan, reason_to_send_rows
from dovetail.spark.plan.micro_batch import current_micro_batch
from dovetail.spark.plan.observed import observed, with_metrics
from dovetail.spark.steps.explain import register

__all__ = ["Route", "enrich"]

Route = Literal["lookup", "shards"]


def enrich(
    df: DataFrame,
    relation: Relation | str | os.PathLike[str] | DataFrame,
    on: KeyNames | None = None,
    how: JoinName = "inner",
    *,
    select: str | Sequence[str] | None = None,
    condition: str | Condition | None = None,
    strategy: Strategy = "auto",
    budget: str | int | Budget = "256MB",
    shards: int | None = None,
    objective: Objective = "rate",
    rate: float | None = None,
    ordered: bool = False,
    refresh: Literal["query", "batch"] = "query",
    io: IoMode | Disk = "map",
    metrics: str | None = None,
) -> DataFrame:
    """Join a DataFrame with a relation: a drop-in for ``df.join(static, on, how)``.

    Works on streaming and batch DataFrames, before and after any other Spark operation. Every micro-batch is complete
    when it ends, as with Spark's own join; there is no state. Columns, their order, types, nullability and metadata are
    those of ``df.join(relation, on=[...])``.

    Parameters
    ----------
    df
        The stream.
    relation
        A `Relation`, its path, or a Spark DataFrame, from which a relation is built once per application.
    on
        The key: one or several names that both sides have; stream columns in the order of the relation's key; or a
        mapping from stream to relation names. None: the relation's key. An empty list: no equality, only `condition`
        (inner joins only).
    how
        ``"inner"``, ``"left"``, ``"semi"`` or ``"anti"``.
    select
        The relation's columns to return besides the key, in this order; None: all.
    condition
        An additional condition: a condition object of `dovetail.joins`, or comparisons between columns of both sides
        joined by AND, such as ``"valid_from <= ts AND ts < valid_to"``.
    strategy
        ``"auto"``: lookups without a shuffle if every worker can map the relation, else the operator `auto` on shuffled
        shards. ``"lookup"``: lookups. ``"mesh"``, ``"hybrid"``, ``"balanced"`` or ``"index_nested_loop"``: that
        operator on shards.
    budget
        The maximum memory of the join, over all shards.
    shards
        The number of shards of a relation built from a DataFrame.
    objective
        ``"rate"``: the highest rate within the budget. ``"memory"``: the least memory that the stream needs, with
        ``mesh``, ``balanced`` or ``auto`` on shards.
    rate
        With ``objective="memory"``, the tuples per second to serve: the operators get the least memory that the cost
        model considers enough, at most the budget.
    ordered
        Not supported on Spark: no shuffle keeps the arrival order.
    refresh
        ``"query"``: join with the relation's current version. ``"batch"``: each micro-batch uses the newest version at
        its start; all its tasks, and a replay, use the same one.
    io
        How the relation is read: ``"map"``, ``"buffered"``, ``"direct"``, or a simulated disk.
    metrics
        The name of metrics in ``observedMetrics`` of the query's progress: tuples in, matched, unmatched and without a
        key, rows out, cache hits and negative hits, pairs rejected, the relation's version. Unique per query.

    Raises
    ------
    PlanError
        The request is invalid; names the column or option and what would work.
    BudgetError
        The budget is below the minimum of this join; names the minimum.
    RelationError
        The relation cannot be opened.
    """
    if not hasattr(df, "sparkSession"):
        raise PlanError(
            f"enrich takes a DataFrame first, and then what to join it with; the first is a {type(df).__name__}.",
            hint="Write enrich(df, relation, on=...).",
        )
    if ordered:
        raise PlanError(
            "ordered=True is not possible on Spark: the rows of a DataFrame have no arrival order.",
            hint="Sort the result by a column, or use the operators of dovetail.joins directly.",
        )
    if refresh not in ("query", "batch"):
        raise PlanError(f"refresh={refresh!r} is not known.", hint='Use "query" or "batch".')
    require_positive("shards", shards)
    opened = relation_of(df.sparkSession, relation, on, shards)
    plan = plan_join(
        df,
        opened,
        on=on,
        how=how,
        select=select,
        condition=condition,
        budget=budget,
        strategy=strategy,
        objective=objective,
        rate=rate,
        io=io,
    )
    if refresh == "batch":
        check_can_pin(opened)
    else:
        pin_for_this_process(opened)
    refreshed: Refresh = "batch" if refresh == "batch" else "query"
    task, routing = _task(plan, refreshed)
    task.reports_metrics = metrics is not None
    why_rows = rows_must_travel(plan, refreshed) if routing == "none" else None
    if routing == "none" and why_rows is None:
        keys = KeysOnlyPlan(plan)
        lookup = keys.task(cast(LookupTask, task), df.sparkSession)
        register(lookup, plan)
        return keys.join(df, lookup, metrics)
    register(task, plan, why_rows)
    prepared = plan.prepare(df, routing)
    if metrics is None:
        return plan.finish(prepared.mapInArrow(task, plan.mapped_schema))
    return plan.finish(observed(prepared.mapInArrow(task, with_metrics(plan.mapped_schema)), metrics))


def is_mapped_by_every_worker(relation: Relation) -> bool:
    """Whether tasks map the relation's files instead of fetching them."""
    return relation.filesystem is None


def is_by_lookup(plan: JoinPlan) -> bool:
    """Whether tasks look up their own rows without a shuffle: they can map R, and no other strategy was requested."""
    if not plan.has_equality or not is_mapped_by_every_worker(plan.relation):
        return False
    return plan.strategy == "lookup" or (plan.strategy == "auto" and plan.objective == "rate")


def rows_must_travel(plan: JoinPlan, refresh: Refresh) -> str | None:
    """Why tasks get whole rows of the stream, and not only keys; None if keys suffice."""
    return reason_to_send_rows(plan, refresh)


def _task(plan: JoinPlan, refresh: Refresh) -> tuple[EnrichTask, Routing]:
    """The function to run in tasks, and how it needs the stream's rows distributed."""
    name = f"dovetail_enrich_{uuid.uuid4().hex[:12]}"
    if is_by_lookup(plan):
        lookup = LookupTask(plan.recipe, refresh, name, current_micro_batch, plan.budget, tasks=plan.tasks)
        check_lookup_budget(plan, lookup)
        return lookup, "none"
    shard_budget = Budget(max(1, plan.budget.total_bytes // plan.recipe.num_shards))
    task = OperatorTask(plan.recipe, refresh, name, current_micro_batch, plan.strategy, plan.objective, shard_budget)
    _check_budget(plan, task)
    task.fitted = fitted_to_rate(plan, task)
    return task, "shard" if plan.has_equality else "replicate"


def fitted_to_rate(plan: JoinPlan, task: OperatorTask) -> Fitted | None:
    """The memory that a shard needs for its part of the requested rate; None if no rate was requested."""
    if plan.rate is None:
        return None
    shard = task.open_largest_shard(plan.relation)
    operator = task.operator(plan.recipe.spec(shard, plan.stream_schema, task.shard_budget))
    # Without equal keys every shard sees every tuple.
    rate = plan.rate / plan.recipe.num_shards if plan.has_equality else plan.rate
    try:
        return RateFitting(plan.strategy, operator, plan.recipe.factors(shard)).for_rate(rate)
    except BudgetError:
        return None  # the budget is too small for a choice


def check_lookup_budget(plan: JoinPlan, task: LookupTask) -> None:
    """Refuse a budget that is too small for a task now, not in the middle of a stream."""
    reader = plan.relation.reader(plan.recipe.relation_columns, plan.recipe.io)
    try:
        task.join(reader, plan.stream_schema)
    except BudgetError as error:
        raise _too_small(error, plan, task.task_budget(), f"{task.tasks} tasks", task.tasks) from None


def _too_small(error: BudgetError, plan: JoinPlan, part: Budget, parts: str, factor: int) -> BudgetError:
    minimum = None if error.minimum_bytes is None else error.minimum_bytes * factor
    return BudgetError(
        f"budget={format_bytes(plan.budget.total_bytes)} leaves {part.total_bytes} bytes for each of {parts}. "
        f"{error.message}",
        hint=None if minimum is None else f"Pass a budget of at least {minimum} bytes ({format_bytes(minimum)}).",
        minimum_bytes=minimum,
    )


def _check_budget(plan: JoinPlan, task: OperatorTask) -> None:
    """Refuse a budget that is too small for a shard now, not in the middle of a stream."""
    recipe = plan.recipe
    shard = task.open_largest_shard(plan.relation)
    # With a shared cache the operator has half of the budget; only tasks know whether there is one.
    parts = 2 if task.strategy in CACHED_STRATEGIES else 1
    budget = Budget(max(1, task.shard_budget.total_bytes // parts))
    try:
        task.operator(recipe.spec(shard, plan.stream_schema, budget))
    except BudgetError as error:
        shards = recipe.num_shards
        told = f"the relation's {shards} shards"
        raise _too_small(error, plan, task.shard_budget, told, shards * parts) from None
