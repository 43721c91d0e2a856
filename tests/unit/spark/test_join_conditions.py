"""Conditions of joins of streams as text: what they mean, and what is refused, without a session."""

from typing import Any

import pytest
from pyspark.sql import types as T

from dovetail.core.errors import PlanError
from dovetail.joins.conditions import Comparison
from dovetail.joins.multiway import PairCondition, TimeBound, TimeDistance
from dovetail.spark.plan.names import NameResolver
from dovetail.spark.steps.join_conditions import JoinConditions

SECOND = 1_000_000
SCHEMAS = {
    "o": T.StructType().add("k", "long").add("ordered", "timestamp").add("due", "timestamp").add("amount", "integer"),
    "p": T.StructType().add("k", "long").add("paid", "timestamp").add("sum", "long").add("share", "float"),
    "s x": T.StructType().add("k", "long").add("sent at", "timestamp").add("day", "date"),
}
TIMES = {"o": "ordered", "p": "paid", "s x": "sent at"}


def read(condition: Any, **options: Any) -> JoinConditions:
    return JoinConditions.of(condition, SCHEMAS, options.get("times", TIMES), NameResolver(is_case_sensitive=False))


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("p.paid BETWEEN o.ordered AND o.ordered + INTERVAL 1 HOUR", 0, 3600 * SECOND),
        ("Paid between Ordered - interval '2 minutes' and ordered", -120 * SECOND, 0),
        ("o.ordered <= paid AND paid - INTERVAL 90 SECOND < ordered", 0, 90 * SECOND - 1),
        ("o.ordered + INTERVAL 1 DAY - INTERVAL '1' HOUR < p.paid", 23 * 3600 * SECOND + 1, None),
        ("p.paid > o.ordered AND p.paid >= o.ordered AND paid < ordered + INTERVAL 1.5 SECONDS", 1, 1_499_999),
        ("p.paid == o.ordered + INTERVAL 2 MILLISECONDS", 2_000, 2_000),
    ],
)
def test_comparisons_of_event_times_are_one_bound_of_their_pair(text: str, low: int | None, high: int | None) -> None:
    assert read(text) == JoinConditions((TimeBound("o", "p", low, high),), ())


def test_other_comparisons_are_conditions_in_the_order_of_the_inputs() -> None:
    given = PairCondition("p", "o", Comparison("sum", "!=", "amount"))
    found = read(["sum >= amount AND `s x`.`sent at` <> paid", given, "paid <= due + INTERVAL 1 SECOND AND o.k = p.k"])
    assert found.bounds == ()
    assert found.others == (
        PairCondition("o", "p", Comparison("amount", "<=", "sum")),
        PairCondition("p", "s x", Comparison("paid", "!=", "sent at")),
        given,
        PairCondition("o", "p", TimeDistance("due", "paid", None, SECOND)),
        PairCondition("o", "p", Comparison("k", "=", "k")),
    )
    # Without event times nothing bounds the state.
    assert read("paid < ordered + INTERVAL 1 SECOND", times={}).bounds == ()
    assert read(None) == JoinConditions()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ordered <", "it is incomplete"),
        ("ordered < paid OR sum > amount", "'OR' stands where AND was expected"),
        ("z.ordered < paid", "there is no input 'z'"),
        ("o.paid < p.paid", "input 'o' has no column 'paid'"),
        ("lost < paid", "no input has a column 'lost'"),
        ("k < paid", "o, p, s x all have a column 'k'"),
        ("o.ordered < o.due", "both columns of 'o'"),
        ("ordered < 5", "'5' is not a column"),
        ("ordered paid", "'paid' is not a comparison"),
        ("amount < share", "int and float, which are not compared"),
        ("amount < paid", "int and timestamp, which are not compared"),
        ("day < paid + INTERVAL 1 DAY", "Cast them to timestamp"),
        ("ordered < paid + INTERVAL 1 MONTH", "is not an interval of"),
        ("ordered + 3 < paid", "'3' stands where INTERVAL was expected"),
        ("due != paid + INTERVAL 1 DAY", "an interval with !="),
        ("ordered < paid AND paid < ordered", "from 1 to -1 after"),
    ],
)
def test_text_that_is_no_condition_between_two_inputs_is_refused(text: str, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        read(text)
