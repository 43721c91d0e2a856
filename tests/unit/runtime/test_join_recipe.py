"""What a task makes of a join: the window's order survives the renaming of columns and the text of a condition."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dovetail.core.memory import Budget
from dovetail.joins import AllOf, Comparison, Range
from dovetail.joins.conditions import Condition
from dovetail.joins.matching import matcher_for
from dovetail.relation import Relation
from dovetail.runtime.join_recipe import JoinRecipe, RenamedCondition
from dovetail.spark.plan.condition_text import parse_condition
from dovetail.spark.plan.names import NameResolver


def matcher_name(tmp_path: Path, condition: Condition, kind: pa.DataType, of_stream: pa.DataType | None = None) -> str:
    """The matcher of a join without equality, whose columns are called as on Spark."""
    ends = pa.array([0, 1], pa.int64()).cast(kind)
    rows = pa.table({"band": ["a", "b"], "low": ends, "high": ends})
    relation = Relation.build(rows, tmp_path / "r", on="band", shards=1)
    recipe = recipe_of(relation, RenamedCondition(condition, (("__s0", "n"), ("__s1", "ts"))))
    stream = pa.schema({"__s0": pa.int64(), "__s1": kind if of_stream is None else of_stream})
    shard = relation.shard(0, list(recipe.relation_columns), include_null_keys=True)
    return type(matcher_for(recipe.spec(shard, stream, Budget.parse("1MB")))).__name__


def recipe_of(relation: Relation, condition: Condition) -> JoinRecipe:
    columns = tuple(relation.schema.names)
    unused: dict[str, Any] = {"code_from": None, "io": "map"}
    return JoinRecipe(
        path=relation.path,
        filesystem=None,
        relation_id=relation.relation_id,
        version=relation.version,
        relation_columns=columns,
        relation_schema=relation.schema,
        key=relation.key,
        code_kind=relation.code_kind,
        num_shards=1,
        on=(),
        how="inner",
        select=columns,
        condition=condition,
        emitted=("__s0", "__s1", *columns),
        **unused,
    )


TEXT = parse_condition("low <= ts AND ts < high", ["n", "ts"], ["band", "low", "high"], NameResolver(False))


@pytest.mark.parametrize(
    "condition",
    [Range("ts", "low", "high"), TEXT, AllOf(Comparison("n", ">", "low"), Range("ts", "low", "high"))],
    ids=["object", "text", "among others"],
)
def test_range_keeps_its_ordered_window_behind_renamed_columns(tmp_path: Path, condition: Condition) -> None:
    assert matcher_name(tmp_path, condition, pa.int64()) == "_OrderedRange"


def test_condition_that_is_no_range_meets_every_pair(tmp_path: Path) -> None:
    assert matcher_name(tmp_path, Comparison("ts", ">", "low"), pa.int64()) == "_AllPairs"


def test_moments_of_two_time_zones_have_one_order(tmp_path: Path) -> None:
    # A session's time zone is part of the type of its timestamps, and not of their values.
    utc, rome = pa.timestamp("us", "UTC"), pa.timestamp("us", "Europe/Rome")
    assert matcher_name(tmp_path, TEXT, utc, rome) == "_OrderedRange"


def test_moments_of_two_units_have_none(tmp_path: Path) -> None:
    assert matcher_name(tmp_path, TEXT, pa.timestamp("us", "UTC"), pa.timestamp("ms", "UTC")) == "_AllPairs"
