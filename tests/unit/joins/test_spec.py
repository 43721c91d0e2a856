"""What a join's specification refuses, and what it makes of a relation."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dovetail.core.errors import PlanError, SchemaError
from dovetail.joins import Comparison, JoinSpec, join_spec
from dovetail.joins.shedding import LeastJoinedFirst, OldestFirst, Random
from dovetail.relation import Relation
from dovetail.testing.shard import MemoryShard

STREAM = pa.schema({"__code": pa.int64(), "id": pa.int64(), "t": pa.int64()})
ROWS = pa.table({"id": [1, 2], "city": ["Rome", "Oslo"], "area": [1285, 454]})


def spec_of(**options: Any) -> JoinSpec:
    shard = MemoryShard(ROWS, [1, 2])
    return JoinSpec(**{"shard": shard, "stream_schema": STREAM, "on": (("id", "id"),)} | options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"how": "outer"}, PlanError, "how='outer' is not a join type"),
        ({"on": ()}, PlanError, "needs key columns, a condition, or both"),
        ({"on": (("no", "id"),)}, PlanError, "no key column 'no'"),
        ({"select": ("no",)}, PlanError, "select names 'no'"),
        ({"block_rows": 0}, PlanError, "block_rows=0"),
        ({"chunk_rows": -3}, PlanError, "chunk_rows=-3"),
        ({"stream_schema": STREAM.remove(0)}, SchemaError, "no column '__code'"),
        ({"stream_schema": STREAM.set(0, pa.field("__code", pa.int32()))}, SchemaError, "__code is int32, not int64"),
        ({"stream_schema": STREAM.append(pa.field("t", pa.int8()))}, SchemaError, "two columns 't'"),
        ({"stream_schema": STREAM.append(pa.field("city", pa.string()))}, PlanError, "both have a column 'city'"),
        ({"condition": Comparison("t", "<", "city")}, PlanError, "int64 and string cannot be compared"),
        (
            {"code_kind": "xxhash64", "shard": MemoryShard(ROWS, [1, 2], ["city"])},
            PlanError,
            "opened without 'id', which hashed codes are rechecked on",
        ),
        (
            {"code_kind": "xxhash64", "stream_schema": STREAM.set(1, pa.field("id", pa.string()))},
            SchemaError,
            "'id' is string in the stream",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        spec_of(**options)


def test_shared_name_may_be_left_out_with_select() -> None:
    spec = spec_of(stream_schema=STREAM.append(pa.field("city", pa.string())), select=("area",))
    assert spec.relation_columns == ["area"]


def test_key_may_be_selected_and_comes_once() -> None:
    assert spec_of(select=("id", "city")).relation_columns == ["city"]


@pytest.fixture
def relation(tmp_path: Path) -> Relation:
    return Relation.build(ROWS, tmp_path / "r", on="id", shards=2)


@pytest.mark.parametrize("on", [None, "id", ["id"], {"id": "id"}])
def test_ways_to_name_the_key(relation: Relation, on: Any) -> None:
    spec = join_spec(relation, STREAM, on=on, shard=1, budget="1MB")
    assert spec.on == (("id", "id"),)
    assert dict(spec.identity) == {"relation": relation.relation_id, "version": 1, "shard": 1}


@pytest.mark.parametrize(
    ("on", "message"),
    [(["id", "t"], "has 2 columns"), ({"t": "city"}, "must map"), ({"id": "id", "t": "id"}, "must map")],
)
def test_keys_that_do_not_fit_are_refused(relation: Relation, on: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        join_spec(relation, STREAM, on=on)


def test_composite_key_in_another_order_and_under_other_names(tmp_path: Path) -> None:
    rows = pa.table({"a": [1], "b": ["x"], "v": [2]})
    relation = Relation.build(rows, tmp_path / "r", on=["a", "b"], shards=1)
    same = pa.schema({"__code": pa.int64(), "a": pa.int64(), "b": pa.string()})
    assert join_spec(relation, same, on=["b", "a"]).on == (("a", "a"), ("b", "b"))
    other = pa.schema({"__code": pa.int64(), "p": pa.string(), "q": pa.int64()})
    spec = join_spec(relation, other, on={"p": "b", "q": "a"})
    assert spec.on == (("q", "a"), ("p", "b"))
    # Hashed codes are rechecked, so the key is read although it is not put out.
    assert spec.shard.schema.names == ["a", "b", "v"]
    assert spec.relation_columns == ["v"]


def test_unknown_column_in_select_is_refused(relation: Relation) -> None:
    with pytest.raises(PlanError, match="select names 'no', which the relation does not have"):
        join_spec(relation, STREAM, select=["no"])


@pytest.mark.parametrize("rate", [0, -0.1, 1.1])
def test_impossible_rate_of_shedding_is_refused(rate: float) -> None:
    with pytest.raises(PlanError, match="rate="):
        Random(rate=rate)


def test_random_shedding_repeats_after_a_restore() -> None:
    state = Random(rate=0.5, seed=9).start()
    state.drop_arriving(10)
    saved = state.save()
    expected = state.drop_arriving(50).tolist()
    other = Random(rate=0.5, seed=1).start()
    other.load(saved)
    assert other.drop_arriving(50).tolist() == expected
    assert 10 < sum(expected) < 40


def test_policies_that_drop_waiting_tuples_let_arriving_ones_in() -> None:
    for policy in (OldestFirst(), LeastJoinedFirst()):
        assert not policy.start().drop_arriving(5).any()
