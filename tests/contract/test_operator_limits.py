"""What every semi-stream join refuses, how it keeps to its budget, and what it sheds when asked to."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dovetail.core.errors import BudgetError, DovetailError, PlanError, SchemaError
from dovetail.core.memory import Budget
from dovetail.joins import (
    OPERATORS,
    Comparison,
    LeastJoinedFirst,
    OldestFirst,
    Random,
    join_spec,
)
from dovetail.relation import Relation
from dovetail.testing.batches import stream_batches
from dovetail.testing.cities import (
    CITIES,
    STREAM,
    batch_of,
    minimum_of,
    spec_of,
    state_of,
)
from dovetail.testing.driver import Driver, drive
from dovetail.testing.oracle import join_oracle, join_oracle_by_tuple
from dovetail.testing.rows import assert_same_rows, rows_of

pytestmark = pytest.mark.parametrize("kind", list(OPERATORS))
EVERY_JOIN_TYPE = pytest.mark.parametrize("how", ["inner", "left", "semi", "anti"])


# ================================================================ bad input


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (pa.record_batch({"id": [1], "t": [1]}), "no column '__code'"),
        (pa.record_batch({"__code": [1], "id": [1]}), "no column 't'"),
        (pa.record_batch({"__code": [1], "id": [1], "t": ["x"]}), "Column 't' of the stream batch is string"),
        (pa.record_batch({"__code": [1], "id": [1], "t": [1], "more": [1]}), "column 'more'"),
        (pa.record_batch({"__code": ["1"], "id": [1], "t": [1]}), "Column '__code' of the stream batch is string"),
    ],
)
def test_batch_of_another_schema_is_refused(kind: str, batch: pa.RecordBatch, message: str) -> None:
    operator = OPERATORS[kind](spec_of(CITIES))
    list(operator.offer(batch_of(STREAM)))
    before = state_of(operator)
    with pytest.raises(SchemaError, match=message):
        operator.offer(batch)
    assert state_of(operator) == before


def test_what_is_no_record_batch_is_refused(kind: str) -> None:
    with pytest.raises(PlanError, match="RecordBatch, not list"):
        OPERATORS[kind](spec_of(CITIES)).offer([{"id": 1}])  # type: ignore[arg-type]


def test_columns_in_another_order_are_accepted(kind: str) -> None:
    batch = batch_of(STREAM).select(["t", "id", "__code"])
    operator = OPERATORS[kind](spec_of(CITIES))
    drive(operator, [batch], expected=join_oracle(STREAM, CITIES, "id"))


# ================================================================ memory


def test_budget_below_the_minimum_is_refused_and_the_minimum_works(kind: str) -> None:
    spec = spec_of(CITIES, how="left")
    minimum = minimum_of(kind, spec)
    with pytest.raises(BudgetError, match="too small") as refused:
        OPERATORS[kind](replace(spec, budget=Budget(minimum - 1)))
    assert str(minimum) in str(refused.value)
    operator = OPERATORS[kind](replace(spec, budget=Budget(minimum)))
    expected = join_oracle(STREAM * 20, CITIES, "id", "left")
    drive(operator, [batch_of(STREAM * 20)], expected=expected, measure_arrays=True, borrowed=[spec, operator.spec])


def test_budget_below_what_is_held_is_refused(kind: str) -> None:
    spec = spec_of(CITIES)
    operator = OPERATORS[kind](spec)
    rows = [{"id": 2, "t": number} for number in range(200)]
    output = list(operator.offer(batch_of(rows)))
    before = state_of(operator)
    with pytest.raises(BudgetError, match="too small") as refused:
        operator.resize_budget(minimum_of(kind, spec) // 2)
    assert refused.value.minimum_bytes is not None
    assert state_of(operator) == before
    assert operator.budget == spec.budget
    output += operator.drain()
    assert_same_rows(rows_of(output), join_oracle(rows, CITIES, "id"))


def test_budget_can_shrink_and_grow_while_tuples_wait(kind: str) -> None:
    rows = [{"id": 2, "t": number} for number in range(50)]
    driver = Driver(OPERATORS[kind](spec_of(CITIES)))
    driver.offer(batch_of(rows))
    driver.call(lambda operator: operator.resize_budget("40kB"))
    driver.offer(batch_of(rows))
    driver.call(lambda operator: operator.resize_budget("1MB"))
    driver.offer(batch_of(rows))
    driver.drain()
    assert_same_rows(driver.rows(), join_oracle(rows * 3, CITIES, "id"))


@pytest.mark.parametrize("name", ["block_rows", "chunk_rows"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_retune_refuses_what_is_no_number_of_rows(kind: str, name: str, value: Any) -> None:
    operator = OPERATORS[kind](spec_of(CITIES))
    with pytest.raises(PlanError, match=name):
        operator.retune(**{name: value})


@pytest.fixture(scope="module")
def large_relation(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    """20,000 rows of 1.2 kB, so that a thousandth is 24 kB; a tenth of them with repeated keys."""
    numbers = np.arange(20_000)
    keys = np.where(numbers % 10 == 0, numbers // 100, numbers)
    table = pa.table({"id": keys, "n": numbers, "pay": [f"{number:01180d}" for number in numbers]})
    return Relation.build(table, tmp_path_factory.mktemp("contract") / "large", on="id", shards=1)


@pytest.mark.parametrize("percent", [0.1, 0.5, 1, 10, 100])
@pytest.mark.parametrize("ordered", [False, True])
def test_budgets_from_a_thousandth_of_the_relation_to_all_of_it(
    kind: str, percent: float, ordered: bool, large_relation: Relation
) -> None:
    generator = np.random.default_rng(11)
    print("seed 11")
    keys = generator.integers(0, 25_000, 300)
    rows = [{"id": int(key), "t": number} for number, key in enumerate(keys)]
    batch = batch_of(rows)
    budget = Budget.percent_of(large_relation.stats.bytes, percent)
    spec = join_spec(large_relation, batch.schema, select=["n"], ordered=ordered, budget=budget, how="left")
    operator = OPERATORS[kind](spec)
    relation_rows = large_relation.shard(0, columns=["id", "n"]).read_block(0, 20_000).rows.to_pylist()
    oracle: Any = join_oracle_by_tuple if ordered else join_oracle
    expected = oracle(rows, relation_rows, "id", "left", select=["n"])
    drive(
        operator,
        [batch.slice(start, 50) for start in range(0, 300, 50)],
        expected=None if ordered else expected,
        expected_groups=expected if ordered else None,
        measure_arrays=True,
        borrowed=[spec],
    )


# ================================================================ real relations


@EVERY_JOIN_TYPE
@pytest.mark.parametrize("key", ["id", "name"])
def test_relation_with_appended_changed_and_deleted_rows(kind: str, how: Any, key: str, tmp_path: Path) -> None:
    def rows_between(low: int, high: int, text: str) -> list[dict[str, Any]]:
        return [{"id": number, "name": f"n{number}", "text": text} for number in range(low, high)]

    relation = Relation.build(pa.Table.from_pylist(rows_between(0, 300, "old")), tmp_path / "r", on=key, shards=1)
    relation = relation.append(pa.Table.from_pylist(rows_between(250, 350, "more")))
    relation = relation.upsert(pa.Table.from_pylist(rows_between(100, 120, "new")))
    relation = relation.delete(pa.Table.from_pylist(rows_between(10, 60, "")))
    live = relation.shard(0).read_block(0, 10_000).rows.to_pylist()
    assert 300 < len(live) < 400
    stream = [{key: row[key], "t": number} for number, row in enumerate(rows_between(0, 400, ""))]
    schema = pa.schema({key: pa.int64() if key == "id" else pa.string(), "t": pa.int64()})
    (batch,) = stream_batches(stream, on=key, schema=schema)
    operator = OPERATORS[kind](
        join_spec(relation, batch.schema, how=how, select=["text"], budget="100kB", block_rows=37)
    )
    drive(operator, [batch], expected=join_oracle(stream, live, key, how, select=["text"]))


@pytest.mark.parametrize("io", ["map", "buffered"])
def test_ways_to_read_give_the_same(kind: str, io: Any, large_relation: Relation) -> None:
    rows = [{"id": number * 7, "t": number} for number in range(200)]
    batch = batch_of(rows)
    operator = OPERATORS[kind](join_spec(large_relation, batch.schema, select=["n"], budget="300kB", io=io))
    live = large_relation.shard(0, columns=["id", "n"]).read_block(0, 20_000).rows.to_pylist()
    drive(operator, [batch], expected=join_oracle(rows, live, "id", select=["n"]))


def test_only_what_the_join_needs_is_read(kind: str, large_relation: Relation) -> None:
    batch = batch_of([{"id": 5001, "t": 1}])
    spec = join_spec(large_relation, batch.schema, select=["n"], condition=Comparison("t", "<", "n"), budget="300kB")
    assert spec.shard.schema.names == ["n"]
    assert rows_of(drive(OPERATORS[kind](spec), [batch])) == [{"id": 5001, "t": 1, "n": 5001}]
    semi = join_spec(large_relation, batch.schema, how="semi", budget="300kB")
    assert semi.shard.schema.names == []
    assert rows_of(drive(OPERATORS[kind](semi), [batch])) == [{"id": 5001, "t": 1}]


# ================================================================ shedding


SHEDDING = [Random(rate=0.5, seed=3), Random(rate=1.0), OldestFirst(), LeastJoinedFirst()]


@pytest.mark.parametrize("policy", SHEDDING, ids=lambda policy: f"{policy.name}-{getattr(policy, 'rate', '')}")
@EVERY_JOIN_TYPE
def test_kept_output_is_exact_for_the_kept_tuples(kind: str, how: Any, policy: Any) -> None:
    rows = [{"id": number % 5, "t": number} for number in range(400)]
    spec = spec_of(CITIES, how=how, select=("city",), shed=policy)
    spec = replace(spec, budget=Budget(minimum_of(kind, spec) + 200))
    operator = OPERATORS[kind](spec)
    dropped: list[pa.RecordBatch] = []
    operator.hand_shed_to(dropped.append)
    batch = batch_of(rows)
    output = drive(operator, [batch.slice(start, 40) for start in range(0, 400, 40)])
    metrics = operator.metrics
    assert metrics.tuples_left == 400
    assert len({row["t"] for row in rows_of(dropped)}) == len(rows_of(dropped)) == metrics.shed_tuples
    assert all(rows[row["t"]] == row for row in rows_of(dropped))
    assert set(metrics.shed) <= {policy.name}
    given = rows_of(output)
    given_t = {row["t"] for row in given}
    assert not given_t & {row["t"] for row in rows_of(dropped)}
    # What was kept and gives nothing by itself cannot be seen in the output, so exactness is asked of what was given.
    expected = join_oracle([row for row in rows if row["t"] in given_t], CITIES, "id", how, select=["city"])
    assert_same_rows(given, expected)
    assert (
        len(given_t)
        == {
            "inner": metrics.matched_tuples,
            "semi": metrics.matched_tuples,
            "anti": metrics.unmatched_tuples,
            "left": metrics.matched_tuples + metrics.unmatched_tuples,
        }[how]
    )


@pytest.mark.parametrize("policy", SHEDDING, ids=lambda policy: f"{policy.name}-{getattr(policy, 'rate', '')}")
def test_nothing_is_shed_while_the_input_fits(kind: str, policy: Any) -> None:
    operator = OPERATORS[kind](spec_of(CITIES, shed=policy))
    drive(operator, [batch_of(STREAM)] * 5, expected=join_oracle(STREAM * 5, CITIES, "id"))
    assert operator.metrics.shed_tuples == 0


def test_nothing_is_shed_unless_asked_for(kind: str) -> None:
    rows = [{"id": number % 5, "t": number} for number in range(400)]
    spec = spec_of(CITIES)
    operator = OPERATORS[kind](replace(spec, budget=Budget(minimum_of(kind, spec))))
    drive(operator, [batch_of(rows)], expected=join_oracle(rows, CITIES, "id"))
    assert operator.metrics.shed == {}


def test_every_error_is_one_of_ours(kind: str) -> None:
    with pytest.raises(DovetailError):
        OPERATORS[kind](spec_of(CITIES, how="outer"))
