"""`enrich`: the join of a streaming or batch DataFrame with a relation, as a DataFrame again."""

import os
import uuid
from collections.abc import Sequence
from typing import Literal

from pyspark.sql import DataFrame

from dovetail.errors import BudgetError, PlanError
from dovetail.memory import Budget, format_bytes
from dovetail.operators.conditions import Condition
from dovetail.operators.spec import KeyNames, require_positive
from dovetail.relation import Disk, IoMode, Relation
from dovetail.spark.built_relations import relation_of
from dovetail.spark.enrich_task import CACHED_STRATEGIES, EnrichTask, LookupTask, OperatorTask, Refresh, make_operator
from dovetail.spark.explain import register
from dovetail.spark.join_plan import JoinPlan, Routing, plan_join
from dovetail.spark.observed import observed, with_metrics
from dovetail.spark.pins import check_can_pin

__all__ = ["Route", "enrich"]

Route = Literal["lookup", "shards"]


def enrich(
    df: DataFrame,
    relation: Relation | str | os.PathLike[str] | DataFrame,
    on: KeyNames | None = None,
    how: str = "inner",
    *,
    select: str | Sequence[str] | None = None,
    condition: str | Condition | None = None,
    strategy: str = "auto",
    budget: str | int | Budget = "256MB",
    shards: int | None = None,
    objective: str = "rate",
    ordered: bool = False,
    refresh: str = "query",
    io: IoMode | Disk = "map",
    metrics: str | None = None,
) -> DataFrame:
    """Join a DataFrame with a relation: a drop-in for ``df.join(static, on, how)``.

    Works on streaming and batch DataFrames, before and after any other operation of Spark's. Every micro-batch is
    complete when it ends, as with Spark's own join; there is no state. Columns, their order, types, nullability and
    metadata are those of ``df.join(relation, on=[...])``.

    Parameters
    ----------
    df
        The stream.
    relation
        A `Relation`, the path of one, or a Spark DataFrame, of which a relation is built once and then reused as long
        as the application runs.
    on
        The key: a name or names that both sides have; names of the stream's, in the order of the relation's key; or a
        mapping from stream to relation names. None: the relation's key. An empty list: no equality, `condition` says it
        all (inner joins only).
    how
        ``"inner"``, ``"left"``, ``"semi"`` or ``"anti"``.
    select
        The relation's columns to put out besides the key, in this order; None: all.
    condition
        What must hold besides the equality of the key: a condition object of `dovetail.operators`, or comparisons
        between columns of both sides joined by AND, such as ``"valid_from <= ts AND ts < valid_to"``.
    strategy
        ``"auto"``: by index and without a shuffle where every worker can map the relation, else the operator `auto` on
        shuffled shards. ``"mesh"``, ``"hybrid"``, ``"balanced"`` or ``"index_nested_loop"``: that operator on shards.
    budget
        The most memory that the join may hold, all shards together.
    shards
        How many shards to build of a DataFrame; a relation has the number that it was built with.
    objective
        ``"rate"``: serve as much as the budget allows. ``"memory"``: hold as little as the stream needs.
    ordered
        Not on Spark: no shuffle keeps an arrival order.
    refresh
        ``"query"``: join with the version that the relation has now. ``"batch"``: let each micro-batch see the version
        that is the newest when it starts; all its tasks, and a replay of it, see the same one.
    io
        How the relation is read: ``"map"``, ``"buffered"``, ``"direct"``, or a simulated disk.
    metrics
        A name under which Spark reports what the join did, in ``observedMetrics`` of the progress of a query: tuples
        in, matched, unmatched and without a key, rows out, cache hits and negative hits, pairs rejected, the relation's
        version. A query can have a name once.

    Raises
    ------
    PlanError
        The request cannot be: names the column or option and what would work.
    BudgetError
        The budget is below the minimum that this join needs; says the minimum.
    RelationError
        The relation cannot be opened.
    """
    if ordered:
        raise PlanError(
            "ordered=True is not possible on Spark: the rows of a DataFrame have no arrival order.",
            hint="Sort the result by a column, or use the operators of dovetail.operators directly.",
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
        io=io,
    )
    if refresh == "batch":
        check_can_pin(opened)
    task, routing = _task(plan, "batch" if refresh == "batch" else "query")
    task.reports_metrics = metrics is not None
    register(task, plan)
    prepared = plan.prepare(df, routing)
    if metrics is None:
        return plan.finish(prepared.mapInArrow(task, plan.mapped_schema))
    return plan.finish(observed(prepared.mapInArrow(task, with_metrics(plan.mapped_schema)), metrics))


def is_mapped_by_every_worker(relation: Relation) -> bool:
    """Whether tasks map the relation's files instead of fetching them."""
    return relation.filesystem is None


def _task(plan: JoinPlan, refresh: Refresh) -> tuple[EnrichTask, Routing]:
    """What runs in the tasks, and where the rows of the stream have to go for it."""
    name = f"dovetail_enrich_{uuid.uuid4().hex[:12]}"
    if plan.strategy == "auto" and plan.has_equality and is_mapped_by_every_worker(plan.relation):
        return LookupTask(plan.recipe, refresh, name, plan.budget), "none"
    strategy = plan.strategy if plan.has_equality else "mesh"
    shard_budget = Budget(max(1, plan.budget.total_bytes // plan.recipe.num_shards))
    task = OperatorTask(plan.recipe, refresh, name, strategy, plan.objective, shard_budget)
    _check_budget(plan, task)
    return task, "shard" if plan.has_equality else "replicate"


def _check_budget(plan: JoinPlan, task: OperatorTask) -> None:
    """Refuse a budget that is too small for some shard now, not in the middle of a stream."""
    recipe, sizes = plan.recipe, [shard.rows for shard in plan.relation.stats.shards]
    largest = sizes.index(max(sizes))
    shard = task.open_shard(plan.relation, largest)
    # With a shared cache the operator has half; whether there will be one, only tasks know.
    parts = 2 if task.strategy in CACHED_STRATEGIES else 1
    budget = Budget(max(1, task.shard_budget.total_bytes // parts))
    try:
        make_operator(task.strategy, recipe.spec(shard, plan.stream_schema, budget), task.objective)
    except BudgetError as error:
        shards = recipe.num_shards
        minimum = None if error.minimum_bytes is None else error.minimum_bytes * shards * parts
        raise BudgetError(
            f"budget={format_bytes(plan.budget.total_bytes)} leaves {task.shard_budget.total_bytes} bytes for each of "
            f"the relation's {shards} shards. {error.message}",
            hint=None if minimum is None else f"Pass a budget of at least {minimum} bytes ({format_bytes(minimum)}).",
            minimum_bytes=minimum,
        ) from None
