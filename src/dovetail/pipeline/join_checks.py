"""Checks of the conditions of a join of streams in a pipeline file, before Spark starts."""

from collections.abc import Iterator, Mapping

from dovetail.core.errors import DovetailError, PlanError
from dovetail.joins.multiway.cascade import DROPPING, resolved_join_type
from dovetail.pipeline.columns import KnownColumns
from dovetail.pipeline.step_models import MultiJoinModel

__all__ = ["condition_problems", "dropped_inputs"]


def condition_problems(join: MultiJoinModel, sources: Mapping[str, KnownColumns]) -> Iterator[tuple[str, str]]:
    """What is wrong with each condition, and what would work; nothing where the columns of an input are not known."""
    columns = {name: list(known) for name in join.inputs if (known := sources[name]) is not None}
    if join.condition is None or len(columns) < len(join.inputs):
        return
    from dovetail.spark.plan.names import NameResolver
    from dovetail.spark.steps.join_conditions import parse_comparisons

    # Only Spark knows its session's rules; two names that differ in case show that it is case-sensitive.
    folded = [[column.casefold() for column in names] for names in columns.values()]
    resolver = NameResolver(is_case_sensitive=any(len(set(names)) < len(names) for names in folded))
    for text in [join.condition] if isinstance(join.condition, str) else join.condition:
        try:
            parse_comparisons(text, columns, resolver)
        except DovetailError as error:
            yield error.message, error.hint or ""


def dropped_inputs(join: MultiJoinModel) -> tuple[set[str], tuple[str, str] | None]:
    """The inputs whose columns are gone after a semi or anti join; and what is wrong with `how`, with a hint."""
    try:
        kind, cascade = resolved_join_type(join.inputs, join.how)
    except PlanError as error:
        return set(), (error.message, error.hint or "")
    kinds = cascade or ("inner", *([kind] * (len(join.inputs) - 1)))
    return {name for name, how in zip(join.inputs, kinds, strict=True) if how in DROPPING}, None
