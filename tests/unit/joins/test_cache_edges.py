"""Joins behind a cache where memory is short: values with very many rows, rows longer than the mean, given-up steps."""

import itertools
import os
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pyarrow as pa
import pytest

from dovetail.core.errors import BudgetError
from dovetail.core.memory import Budget
from dovetail.costs.costs import CostFactors, Curve
from dovetail.joins import OPERATORS, AutoJoin, BalancedJoin, JoinSpec, Random, SemiStreamOperator, join_spec
from dovetail.relation import Relation
from dovetail.testing.batches import stream_batches
from dovetail.testing.driver import Driver
from dovetail.testing.oracle import join_oracle, join_oracle_by_tuple
from dovetail.testing.rows import assert_same_groups, assert_same_rows, rows_of
from dovetail.testing.shard import MemoryShard
from dovetail_lab.workloads import Zipf

IS_FULL_SIZE = not numba.config.DISABLE_JIT and "DOVETAIL_FORCE_BUCKETS" not in os.environ
STREAM = pa.schema({"id": pa.int64(), "t": pa.int64()})
LOOKUP = CostFactors(seek_s=0.0, bandwidth_bytes_per_s=1e12, probe_s=Curve.constant(1e3))
SCAN = CostFactors(
    seek_s=10.0, bandwidth_bytes_per_s=1e6, lookup_s=1e9, gather_s=1e9, probe_s=Curve.constant(1e-3), step_s=1e-6
)


def batch_of(codes: Any, first: int = 0) -> pa.RecordBatch:
    rows = [{"id": int(code), "t": first + number} for number, code in enumerate(codes)]
    return stream_batches(rows, on="id", schema=STREAM)[0]


def rows_offered(batches: list[pa.RecordBatch]) -> list[dict[str, Any]]:
    return rows_of(batches, drop=["__code"])


def minimum_budget(make: Any, spec: JoinSpec) -> int:
    with pytest.raises(BudgetError) as refused:
        make(replace(spec, budget=Budget(1)))
    assert refused.value.minimum_bytes is not None
    return refused.value.minimum_bytes


# ------------------------------------------------------------------------------------------------ very many rows


def test_auto_looks_up_a_value_with_very_many_rows_within_bounded_memory(tmp_path: Path) -> None:
    """Positions of all its rows would take 5 MB for every tuple of it."""
    count = 300_000 if IS_FULL_SIZE else 3_000
    keys = np.concatenate([np.arange(100), np.full(count, 50)])
    relation = Relation.build(pa.table({"id": keys, "v": np.arange(keys.size)}), tmp_path / "r", on="id", shards=1)
    batch = batch_of([3, 50, 4, 50, 99])
    operator = AutoJoin(join_spec(relation, batch.schema, budget="100kB"), factors=LOOKUP)
    assert operator.looks_up
    # What a compiler takes is not what is measured: everything is compiled by another operator first.
    for _ in AutoJoin(operator.spec, factors=LOOKUP).offer(batch):
        pass
    tracemalloc.start()
    found: Counter[int] = Counter()
    for out in operator.offer(batch):
        for entry in out.column("id").value_counts():
            found[entry["values"].as_py()] += entry["counts"].as_py()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert operator.pending == 0
    assert peak_bytes < 500_000
    assert found == {3: 1, 4: 1, 99: 1, 50: 2 * (count + 1)}


# ------------------------------------------------------------------------------------------------ long rows


