"""Punctuations: what they match, how they merge, and which are refused."""

from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from dovetail.core.errors import PlanError, SchemaError
from dovetail.joins.promises import Punctuation, Range
from dovetail.joins.promises.closing import together
from dovetail.joins.promises.punctuation import BoundPunctuation

SCHEMA = pa.schema(
    {
        "i": pa.int16(),
        "s": pa.string(),
        "f": pa.float64(),
        "d": pa.date32(),
        "t": pa.timestamp("us"),
        "m": pa.decimal128(9, 2),
        "b": pa.bool_(),
    }
)


def bind(columns: dict[str, Any]) -> BoundPunctuation:
    return BoundPunctuation.of(Punctuation(columns), "x", SCHEMA)


def matched(columns: dict[str, Any], column: str, values: list[Any]) -> list[Any]:
    rows = pa.record_batch(
        [pa.array(values if field.name == column else [None] * len(values), field.type) for field in SCHEMA],
        schema=SCHEMA,
    )
    return [value for value, hit in zip(values, bind(columns).matches(rows), strict=True) if hit]


@pytest.mark.parametrize(
    ("closed", "inside"), [("both", [2, 3, 4]), ("left", [2, 3]), ("right", [3, 4]), ("neither", [3])]
)
def test_range_has_the_ends_that_are_closed(closed: Any, inside: list[int]) -> None:
    assert matched({"i": Range(2, 4, closed)}, "i", [1, 2, 3, 4, 5, None]) == inside


def test_range_without_an_end_goes_on_for_ever() -> None:
    assert matched({"s": Range("b", None)}, "s", ["a", "b", "z", None]) == ["b", "z"]
    assert matched({"d": Range(None, date(2026, 1, 2), "left")}, "d", [date(2026, 1, 1), date(2026, 1, 2)]) == [
        date(2026, 1, 1)
    ]


def test_values_match_by_the_rules_of_the_join() -> None:
    assert matched({"f": 0.0}, "f", [-0.0, 0.0, 1.0, float("nan"), None]) == [-0.0, 0.0]
    assert matched({"f": [0.0, 2.0]}, "f", [-0.0, 2.0, 3.0]) == [-0.0, 2.0]
    assert matched({"m": Decimal("1.50")}, "m", [Decimal("1.5"), Decimal("2.5")]) == [Decimal("1.5")]
    assert matched({"t": datetime(2026, 1, 1)}, "t", [datetime(2026, 1, 1), datetime(2026, 1, 2)]) == [
        datetime(2026, 1, 1)
    ]


def test_all_columns_must_match_and_any_stands_for_none() -> None:
    rows = pa.RecordBatch.from_pylist([{"i": 1, "s": "a"}, {"i": 1, "s": "b"}, {"i": 2, "s": "a"}], schema=SCHEMA)
    assert bind({"i": 1, "s": "a", "f": Punctuation.ANY}).matches(rows).tolist() == [True, False, False]
    assert bind({}).matches(rows).all()


@pytest.mark.parametrize(
    ("one", "other", "joined"),
    [
        ({"i": Range(1, 3)}, {"i": Range(3, 5)}, "i in [1, 5]"),
        ({"f": Range(1.0, 3.0, "left")}, {"f": Range(3.0, 5.0)}, "f in [1.0, 5.0]"),
        ({"f": Range(1.0, 3.0, "left")}, {"f": Range(3.0, 5.0, "right")}, None),
        ({"s": ["a"]}, {"s": ["b"]}, "s in {a, b}"),
        ({"s": Range("a", "f")}, {"s": "c"}, "s in [a, f]"),
        ({"s": "a", "i": 1}, {"s": "b", "i": 2}, None),
        ({"s": "a", "i": 1}, {"s": "b", "i": 1}, "s in {a, b} and i = 1"),
        ({"s": "a"}, {"s": "a", "i": 1}, "s = a"),
    ],
)
def test_two_punctuations_become_one_where_it_says_the_same(one: Any, other: Any, joined: str | None) -> None:
    for first, second in ((one, other), (other, one)):
        union = bind(first).union(bind(second))
        shown = None if union is None else str(union)
        if joined is not None and "{" in joined and shown is not None:
            assert set(shown) == set(joined)
        else:
            assert shown == joined


def test_punctuation_survives_storage() -> None:
    bound = bind({"d": Range(date(2026, 1, 1), None, "neither"), "s": ["a", "b"]})
    assert BoundPunctuation.from_dict(bound.as_dict()) == bound


@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"nope": 1}, PlanError, r"nope = 1 is on a column that input 'x' does not have\. Its columns are i, s"),
        ({"i": "5"}, SchemaError, r"x\.i has the value '5' of type str; the column is int16"),
        ({"i": True}, SchemaError, r"True of type bool; the column is int16"),
        ({"i": 5.5}, SchemaError, r"5\.5 of type float; the column is int16"),
        ({"i": 70_000}, SchemaError, r"no int16"),
        ({"i": Range(1, 99_999)}, SchemaError, r"no int16"),
        ({"s": b"x"}, SchemaError, r"of type bytes; the column is string"),
        ({"d": datetime(2026, 1, 1)}, SchemaError, r"the column is date32"),
        ({"i": pa.array([1], pa.int64())}, SchemaError, r"has int64 values; the column is int16"),
        ({"i": []}, PlanError, r"names no value"),
        ({"i": [1, None]}, PlanError, r"NULL or NaN, which match nothing"),
        ({"f": float("nan")}, PlanError, r"NULL or NaN"),
    ],
)
def test_punctuation_that_does_not_fit_its_input_is_refused(columns: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        bind(columns)


def test_ranges_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="from 5 to 1 has its bounds in the wrong order"):
        Punctuation.between("k", 5, 1)
    with pytest.raises(PlanError, match="is empty"):
        Range(5, 5, "left")
    with pytest.raises(PlanError, match="must have one type"):
        Range(5, "x")
    with pytest.raises(PlanError, match="NaN"):
        Range(float("nan"), None)
    with pytest.raises(PlanError, match="closed='open' is none of"):
        Range(1, 2, "open")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="predicate per column"):
        Punctuation(["k"])  # type: ignore[arg-type]


def test_punctuations_given_together_say_what_they_say_one_by_one() -> None:
    written: list[Any] = [{"i": 1}, {"i": [2, 1]}, {"s": "a"}, {"i": 3}, {"i": 4, "s": "b"}, {}, {"i": 5}, {"i": 6}]
    bound = [bind(columns) for columns in written]
    merged = list(together(bound))
    assert [str(each) for each in merged] == [
        "i in {1, 2}", "s = a", "i = 3", "i = 4 and s = b", "anything", "i in {5, 6}",
    ]  # fmt: skip
    assert list(together([])) == []
