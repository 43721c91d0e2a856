"""`explain`: how a DataFrame made by `enrich` will be computed, for people and for programs.

The functions that `enrich` passes to Spark have unique names, which Spark keeps in its plans. So the joins of any
DataFrame derived from an enriched one are found by the text of its plan.
"""

import re
import threading
from collections import OrderedDict
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from dovetail.core.errors import PlanError
from dovetail.core.memory import Budget, format_bytes
from dovetail.core.notebook import html_text
from dovetail.costs.explain import Plan
from dovetail.runtime.enrich import EnrichTask, LookupTask, OperatorTask
from dovetail.runtime.keys_only import KeysOnlyTask
from dovetail.runtime.lookup_times import LookupTimes, measure_lookups
from dovetail.spark.plan.join_plan import JoinPlan

__all__ = ["Explanation", "JoinExplanation", "explain", "explained", "register"]

BATCH_SIZES = (1_000, 10_000, 100_000, 1_000_000)
_MARKER = re.compile(r"dovetail_enrich_[0-9a-f]{12}")
_MOST_PLANS = 1_000
_PLANS: OrderedDict[str, tuple[EnrichTask | KeysOnlyTask, JoinPlan, str | None]] = OrderedDict()
_LOCK = threading.Lock()

_TRANSFER_S = {"rows": 350e-9, "keys": 240e-9}
"""Cost of moving a tuple to Python and back on one core: the ceilings of mapInArrow and of an Arrow UDF."""


_TRANSFERS = {
    "rows": "whole rows of the stream go to Python and back",
    "keys": "keys go to Python, the relation's columns come back",
}


@dataclass(frozen=True)
class JoinExplanation:
    """One join of a DataFrame; sizes are in bytes, over all shards."""

    relation: str
    version: int
    relation_rows: int
    relation_bytes: int
    shards: int
    on: list[tuple[str, str]]
    how: str
    condition: str | None
    strategy: str
    route: str  # "lookup": tasks look up their own rows; "shards": shuffled; "every shard": each row goes to all
    refresh: str
    budget_bytes: int
    memory_bytes: dict[str, int]  # per component
    tuples_per_second: float  # predicted on one core, with the transfer to Python and back
    join_ms: dict[int, float]  # predicted for the join alone, by distinct tuples in a micro-batch, over all tasks
    why: str
    rate: float | None = None  # that the memory was fitted to, all shards together; None: none, or as observed
    plan: Plan | None = field(default=None, compare=False)  # the cost model's view of one shard's operator
    transfer: str = "rows"  # what travels to Python: whole "rows" of the stream, or only "keys"

    def as_dict(self) -> dict[str, Any]:
        """JSON-serializable."""
        known = asdict(self)
        known["on"] = [list(pair) for pair in self.on]
        known["join_ms"] = {str(size): ms for size, ms in self.join_ms.items()}
        known["plan"] = None if self.plan is None else self.plan.as_dict()
        return known

    def text(self) -> str:
        """Lines for a terminal."""
        pairs = " and ".join(mine if mine == theirs else f"{mine} = {theirs}" for mine, theirs in self.on)
        lines = [
            ("relation", f"{self.relation}, version {self.version} ({self.refresh})"),
            ("size", f"{self.relation_rows:,} rows, {format_bytes(self.relation_bytes)}, {self.shards} shards"),
            ("join", f"{self.how} on {pairs or 'nothing'}" + (f" where {self.condition}" if self.condition else "")),
            ("strategy", self.strategy),
            ("route", self.route),
            ("transfer", _TRANSFERS[self.transfer]),
            ("budget", format_bytes(self.budget_bytes)),
            *((f"  {name}", format_bytes(size)) for name, size in self.memory_bytes.items() if size),
            ("predicted", f"{self.tuples_per_second:,.0f} tuples/s on one core"),
            ("join alone", ", ".join(f"{ms:,.1f} ms for {size:,}" for size, ms in self.join_ms.items()) + " tuples"),
            *([] if self.rate is None else [("fitted to", f"{self.rate:,.0f} tuples/s, all shards together")]),
            *([] if self.plan is None else [("binds", self.plan.binds)]),
            ("why", self.why),
        ]
        return "\n".join(f"{name:<14} {value}" for name, value in lines)


