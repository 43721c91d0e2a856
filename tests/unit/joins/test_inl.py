"""Index nested loops: one lookup per tuple, a pool of pages that forgets the least recently used."""

import pyarrow as pa
import pytest

from dovetail.core.errors import BudgetError
from dovetail.core.memory import Budget
from dovetail.joins import IndexNestedLoopJoin, JoinSpec
from dovetail.testing.batches import stream_batches
from dovetail.testing.driver import Driver
from dovetail.testing.shard import MemoryShard

SCHEMA = pa.schema({"k": pa.int64(), "v": pa.int64()})
STREAM_SCHEMA = pa.schema({"k": pa.int64()})


def shard_of_pages() -> MemoryShard:
    """160 rows with the keys 0 to 159."""
    return MemoryShard.of_rows([{"k": k, "v": k} for k in range(160)], SCHEMA, lambda row: row["k"])


def driver_of(budget_bytes: int = 200_000) -> tuple[Driver, MemoryShard]:
    """Ten pages of 16 rows."""
    shard = shard_of_pages()
    spec = JoinSpec(
        shard=shard, stream_schema=batch(0).schema, on=(("k", "k"),), block_rows=16, budget=Budget(budget_bytes)
    )
    return Driver(IndexNestedLoopJoin(spec)), shard


def budget_for_a_pool_of(pages: int) -> int:
    """The least budget with which so many pages stay in the pool."""
    with pytest.raises(BudgetError) as refused:
        driver_of(1)
    budget_bytes = refused.value.minimum_bytes
    assert budget_bytes is not None
    while True:
        driver, shard = driver_of(budget_bytes)
        for _ in range(2):
            for page in range(pages):
                driver.offer(batch(16 * page))
        if len(shard.block_reads) == pages:
            return budget_bytes
        budget_bytes += 50


def batch(*keys: int) -> pa.RecordBatch:
    return stream_batches([{"k": key} for key in keys], on="k", schema=STREAM_SCHEMA)[0]


def test_every_tuple_is_looked_up_and_answered_at_once() -> None:
    driver, _ = driver_of()
    rows = driver.offer(batch(3, 500, 3))
    assert [row["v"] for row in rows] == [3, 3]
    assert driver.operator.pending == 0
    assert driver.operator.metrics.lookups == 3


def test_pages_in_the_pool_are_not_read_again() -> None:
    driver, shard = driver_of()
    driver.offer(batch(1, 2, 40, 3))
    driver.offer(batch(4, 41))
    assert shard.block_reads == [(0, 16), (32, 48)]


def test_least_recently_used_page_leaves_the_pool() -> None:
    driver, shard = driver_of(budget_for_a_pool_of(2))
    driver.offer(batch(0))
    driver.offer(batch(20))
    driver.offer(batch(1))
    driver.offer(batch(40))
    assert len(shard.block_reads) == 3
    driver.offer(batch(2))
    assert len(shard.block_reads) == 3
    driver.offer(batch(21))
    assert shard.block_reads == [(0, 16), (16, 32), (32, 48), (16, 32)]


def test_the_pool_gets_the_budget() -> None:
    driver, shard = driver_of()
    for _ in range(3):
        driver.offer(batch(*range(160)))
    assert len(shard.block_reads) == 10
    assert driver.operator.sizes()["pool"] >= 160 * 16


def test_a_new_page_size_starts_with_an_empty_pool() -> None:
    driver, shard = driver_of()
    driver.offer(batch(0))
    driver.call(lambda operator: operator.retune(block_rows=8))
    assert driver.operator.sizes()["pool"] == 0
    driver.offer(batch(9))
    assert shard.block_reads[-1] == (8, 16)
