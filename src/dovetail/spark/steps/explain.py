"""`explain`: how a DataFrame that `enrich` made will be computed, for people and for programs.

The functions that `enrich` gives to Spark have names of their own, which Spark keeps in its plans: so the joins in any
DataFrame that was derived from an enriched one are found again by the text of its plan.
"""

import re
import threading
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from typing import Any

from pyspark.sql import DataFrame

from dovetail.errors import PlanError
from dovetail.memory import format_bytes
from dovetail.model.explain import Plan
from dovetail.operators.auto import factors_for
from dovetail.relation.io import PAGE_BYTES
from dovetail.spark.enrich_task import EnrichTask, LookupTask, OperatorTask, make_operator
from dovetail.spark.join_plan import JoinPlan

__all__ = ["Explanation", "JoinExplanation", "explain", "explained", "register"]

_MARKER = re.compile(r"dovetail_enrich_[0-9a-f]{12}")
_MOST_PLANS = 1_000
_PLANS: OrderedDict[str, tuple[EnrichTask, JoinPlan]] = OrderedDict()
_LOCK = threading.Lock()

_TRANSFER_S = 350e-9
"""What a tuple costs between the JVM and Python, there and back: the ceiling of mapInArrow on one core."""


@dataclass(frozen=True)
class JoinExplanation:
    """One join of a DataFrame.

    Attributes
    ----------
    relation, version, relation_rows, relation_bytes, shards
        What is joined with.
    on, how, condition
        The join.
    strategy, route
        Which operator; and ``"lookup"`` if every task looks its own rows up, ``"shards"`` if rows are shuffled to the
        relation's shards first, ``"every shard"`` if each row goes to all of them.
    budget_bytes, memory_bytes
        The budget, and what it is divided into: all shards together.
    tuples_per_second
        What one core is predicted to serve.
    why
        The reasons, in words.
    """

    relation: str
    version: int
    relation_rows: int
    relation_bytes: int
    shards: int
    on: list[tuple[str, str]]
    how: str
    condition: str | None
    strategy: str
    route: str
    refresh: str
    budget_bytes: int
    memory_bytes: dict[str, int]
    tuples_per_second: float
    why: str
    plan: Plan | None = field(default=None, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """The explanation as JSON-able data."""
        known = asdict(self)
        known["on"] = [list(pair) for pair in self.on]
        known["plan"] = None if self.plan is None else self.plan.as_dict()
        return known

    def text(self) -> str:
        """The explanation as lines for a terminal."""
        pairs = " and ".join(mine if mine == theirs else f"{mine} = {theirs}" for mine, theirs in self.on)
        lines = [
            ("relation", f"{self.relation}, version {self.version} ({self.refresh})"),
            ("size", f"{self.relation_rows:,} rows, {format_bytes(self.relation_bytes)}, {self.shards} shards"),
            ("join", f"{self.how} on {pairs or 'nothing'}" + (f" where {self.condition}" if self.condition else "")),
            ("strategy", self.strategy),
            ("route", self.route),
            ("budget", format_bytes(self.budget_bytes)),
            *((f"  {name}", format_bytes(size)) for name, size in self.memory_bytes.items() if size),
            ("predicted", f"{self.tuples_per_second:,.0f} tuples/s on one core"),
            ("why", self.why),
        ]
        return "\n".join(f"{name:<14} {value}" for name, value in lines)


@dataclass(frozen=True)
class Explanation:
    """All joins of a DataFrame that `enrich` made, outermost first; prints as text."""

    joins: tuple[JoinExplanation, ...]

    def as_dict(self) -> dict[str, Any]:
        """The explanation as JSON-able data."""
        return {"joins": [join.as_dict() for join in self.joins]}

    def text(self) -> str:
        """The explanation as lines for a terminal."""
        return "\n\n".join(join.text() for join in self.joins)

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


def register(task: EnrichTask, plan: JoinPlan) -> None:
    """Remember the plan behind a function that Spark's plans will name."""
    with _LOCK:
        _PLANS[task.name] = task, plan
        while len(_PLANS) > _MOST_PLANS:
            _PLANS.popitem(last=False)


def explain(df: Any) -> Any:
    """Say how the joins of a DataFrame will be done: strategy, route, shards, memory split, predicted rate.

    Parameters
    ----------
    df
        A DataFrame that `enrich` made, or one derived from it by any operations of Spark's; or a flow.

    Returns
    -------
    Explanation or FlowExplanation
        Print it, or ask it `as_dict`. Of a flow with a `multi_join`: the tree of joins, why it was chosen, and the
        rates that it is expected to give.
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


def explained(task: EnrichTask, plan: JoinPlan) -> JoinExplanation:
    """How one join will be done."""
    model: Plan | None = None
    if isinstance(task, OperatorTask):
        model, memory, why = _operator(task, plan)
        rate, route = model.service_rate, "shards" if plan.has_equality else "every shard"
    else:
        assert isinstance(task, LookupTask)
        rate, memory, why = _lookup(task, plan)
        route = "lookup"
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
        strategy=task.strategy if isinstance(task, OperatorTask) else "auto",
        route=route,
        refresh=task.refresh,
        budget_bytes=plan.budget.total_bytes,
        memory_bytes=memory,
        tuples_per_second=1.0 / (1.0 / rate + _TRANSFER_S),
        why=why,
        plan=model,
    )


def _operator(task: OperatorTask, plan: JoinPlan) -> tuple[Plan, dict[str, int], str]:
    """What the model says of the largest shard's operator."""
    recipe, sizes = plan.recipe, [shard.rows for shard in plan.relation.stats.shards]
    shard = task.open_shard(plan.relation, sizes.index(max(sizes)))
    spec = recipe.spec(shard, plan.stream_schema, task.shard_budget)
    operator = make_operator(task.strategy, spec, task.objective)
    model = operator.explain()
    memory = {name: size * recipe.num_shards for name, size in model.memory_bytes.items()}
    return model, memory, f"Rows are shuffled to {recipe.num_shards} shards. {model.why}"


def _lookup(task: LookupTask, plan: JoinPlan) -> tuple[float, dict[str, int], str]:
    recipe = plan.recipe
    reader = plan.relation.reader(recipe.relation_columns, recipe.io)
    factors = factors_for(reader)
    page_s = factors.read_seconds(PAGE_BYTES, sequential=False)
    seconds = factors.lookup_s + factors.gather_s + factors.output_s + (page_s if page_s > 1e-6 else 0.0)
    why = "Every worker can map the whole relation, so that each task looks its own rows up, without a shuffle."
    return 1.0 / seconds, {"index": reader.index_bytes}, why
