"""Applying each kind of step of a pipeline file to a flow."""

from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from dovetail.core.durations import parse_duration_ms
from dovetail.core.errors import PlanError
from dovetail.joins.multiway.planner import MultiwayStatistics
from dovetail.joins.promises import Punctuation
from dovetail.pipeline.step_models import MultiJoinModel, Step
from dovetail.relation import Relation
from dovetail.spark import sinks
from dovetail.spark.steps.multi_join import multi_join
from dovetail.spark.steps.stream import Flow

__all__ = ["apply_step", "join_streams"]


def join_streams(
    name: str, frames: Mapping[str, DataFrame], join: MultiJoinModel, place_of: Callable[[str], str] = str
) -> Flow:
    """The flow that begins with a join of streams; ``place_of`` resolves paths of the file."""
    apart = {"inputs", "late", "quarantine", "spill_directory", "statistics", "punctuations", "on"}
    options = join.model_dump(exclude=apart, exclude_none=True)
    options["on"] = [tuple(pair) for pair in join.on] if _is_pairs(join.on) else join.on
    if join.late is not None:
        options |= {"late": "side", "late_path": place_of(join.late.path)}
    if join.quarantine is not None:
        options["quarantine_path"] = place_of(join.quarantine.path)
    if join.spill_directory is not None:
        options["spill_directory"] = place_of(join.spill_directory)
    if join.statistics is not None:
        known = join.statistics.model_dump(exclude={"horizon"})
        if join.statistics.horizon is not None:
            known["horizon_s"] = parse_duration_ms("horizon", join.statistics.horizon) / 1_000
        options["statistics"] = MultiwayStatistics(**known)
    if join.punctuations is not None:
        options["punctuations"] = {
            told: ends if isinstance(ends, str) else Punctuation.where(ends.where, data=ends.data)
            for told, ends in join.punctuations.items()
        }
    return multi_join(frames, name=name, **options)


def _is_pairs(on: object) -> bool:
    return isinstance(on, list) and any(isinstance(one, list) for one in on)


def apply_step(
    flow: Flow, step: Step, relations: Mapping[str, Relation | str], place_of: Callable[[str], str] = str
) -> Flow:
    """The flow with one more step, which is not a join of streams.

    ``relations`` has a path instead of a relation that the step creates. ``place_of`` resolves paths of the file.
    """
    if step.enrich is not None:
        options = step.enrich.model_dump(exclude={"relation", "columns", "shed_to"}, exclude_none=True)
        if step.enrich.shed_to is not None:
            options["shed_to"] = sinks.parquet(place_of(step.enrich.shed_to.path))
        return flow.enrich(relations[step.enrich.relation], select=step.enrich.columns, **options)
    if step.wait_for is not None:
        options = step.wait_for.model_dump(exclude={"relation", "columns", "expired"}, exclude_none=True)
        if step.wait_for.expired is not None:
            options["expired"] = sinks.parquet(place_of(step.wait_for.expired.path))
        return flow.wait_for(relations[step.wait_for.relation], select=step.wait_for.columns, **options)
    if step.kept_relation is not None:
        stage: Callable[..., Flow] = getattr(flow, step.kind)
        options = step.body.model_dump(exclude={"relation"}, exclude_none=True)
        if step.follow is not None:
            options["keys"] = options.pop("on")
        return stage(relation=relations[step.kept_relation], **options)
    return flow.transform(_Transformation(step))


class _Transformation:
    """A stateless step, as a function on a DataFrame."""

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
        raise PlanError(f"{step.kind} is not possible here.", hint="multi_join must be the first step.")
