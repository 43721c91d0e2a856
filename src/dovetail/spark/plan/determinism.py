"""Refuses a stream whose rows could differ when a task runs twice."""

from typing import Any

from pyspark.sql import DataFrame

from dovetail.core.errors import PlanError

__all__ = ["require_deterministic"]


def require_deterministic(df: DataFrame, where: str) -> None:
    """Refuse a plan with a nondeterministic expression.

    After a lost shuffle file Spark recomputes some rows while others were already read: if the two differ, rows are
    lost or repeated. DataFrames of Spark Connect are refused too, because their plan is not visible.
    """
    if type(df).__module__.startswith("pyspark.sql.connect"):
        raise PlanError(
            f"Flows do not run through Spark Connect, which {where} comes from: their commits need the driver's own "
            "file system and JVM.",
            hint="Start the flow from a classic session (SparkSession.builder.master), or use dovetail.enrich.",
        )
    plan = df._jdf.queryExecution().analyzed()
    if plan.deterministic():
        return
    raise PlanError(
        f"The stream has {_culprit(plan)} in {where}, which gives other values when a task runs again: rows could be "
        "lost or repeated.",
        hint="Compute it where the stream is produced, or in the sink, or use a function of the row, such as xxhash64.",
    )


def _culprit(plan: Any) -> str:
    """The first nondeterministic expression from the top."""
    expressions = plan.expressions()
    for number in range(expressions.size()):
        expression = expressions.apply(number)
        if not expression.deterministic():
            return str(expression.sql())
    children = plan.children()
    for number in range(children.size()):
        if not children.apply(number).deterministic():
            return _culprit(children.apply(number))
    return "a nondeterministic expression"
