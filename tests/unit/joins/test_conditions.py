"""Conditions: Spark's comparison rules, NULLs, what is refused when."""

import datetime
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dovetail.core.errors import PlanError
from dovetail.joins.conditions import AllOf, BatchPredicate, Comparison, Range, compare

NAN = math.nan
STREAM = pa.schema({"x": pa.int64(), "name": pa.string(), "at": pa.timestamp("us")})
RELATION = pa.schema({"low": pa.int64(), "high": pa.int64(), "since": pa.timestamp("us"), "tag": pa.list_(pa.int8())})


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        ("<", [True, False, False, True, False, False]),
        ("<=", [True, True, True, True, False, False]),
        ("=", [False, True, True, False, False, False]),
        ("!=", [True, False, False, True, True, False]),
        (">=", [False, True, True, False, True, False]),
        (">", [False, False, False, False, True, False]),
    ],
)
def test_numbers_compare_as_in_spark(operator: Any, expected: list[bool]) -> None:
    left = pa.array([1.0, NAN, -0.0, math.inf, NAN, None])
    right = pa.array([2.0, NAN, 0.0, NAN, math.inf, 1.0])
    assert compare(left, operator, right).tolist() == expected
    # Integers meet floating-point numbers by the same rules.
    assert compare(pa.array([1]), "<", pa.array([NAN])).tolist() == [True]


def test_times_and_texts_compare() -> None:
    early, late = (pa.array([datetime.datetime(2020, 1, day)]) for day in (1, 2))
    assert compare(early, "<", late).tolist() == [True]
    assert compare(pa.array(["a", None]), "=", pa.array(["a", None])).tolist() == [True, False]


@pytest.mark.parametrize(
    ("includes_low", "includes_high", "expected"),
    [
        (True, False, [False, True, True, False, False]),
        (True, True, [False, True, True, True, False]),
        (False, False, [False, False, True, False, False]),
        (False, True, [False, False, True, True, False]),
    ],
)
def test_ends_of_a_range(includes_low: bool, includes_high: bool, expected: list[bool]) -> None:
    stream = pa.record_batch({"x": pa.array([0, 1, 2, 3, None])})
    relation = pa.record_batch({"low": [1] * 5, "high": [3] * 5})
    condition = Range("x", "low", "high", includes_low, includes_high)
    assert condition.mask(stream, relation).tolist() == expected


def test_range_with_a_null_end_matches_nothing() -> None:
    relation = pa.record_batch({"low": pa.array([None, 0]), "high": pa.array([9, None], pa.int64())})
    assert Range("x", "low", "high").mask(pa.record_batch({"x": [1, 1]}), relation).tolist() == [False, False]


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        (Comparison("y", "<", "low"), "the stream has no column 'y'"),
        (Comparison("x", "<", "y"), "the relation has no column 'y'"),
        (Comparison("x", "<", "tag"), "int64 and list<item: int8> cannot be compared"),
        (Range("name", "low", "high"), "string and int64 cannot be compared"),
        (BatchPredicate(lambda s, r: None, ["y"], [], name="odd"), "predicate odd: the stream has no column 'y'"),
        (BatchPredicate(5, name="odd"), "int is not callable"),  # type: ignore[arg-type]
        (AllOf(Comparison("x", "<", "low"), Comparison("x", "<", "no")), "no column 'no'"),
    ],
)
def test_impossible_conditions_are_refused_when_planned(condition: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        condition.columns(STREAM, RELATION)


def test_unknown_operator_and_empty_conjunction_are_refused() -> None:
    with pytest.raises(PlanError, match="'<>' is not a comparison"):
        Comparison("x", "<>", "low")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="at least one"):
        AllOf()


def test_columns_asked_for_are_named_once() -> None:
    both = AllOf(Range("x", "low", "high"), Comparison("at", ">=", "since"), Comparison("x", "!=", "low"))
    assert both.columns(STREAM, RELATION) == (["x", "at"], ["low", "high", "since"])


def test_predicate_sees_only_its_columns_and_null_is_false() -> None:
    seen: list[tuple[list[str], list[str]]] = []

    def look(stream: pa.RecordBatch, relation: pa.RecordBatch) -> pa.Array:
        seen.append((stream.schema.names, relation.schema.names))
        return pa.chunked_array([[True], [None]])

    predicate = BatchPredicate(look, ["x"], ["low"])
    stream = pa.record_batch({"name": ["a", "b"], "x": [1, 2]})
    answer = predicate.mask(stream, pa.record_batch({"low": [1, 2], "high": [1, 2]}))
    assert (answer.tolist(), seen) == ([True, False], [(["x"], ["low"])])


def test_answer_of_another_shape_is_refused() -> None:
    predicate = BatchPredicate(lambda s, r: np.ones((2, 1), np.bool_), ["x"], [], name="square")
    with pytest.raises(PlanError, match="predicate square returned bool instead of a boolean array"):
        predicate.mask(pa.record_batch({"x": [1, 2]}), pa.record_batch({"low": [1, 2]}))
