"""Rows are told apart exactly where they differ, and the account of it is readable."""

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from dovetail.testing.rows import (
    as_multiset,
    assert_same_groups,
    assert_same_rows,
    canonical,
    diff_rows,
    rows_of,
)

UTC = dt.UTC


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (float("nan"), float("nan")),
        ([float("nan"), None], [float("nan"), None]),
        (b"x", bytearray(b"x")),
        (memoryview(b"x"), b"x"),
        ({"a": 1, "b": [2]}, {"b": [2], "a": 1}),
        ([("key", 1)], [["key", 1]]),
        (Decimal("1.50"), Decimal("1.5")),
        (dt.datetime(2026, 1, 1, tzinfo=UTC), dt.datetime(2026, 1, 1, tzinfo=UTC)),
        (
            dt.datetime(2026, 1, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=1))),
            dt.datetime(2026, 1, 1, tzinfo=UTC),
        ),
        (dt.timedelta(seconds=60), dt.timedelta(minutes=1)),
        (None, None),
    ],
)
def test_same_values_are_one(left: Any, right: Any) -> None:
    assert canonical(left) == canonical(right)
    assert len(as_multiset([{"v": left}, {"v": right}])) == 1


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (1, 1.0),
        (1, True),
        (0.0, -0.0),
        (1, Decimal(1)),
        ("x", b"x"),
        (None, float("nan")),
        (None, []),
        ([], [None]),
        ([1, 2], [2, 1]),
        ({"a": None}, {}),
        (dt.date(2026, 1, 1), dt.datetime(2026, 1, 1)),
        (dt.datetime(2026, 1, 1), dt.datetime(2026, 1, 1, tzinfo=UTC)),
        ("None", None),
    ],
)
def test_different_values_are_two(left: Any, right: Any) -> None:
    assert canonical(left) != canonical(right)
    assert len(as_multiset([{"v": left}, {"v": right}])) == 2


def test_value_of_no_row_is_refused() -> None:
    with pytest.raises(TypeError, match="set"):
        canonical({1, 2})


def test_rows_from_arrow_of_every_nested_kind_compare() -> None:
    schema = pa.schema(
        [
            ("list", pa.list_(pa.float64())),
            ("struct", pa.struct([("a", pa.int32()), ("b", pa.binary())])),
            ("map", pa.map_(pa.string(), pa.int64())),
            ("decimal", pa.decimal128(10, 2)),
            ("ts", pa.timestamp("us", tz="UTC")),
            ("date", pa.date32()),
        ]
    )
    row = {
        "list": [float("nan"), None],
        "struct": {"a": 1, "b": b"\xff"},
        "map": [("k", 1)],
        "decimal": Decimal("1.20"),
        "ts": dt.datetime(2026, 1, 1, tzinfo=UTC),
        "date": dt.date(2026, 1, 1),
    }
    batch = pa.RecordBatch.from_pylist([row, dict.fromkeys(row)], schema=schema)
    assert_same_rows(rows_of([batch]), [row, dict.fromkeys(row)])


def test_rows_of_joins_batches_and_drops_columns() -> None:
    batches = [pa.record_batch({"k": [1], "c": [7]}), pa.record_batch({"k": [2], "c": [8]})]
    assert rows_of(batches, drop=["c", "absent"]) == [{"k": 1}, {"k": 2}]


def test_diff_counts_each_missing_and_extra_row() -> None:
    text = diff_rows(expected=[{"k": 1}] * 3 + [{"k": 2}], actual=[{"k": 1}, {"k": float("nan")}, {"k": float("nan")}])
    assert text == (
        "4 rows expected, 3 found.\n"
        "missing: 3 (2 distinct)\n"
        "    2 x {'k': 1}\n"
        "    1 x {'k': 2}\n"
        "extra: 2 (1 distinct)\n"
        "    2 x {'k': nan}"
    )


def test_diff_is_cut_short_when_much_differs() -> None:
    text = diff_rows([{"k": k} for k in range(100)], [])
    assert text.endswith("... and 90 more")
    assert text.count(" x ") == 10


def test_same_rows_in_any_order_pass() -> None:
    assert_same_rows([{"k": 1}, {"k": 2}, {"k": 1}], [{"k": 1}, {"k": 1}, {"k": 2}])
    assert_same_rows([], [])


@pytest.mark.parametrize("actual", [[], [{"k": 1}] * 2, [{"k": 2}], [{"k": 1, "v": None}], [{"j": 1}]])
def test_different_rows_fail_with_context_first(actual: list[dict[str, Any]]) -> None:
    with pytest.raises(AssertionError, match=r"^seed=3\n1 rows expected"):
        assert_same_rows(actual, [{"k": 1}], context="seed=3")


def test_columns_in_another_order_fail() -> None:
    with pytest.raises(AssertionError, match="order of columns"):
        assert_same_rows([{"v": 1, "k": 1}], [{"k": 1, "v": 1}])


def test_groups_may_be_shuffled_inside_but_not_across() -> None:
    groups = [[{"k": 1, "v": 1}, {"k": 1, "v": 2}], [], [{"k": 0, "v": 3}]]
    assert_same_groups([{"k": 1, "v": 2}, {"k": 1, "v": 1}, {"k": 0, "v": 3}], groups)
    with pytest.raises(AssertionError, match="rows 0 to 1 belong to stream tuple 0"):
        assert_same_groups([{"k": 1, "v": 2}, {"k": 0, "v": 3}, {"k": 1, "v": 1}], groups)


def test_groups_with_a_row_missing_fail_as_rows_do() -> None:
    with pytest.raises(AssertionError, match="1 rows expected, 0 found"):
        assert_same_groups([], [[{"k": 1}]])
