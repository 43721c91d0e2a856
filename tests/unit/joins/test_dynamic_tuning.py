"""A dynamic tuner and a real operator: parameters follow the arrival rate, and no result is lost or repeated."""

import numpy as np
import pyarrow as pa
import pytest

from dovetail.core.errors import BudgetError
from dovetail.core.memory import Budget
from dovetail.costs import CostFactors, JoinProfile
from dovetail.costs.dynamic import DynamicTuner
from dovetail.joins import JoinSpec, MeshJoin
from dovetail.testing.driver import Driver
from dovetail.testing.oracle import join_oracle
from dovetail.testing.rows import assert_same_rows, rows_of
from dovetail.testing.shard import MemoryShard

RELATION_ROWS = 2_000
SCHEMA = pa.schema({"__code": pa.int64(), "id": pa.int64(), "t": pa.int64()})
# Tuples per second, one second each: it doubles, stays, falls to a twentieth, and comes back in a burst.
RATES = [50, 50, 100, 200, 400, 400, 400, 20, 20, 20, 20, 900, 900, 10, 10, 300]


@pytest.mark.parametrize("how", ["inner", "left", "semi", "anti"])
def test_operator_follows_the_rate_exactly(how: str) -> None:
    rows = [{"id": key, "v": f"{key}"} for key in range(RELATION_ROWS)]
    schema = pa.schema({"id": pa.int64(), "v": pa.string()})
    shard = MemoryShard.of_rows(rows, schema, lambda row: row["id"])
    budget = Budget(120_000)
    spec = JoinSpec(shard=shard, stream_schema=SCHEMA, on=(("id", "id"),), how=how, select=("v",), budget=budget)
    profile = JoinProfile.with_overhead(relation_rows=RELATION_ROWS, relation_row_bytes=20, stream_tuple_bytes=16)
    factors = CostFactors.of_papers(seek_s=0.0, bandwidth_bytes_per_s=20_000)
    tuner = DynamicTuner("mesh", profile=profile, factors=factors, budget=Budget(60_000), time_constant_s=1.0)
    driver, generator, offered = Driver(MeshJoin(spec)), np.random.default_rng(8), []
    print("seed 8")
    changes = set()
    for second, rate in enumerate(RATES):
        codes = generator.integers(0, 2 * RELATION_ROWS, rate)
        batch = pa.record_batch({"__code": codes, "id": codes, "t": np.arange(rate) + 1_000 * second}, schema=SCHEMA)
        offered.append(batch)
        tuner.observe(rate, elapsed_s=1.0)
        plan = tuner.propose()
        if plan is not None:
            changes.add((plan.block_rows, plan.chunk_tuples))
            driver.call(lambda operator, plan=plan: retune(operator, plan.block_rows, plan.chunk_tuples))
        driver.offer(batch)
        for _ in range(3):
            driver.step()
    driver.drain()
    assert len(changes) >= 4, changes
    expected = join_oracle(rows_of(offered, drop=["__code"]), rows, "id", how, select=["v"])
    assert_same_rows(driver.rows(), expected)


def retune(operator: MeshJoin, block_rows: int, chunk_rows: int) -> None:
    """Take over what was proposed; a block that leaves too little room for what waits has to wait, too."""
    operator.retune(chunk_rows=chunk_rows)
    try:
        operator.retune(block_rows=block_rows)
    except BudgetError:
        print("refused", block_rows)