@pytest.fixture(scope="module")
def uneven_relation(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    """Rows of 20 bytes where the mean is taken from, at the front, and of a kilobyte behind."""
    keys = np.arange(6_000)
    texts = ["x" if key < 4_500 else "y" * 1_000 for key in keys.tolist()]
    table = pa.table({"id": keys, "v": texts})
    return Relation.build(table, tmp_path_factory.mktemp("uneven") / "r", on="id", shards=1)


@pytest.mark.parametrize("kind", list(OPERATORS))
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("budget", [60_000, 300_000] if IS_FULL_SIZE else [300_000])
def test_rows_longer_than_the_mean_do_not_stop_a_stream(
    kind: str, ordered: bool, budget: int, uneven_relation: Relation
) -> None:
    zipf = Zipf(6_000, exponent=1.0, order="shuffled", seed=3)
    print("seed 3")
    batches = [batch_of(zipf.sample(200) - 1, 200 * number) for number in range(4)]
    spec = join_spec(uneven_relation, batches[0].schema, how="left", budget=budget, ordered=ordered)
    driver = Driver(OPERATORS[kind](spec))
    for batch in batches:
        driver.offer(batch)
        driver.step()
    driver.drain()
    relation_rows = [{"id": key, "v": "x" if key < 4_500 else "y" * 1_000} for key in range(6_000)]
    if ordered:
        assert_same_groups(driver.rows(), join_oracle_by_tuple(rows_offered(batches), relation_rows, "id", "left"))
    else:
        assert_same_rows(driver.rows(), join_oracle(rows_offered(batches), relation_rows, "id", "left"))


# ------------------------------------------------------------------------------------------------ given-up steps


def small_shard(keys: int, rows_per_key: int = 1) -> tuple[MemoryShard, list[dict[str, Any]]]:
    rows = [{"id": key, "v": f"{key}-{n}"} for key in range(keys) for n in range(rows_per_key)]
    schema = pa.schema({"id": pa.int64(), "v": pa.string()})
    return MemoryShard.of_rows(rows, schema, lambda row: row["id"]), rows


@pytest.mark.parametrize("how", ["inner", "left"])
def test_auto_learns_from_steps_that_are_given_up(how: Any) -> None:
    shard, rows = small_shard(200)
    batch = batch_of([0])
    spec = JoinSpec(
        shard=shard,
        stream_schema=batch.schema,
        on=(("id", "id"),),
        how=how,
        select=("v",),
        block_rows=50,
        budget=Budget(60_000),
    )
    operator = AutoJoin(spec, factors=SCAN)
    assert operator.leaves_early
    # Half of the values have no row; their tuples are put out when the block has been learnt from.
    zipf = Zipf(400, exponent=1.2, order="shuffled", seed=9)
    print("seed 9")
    batches, output = [], []
    for number in range(150):
        batches.append(batch_of(zipf.sample(40) - 1, 40 * number))
        output += operator.offer(batches[-1])
        for _ in range(3):
            step: Any = operator.step()
            output += itertools.islice(step, 2)
            step.close()
    output += operator.drain()
    assert operator.metrics.cache_hits > 0
    assert_same_rows(rows_of(output), join_oracle(rows_offered(batches), rows, "id", how))


# ------------------------------------------------------------------------------------------------ accepted budgets


@pytest.mark.parametrize("make", [BalancedJoin, AutoJoin])
@pytest.mark.parametrize("extra_bytes", [0, 500, 2_000, 5_000, 12_000, 40_000])
def test_ordered_output_and_a_cache_go_together_in_every_budget_that_is_accepted(make: Any, extra_bytes: int) -> None:
    shard, rows = small_shard(150, rows_per_key=2)
    spec = JoinSpec(
        shard=shard,
        stream_schema=batch_of([0]).schema,
        on=(("id", "id"),),
        how="left",
        select=("v",),
        ordered=True,
        block_rows=20,
    )
    spec = replace(spec, budget=Budget(minimum_budget(make, spec) + extra_bytes))
    zipf = Zipf(170, exponent=1.0, order="shuffled", seed=2)
    print("seed 2")
    batches = [batch_of(zipf.sample(60) - 1, 60 * number) for number in range(25)]
    driver = Driver(make(spec, switching_factor=0.1), measure_arrays=True, borrowed=[spec])
    for batch in batches:
        driver.offer(batch)
        driver.step()
    driver.drain()
    assert_same_groups(driver.rows(), join_oracle_by_tuple(rows_offered(batches), rows, "id", "left"))


# ------------------------------------------------------------------------------------------------ shedding


@pytest.mark.parametrize("make", [OPERATORS["mesh"], BalancedJoin, lambda spec: AutoJoin(spec, factors=SCAN)])
def test_tuples_dropped_at_random_count_in_the_order_of_the_stream(make: Any) -> None:
    """An offer that is given up has taken in the first tuples of its batch, dropped ones included, and no others."""
    shard, rows = small_shard(50)
    spec = JoinSpec(
        shard=shard,
        stream_schema=batch_of([0]).schema,
        on=(("id", "id"),),
        how="left",
        select=("v",),
        block_rows=10,
        shed=Random(rate=0.5, seed=3),
    )
    spec = replace(spec, budget=Budget(minimum_budget(make, spec) + 100))
    operator: SemiStreamOperator = make(spec)
    whole = batch_of(np.arange(600) % 60)
    given, output, rest = 0, [], whole
    while rest.num_rows:
        offered: Any = operator.offer(rest)
        taken = list(itertools.islice(offered, 1))
        offered.close()
        output += taken
        given += len(taken)
        accepted = operator.metrics.stream_tuples_in
        waiting_or_gone = {row["t"] for row in rows_of(output)}
        assert all(t < accepted for t in waiting_or_gone)
        rest = whole.slice(accepted)
    output += operator.drain()
    assert given > 1
    assert operator.metrics.shed["random"] > 0
    seen = {row["t"] for row in rows_of(output)}
    assert len(seen) + operator.metrics.shed_tuples == 600
    kept = [row for row in rows_offered([whole]) if row["t"] in seen]
    assert_same_rows(rows_of(output), join_oracle(kept, rows, "id", "left"))