@dataclass(frozen=True)
class Explanation:
    """All joins of a DataFrame made by `enrich`, outermost first; prints as text."""

    joins: tuple[JoinExplanation, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-serializable."""
        return {"joins": [join.as_dict() for join in self.joins]}

    def text(self) -> str:
        """Lines for a terminal."""
        return "\n\n".join(join.text() for join in self.joins)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_text(self.text())


def register(task: EnrichTask | KeysOnlyTask, plan: JoinPlan, why_rows: str | None = None) -> None:
    """Remember the plan behind a function that Spark's plans will name, and why it does not get only keys."""
    with _LOCK:
        _PLANS[task.name] = task, plan, why_rows
        while len(_PLANS) > _MOST_PLANS:
            _PLANS.popitem(last=False)


def explain(df: Any) -> Any:
    """Explain how the joins of a DataFrame or flow will run: strategy, route, shards, memory split, predicted rate.

    Parameters
    ----------
    df
        A DataFrame made by `enrich`, or derived from one by any Spark operations; or a flow.

    Returns
    -------
    Explanation or FlowExplanation
        Print it, or call `as_dict`. For a flow with a `multi_join`: the tree of joins, why it was chosen, and the
        expected rates.
    """
    own = getattr(df, "explanation", None)
    if callable(own):
        return own()
    if not hasattr(df, "sparkSession"):
        raise PlanError(f"a {type(df).__name__} cannot be explained.", hint="Pass a DataFrame or a flow.")
    names = list(dict.fromkeys(_MARKER.findall(_plan_text(df))))
    if not names:
        raise PlanError("this DataFrame has no join that enrich made.", hint="Use df.explain() for Spark's own plan.")
    unknown = [name for name in names if name not in _PLANS]
    if unknown:
        raise PlanError(
            f"{unknown[0]} was planned by another process, or very long ago.", hint="Call enrich again, then explain."
        )
    return Explanation(tuple(explained(*_PLANS[name]) for name in names))


def _plan_text(df: DataFrame) -> str:
    java = getattr(df, "_jdf", None)
    if java is not None:
        return str(java.queryExecution().analyzed().toString())
    return str(df._explain_string("extended"))


def explained(task: EnrichTask | KeysOnlyTask, plan: JoinPlan, why_rows: str | None = None) -> JoinExplanation:
    """Explain a join; `why_rows` says why whole rows travel where keys could have."""
    model: Plan | None = None
    keys = task if isinstance(task, KeysOnlyTask) else None
    schema = plan.stream_schema if keys is None else keys.stream_schema
    transfer = "rows" if keys is None else "keys"
    task = task.lookup if isinstance(task, KeysOnlyTask) else task
    if isinstance(task, OperatorTask):
        model, memory, why = _operator(task, plan)
        rate, route = model.service_rate, "shards" if plan.has_equality else "every shard"
        join_ms = {tuples: 1e3 * tuples / rate / plan.tasks for tuples in BATCH_SIZES}
    else:
        assert isinstance(task, LookupTask)
        times, memory, why = _lookup(task, plan, schema)
        why += "" if why_rows is None else f" Whole rows travel to Python: {why_rows}."
        rate, route = 1.0 / times.tuple_s, "lookup"
        join_ms = {tuples: 1e3 * times.seconds(tuples / plan.tasks) for tuples in BATCH_SIZES}
    condition = plan.recipe.condition
    return JoinExplanation(
        relation=plan.relation.path,
        version=plan.relation.version,
        relation_rows=plan.relation.stats.rows,
        relation_bytes=plan.relation.stats.bytes,
        shards=plan.recipe.num_shards,
        on=list(plan.on),
        how=plan.recipe.how,
        condition=None if condition is None else condition.describe(),
        strategy=task.strategy if isinstance(task, OperatorTask) else "lookup",
        route=route,
        refresh=task.refresh,
        budget_bytes=plan.budget.total_bytes,
        memory_bytes=memory,
        tuples_per_second=1.0 / (1.0 / rate + _TRANSFER_S[transfer]),
        join_ms=join_ms,
        why=why,
        rate=plan.rate,
        plan=model,
        transfer=transfer,
    )


def _operator(task: OperatorTask, plan: JoinPlan) -> tuple[Plan, dict[str, int], str]:
    """The model's plan for the operator of the largest shard, the memory of all shards, and the reasons."""
    recipe, shard = plan.recipe, task.open_largest_shard(plan.relation)
    operator = task.operator(task.spec(shard, plan.stream_schema, Budget(task.most_bytes)))
    model = operator.explain(recipe.factors(shard))
    if task.fitted is not None:
        planned = task.fitted.plan
        model = replace(
            model, objective="memory", required_rate=planned.required_rate, binds=planned.binds, why=planned.why
        )
    memory = {name: size * recipe.num_shards for name, size in model.memory_bytes.items()}
    return model, memory, f"Rows are shuffled to {recipe.num_shards} shards. {model.why}"


def _lookup(task: LookupTask, plan: JoinPlan, schema: pa.Schema) -> tuple[LookupTimes, dict[str, int], str]:
    reader = plan.relation.reader(plan.recipe.relation_columns, plan.recipe.io)
    join = task.join(reader, schema)
    times = measure_lookups(join, task.recipe)
    why = (
        "Every worker can map the whole relation, so each task looks its own rows up, without a shuffle. Predicted "
        f"from {times.tuples:,} rows that were looked up for this."
    )
    return times, join.sizes(), why
