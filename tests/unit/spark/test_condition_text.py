"""Conditions written as text."""

import pytest

from dovetail.core.errors import PlanError
from dovetail.joins import AllOf, Comparison, Range
from dovetail.joins.conditions import Condition
from dovetail.spark.plan.condition_text import parse_condition
from dovetail.spark.plan.names import NameResolver

STREAM = ["id", "ts", "price", "odd name", "both"]
RELATION = ["low", "high", "limit", "b`tick", "both"]


def parse(text: str, is_case_sensitive: bool = False) -> Condition:
    return parse_condition(text, STREAM, RELATION, NameResolver(is_case_sensitive))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("price < limit", Comparison("price", "<", "limit")),
        ("limit<price", Comparison("price", ">", "limit")),
        ("limit == PRICE", Comparison("price", "=", "limit")),
        ("price <> limit", Comparison("price", "!=", "limit")),
        ("`odd name` >= `b``tick`", Comparison("odd name", ">=", "b`tick")),
        ("stream.both != relation.both", Comparison("both", "!=", "both")),
        ("low <= ts AND ts < high", Range("ts", "low", "high")),
        ("ts <= high and low < ts", Range("ts", "low", "high", includes_low=False, includes_high=True)),
    ],
)
def test_comparisons_of_columns_become_conditions(text: str, expected: Condition) -> None:
    assert parse(text) == expected


def test_comparisons_of_other_columns_stay_apart() -> None:
    parsed = parse("price < limit AND low <= ts AND ts < high AND price <> low")
    assert isinstance(parsed, AllOf)
    assert parsed.conditions == (
        Comparison("price", "<", "limit"),
        Range("ts", "low", "high"),
        Comparison("price", "!=", "low"),
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is incomplete"),
        ("price < limit AND", "is incomplete"),
        ("price", "is not a comparison"),
        ("price < limit < high", "is not a comparison"),
        ("price < limit OR ts < high", "is not a comparison"),
        ("price + 1 < limit", "is not a column"),
        ("price < 'x'", "is not a column"),
        ("other.price < limit", "is not a column"),
        ("nothing < limit", "neither side has a column 'nothing'"),
        ("both < limit", "both sides have a column 'both'"),
        ("price < ts", "both columns of the stream"),
        ("low < high", "both columns of the relation"),
        ("stream.limit < relation.low", "the stream has no column 'limit'"),
    ],
)
def test_other_texts_are_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        parse(text)


def test_case_matters_where_the_session_says_so() -> None:
    with pytest.raises(PlanError, match="neither side has a column 'PRICE'"):
        parse("PRICE < limit", is_case_sensitive=True)
