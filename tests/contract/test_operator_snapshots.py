"""What every semi-stream join saves, takes back, and refuses to take back."""

import itertools
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from dovetail.core.errors import BudgetError, PlanError, StateError
from dovetail.core.memory import Budget
from dovetail.costs import CostFactors
from dovetail.joins import (
    OPERATORS,
    Comparison,
    SemiStreamOperator,
    Snapshot,
)
from dovetail.testing.cities import (
    CITIES,
    CITY_SCHEMA,
    STREAM,
    batch_of,
    minimum_of,
    spec_of,
    state_of,
)
from dovetail.testing.shard import MemoryShard
from dovetail.testing.snapshots import through_storage

pytestmark = pytest.mark.parametrize("kind", list(OPERATORS))
EVERY_JOIN_TYPE = pytest.mark.parametrize("how", ["inner", "left", "semi", "anti"])


# ================================================================ saving and restoring


def waiting_operator(kind: str, **options: Any) -> SemiStreamOperator:
    operator = OPERATORS[kind](spec_of(CITIES, **options))
    list(operator.offer(batch_of(STREAM)))
    return operator


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"identity": {"relation": "cities", "version": 2, "shard": 0}}, "version 1, the operator has 2"),
        ({"identity": {"relation": "towns", "version": 1, "shard": 0}}, "relation 'cities', the operator has 'towns'"),
        ({"identity": {"relation": "cities", "version": 1, "shard": 1}}, "shard 0, the operator has 1"),
        ({"how": "left"}, "how 'inner', the operator has 'left'"),
        ({"ordered": True}, "ordered False, the operator has True"),
        ({"code_kind": "xxhash64"}, "code_kind 'value', the operator has 'xxhash64'"),
        ({"condition": Comparison("t", "<", "until")}, "condition None"),
    ],
)
def test_snapshot_of_something_else_is_refused(kind: str, change: dict[str, Any], message: str) -> None:
    saved = waiting_operator(kind).snapshot()
    other = waiting_operator(kind, **change)
    before = state_of(other)
    with pytest.raises(StateError, match=message):
        other.restore(saved)
    assert state_of(other) == before


def test_snapshot_of_another_version_is_refused_even_where_nobody_named_the_relation(kind: str) -> None:
    table = pa.Table.from_pylist(CITIES, schema=CITY_SCHEMA)
    codes = [row["id"] for row in CITIES]
    shards = [MemoryShard(table, codes, version=version) for version in (1, 2)]
    first, second = (OPERATORS[kind](spec_of(CITIES, shard=shard, identity={})) for shard in shards)
    with pytest.raises(StateError, match="shard_version"):
        second.restore(first.snapshot())


def test_snapshot_of_another_operator_is_refused(kind: str) -> None:
    operator = waiting_operator(kind)
    before = state_of(operator)
    saved = replace(operator.snapshot(), kind="something else")
    with pytest.raises(StateError, match="snapshot is of 'something else'"):
        operator.restore(saved)
    assert state_of(operator) == before


@pytest.mark.parametrize("damage", ["values", "metrics", "chunks", "no window", "no chunks"])
def test_damaged_snapshot_is_refused(kind: str, damage: str) -> None:
    saved = waiting_operator(kind).snapshot()
    values = dict(saved.values)
    if damage == "values":
        values = {}
    elif damage == "metrics":
        values["metrics"] = {"no such counter": 1}
    elif damage == "chunks":
        values["chunks"] = [["x", 0, 0]]
    tables = dict(saved.tables)
    if damage.startswith("no "):
        if not values["chunks"]:
            # Nothing waits in it: a window that nobody accounts for is as wrong.
            values["chunks"] = [[1, 0, 0]]
        elif damage == "no window":
            del tables["window"]
        else:
            values["chunks"] = []
    operator = waiting_operator(kind)
    before = state_of(operator)
    with pytest.raises(StateError):
        operator.restore(Snapshot(saved.kind, saved.fingerprint, tables, values))
    assert state_of(operator) == before


def test_offer_that_is_given_up_has_put_out_what_it_accepted(kind: str) -> None:
    spec = spec_of(CITIES, how="left")
    operator = OPERATORS[kind](replace(spec, budget=Budget(minimum_of(kind, spec))))
    offered = operator.offer(batch_of([{"id": None, "t": number} for number in range(200)]))
    given = next(offered).num_rows
    offered.close()  # type: ignore[attr-defined]
    assert operator.metrics.stream_tuples_in == operator.metrics.unmatched_tuples == given < 200


def test_block_joined_in_part_keeps_its_size(kind: str) -> None:
    """The pairs that are done with are counted, so a shorter block would lose or repeat results."""
    spec = spec_of([{"id": 2, "city": "Oslo", "until": number} for number in range(400)], block_rows=400)
    operator = OPERATORS[kind](replace(spec, budget=Budget(minimum_of(kind, spec) + 4_000)))
    rows = [row for batch in operator.offer(batch_of([{"id": 2, "t": 0}])) for row in batch.to_pylist()]
    step = operator.step()
    rows += [row for batch in itertools.islice(step, 1) for row in batch.to_pylist()]
    step.close()  # type: ignore[attr-defined]
    if operator.pending and len(rows) < 400:
        with suppress(PlanError):
            operator.retune(block_rows=1)
    rows += [row for batch in operator.drain() for row in batch.to_pylist()]
    assert len(rows) == 400


def test_snapshot_that_does_not_fit_the_budget_is_refused(kind: str) -> None:
    rows = [{"id": 2, "t": number} for number in range(500)]
    operator = OPERATORS[kind](spec_of(CITIES))
    list(operator.offer(batch_of(rows)))
    small = OPERATORS[kind](replace(operator.spec, budget=Budget(minimum_of(kind, operator.spec))))
    if operator.pending == 0:
        small.restore(operator.snapshot())
        assert small.metrics.stream_tuples_in == 500, "nothing waits, so everything fits"
        assert small.metrics.output_rows == 1000
        return
    before = state_of(small)
    with pytest.raises(BudgetError, match="too small"):
        small.restore(operator.snapshot())
    assert state_of(small) == before


@pytest.mark.parametrize("calibrated", [False, True])
def test_explain_tells_what_it_does_now(kind: str, calibrated: bool) -> None:
    operator = waiting_operator(kind)
    list(operator.drain())
    plan = operator.explain(CostFactors.of_papers(probe_s=1e-7, output_s=1e-7) if calibrated else None)
    assert plan.strategy == kind
    assert plan.block_rows == operator.block_rows
    assert plan.budget_bytes == operator.budget.total_bytes
    assert plan.total_bytes == operator.size()
    assert plan.service_rate > 0
    assert kind in plan.text()
    assert plan.as_dict()["strategy"] == kind


def test_counters_go_on_after_a_restore(kind: str) -> None:
    operator = waiting_operator(kind)
    fresh = OPERATORS[kind](operator.spec)
    fresh.restore(through_storage(operator.snapshot()))
    list(fresh.drain())
    assert fresh.metrics.stream_tuples_in == len(STREAM)
    assert fresh.metrics.tuples_left == len(STREAM)
