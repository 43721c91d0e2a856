"""Stream batches hold all rows in order, with codes that agree with the keys."""

from typing import Any

import pyarrow as pa
import pytest

from dovetail.testing.batches import CODE_COLUMN, colliding_code, split_at_random, stream_batches, with_codes
from dovetail.testing.rows import rows_of


@pytest.mark.parametrize("seed", [None, *range(10)])
def test_batches_hold_every_row_in_order(seed: int | None) -> None:
    rows = [{"k": t % 3, "t": t} for t in range(40)]
    batches = stream_batches(rows, on="k", seed=seed, max_batch_rows=5)
    assert rows_of(batches, drop=[CODE_COLUMN]) == rows
    assert {batch.schema for batch in batches} == {batches[0].schema}
    assert batches[0].schema.field(CODE_COLUMN).type == pa.int64()
    if seed is not None:
        assert max(batch.num_rows for batch in batches) <= 5
        assert stream_batches(rows, on="k", seed=seed, max_batch_rows=5) == batches


def test_random_cuts_include_empty_batches() -> None:
    batch = pa.record_batch({"k": list(range(200))})
    assert min(piece.num_rows for piece in split_at_random(batch, seed=0, max_batch_rows=3)) == 0


@pytest.mark.parametrize("seed", [None, 1])
def test_empty_stream_is_one_empty_batch_with_its_schema(seed: int | None) -> None:
    (batch,) = stream_batches([], on="k", schema=pa.schema([("k", pa.int64())]), seed=seed)
    assert batch.num_rows == 0
    assert batch.schema.names == [CODE_COLUMN, "k"]


def test_stream_of_a_join_without_equality_has_no_codes() -> None:
    (batch,) = stream_batches([{"x": 1}], on=[])
    assert batch.schema.names == ["x"]


def test_empty_stream_without_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="schema="):
        stream_batches([], on="k")


def test_batch_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="max_batch_rows=0"):
        split_at_random(pa.record_batch({"k": [1]}), seed=1, max_batch_rows=0)


def test_null_in_any_key_column_has_no_code() -> None:
    rows = [{"a": 1, "b": "x"}, {"a": None, "b": "x"}, {"a": 1, "b": None}]
    (batch,) = stream_batches(rows, on=["a", "b"])
    codes = batch.column(CODE_COLUMN).to_pylist()
    assert isinstance(codes[0], int)
    assert codes[1:] == [None, None]


@pytest.mark.parametrize(
    ("left", "right"), [(0.0, -0.0), (float("nan"), float("nan")), ("x", "x"), (b"x", b"x"), (3, 3)]
)
def test_colliding_codes_are_equal_for_equal_keys(left: Any, right: Any) -> None:
    code_of = colliding_code("k", distinct_codes=1000)
    assert code_of({"k": left}) == code_of({"k": right})


def test_colliding_codes_are_few_and_all_used() -> None:
    code_of = colliding_code(["a", "b"], distinct_codes=3)
    batch = with_codes(pa.record_batch({"a": list(range(60)), "b": ["x", "y", None] * 20}), ["a", "b"], code_of)
    codes = batch.column(CODE_COLUMN).to_pylist()
    assert set(codes) == {0, 1, 2, None}
    assert [code is None for code in codes] == [False, False, True] * 20
