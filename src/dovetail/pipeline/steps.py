"""Each kind of step of a pipeline file as what it is in Python."""

from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dovetail.errors import PlanError
from dovetail.pipeline.step_models import Step
from dovetail.relation import Relation
from dovetail.spark import sinks
from dovetail.spark.flow import Flow

__all__ = ["apply_step"]


def apply_step(
    flow: Flow, step: Step, relations: Mapping[str, Relation | str], place_of: Callable[[str], str] = str
) -> Flow:
    """The flow with one more step.

    Parameters
    ----------
    flow
        What comes before.
    step
        The step; not a join of streams, which begins a flow.
    relations
        By name; a path where the step itself makes the relation.
    place_of
        What a path of the file means.
    """
    if step.enrich is not None:
        options = step.enrich.model_dump(exclude={"relation", "columns"}, exclude_none=True)
        return flow.enrich(relations[step.enrich.relation], select=step.enrich.columns, **options)
    if step.wait_for is not None:
        options = step.wait_for.model_dump(exclude={"relation", "columns", "expired"}, exclude_none=True)
        if step.wait_for.expired is not None:
            options["expired"] = sinks.parquet(place_of(step.wait_for.expired.path))
        return flow.wait_for(relations[step.wait_for.relation], select=step.wait_for.columns, **options)
    if step.kept_relation is not None:
        stage: Callable[..., Flow] = getattr(flow, step.kind)
        options = step.body.model_dump(exclude={"relation"}, exclude_none=True)
        return stage(relation=relations[step.kept_relation], **options)
    return flow.transform(_Transformation(step))


class _Transformation:
    """A stateless step, as a function of a DataFrame."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def __call__(self, rows: DataFrame) -> DataFrame:
        step: Any = self._step
        if step.columns is not None:
            return rows.selectExpr(*step.columns)
        if step.where is not None:
            return rows.where(step.where)
        if step.with_columns is not None:
            return rows.withColumns({name: F.expr(text) for name, text in step.with_columns.items()})
        if step.drop is not None:
            return rows.drop(*step.drop)
        if step.rename is not None:
            return rows.withColumnsRenamed(dict(step.rename))
        raise PlanError(f"{step.kind} does not stand here.", hint="multi_join is the first step.")
