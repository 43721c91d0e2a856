"""MESHJOIN's loop: which rows a tuple meets, when it leaves, what changes of b and w do to that."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dovetail.core.memory import Budget
from dovetail.joins import BatchPredicate, JoinSpec, MeshJoin, Range
from dovetail.testing.batches import stream_batches
from dovetail.testing.driver import Driver
from dovetail.testing.oracle import join_oracle
from dovetail.testing.rows import assert_same_rows
from dovetail.testing.shard import MemoryShard

RELATION_SCHEMA = pa.schema({"k": pa.int64(), "v": pa.int64()})
STREAM_SCHEMA = pa.schema({"k": pa.int64(), "t": pa.int64()})


def relation(count: int) -> list[dict[str, Any]]:
    return [{"k": number, "v": number} for number in range(count)]


def batch(*keys: int, first: int = 0) -> pa.RecordBatch:
    rows = [{"k": key, "t": first + number} for number, key in enumerate(keys)]
    return stream_batches(rows, on="k", schema=STREAM_SCHEMA)[0]


def driver_of(rows: int, **options: Any) -> Driver:
    shard = MemoryShard.of_rows(relation(rows), RELATION_SCHEMA, lambda row: row["k"])
    spec = JoinSpec(
        shard=shard, stream_schema=batch().schema, on=(("k", "k"),), **{"budget": Budget(100_000), **options}
    )
    return Driver(MeshJoin(spec))


def found(rows: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(row["t"], row["v"]) for row in rows]


def reads(driver: Driver) -> list[tuple[int, int]]:
    operator: Any = driver.operator
    blocks = list(operator.spec.shard.block_reads)
    operator.spec.shard.block_reads.clear()
    return blocks


def test_tuples_meet_blocks_as_in_the_papers_example() -> None:
    driver = driver_of(4, block_rows=2)
    driver.offer(batch(0, 3))
    assert found(driver.step()) == [(0, 0)]
    driver.offer(batch(0, 2, first=2))
    assert found(driver.step()) == [(3, 2), (1, 3)]
    # The first two have met all of R; the others wait for the first block.
    assert (driver.operator.pending, driver.operator.oldest) == (2, 2)
    assert found(driver.step()) == [(2, 0)]
    assert driver.operator.pending == 0
    assert reads(driver) == [(0, 2), (2, 4), (0, 2)]


def test_nothing_is_read_while_nothing_waits() -> None:
    driver = driver_of(4, block_rows=2)
    driver.step()
    assert reads(driver) == []
    assert driver.operator.metrics.disk_steps == 0


def test_last_block_is_shorter_and_a_tuple_still_meets_every_row_once() -> None:
    driver = driver_of(5, block_rows=2)
    driver.offer(batch(4))
    driver.step()
    driver.offer(batch(0, 1, 2, 3, 4, first=1))
    assert found(driver.step()) == [(3, 2), (4, 3)]
    assert found(driver.step()) == [(0, 4), (5, 4)]
    # The first tuple has left; the others have not met the first block.
    assert driver.operator.pending == 5
    assert found(driver.step()) == [(1, 0), (2, 1)]
    assert reads(driver) == [(0, 2), (2, 4), (4, 5), (0, 2)]


def test_larger_block_is_cut_where_a_tuple_would_meet_a_row_again() -> None:
    driver = driver_of(6, block_rows=1)
    driver.offer(batch(0))
    driver.step()
    driver.offer(batch(0, first=1))
    driver.call(lambda operator: operator.retune(block_rows=6))
    driver.step()
    assert driver.operator.pending == 1
    assert driver.rows() == [{"k": 0, "t": 0, "v": 0}]
    reads(driver)
    driver.offer(batch(3, first=2))
    assert found(driver.step()) == [(1, 0), (2, 3)]
    # The second tuple left after row 0, inside the block, so the block was read in two pieces.
    assert reads(driver) == [(0, 1), (1, 6)]
    assert driver.operator.pending == 0


@pytest.mark.parametrize("chunk_rows", [1, 3])
def test_at_most_w_tuples_enter_between_two_steps(chunk_rows: int) -> None:
    driver = driver_of(10, block_rows=5, chunk_rows=chunk_rows)
    driver.offer(batch(*range(9)))
    # Every chunk but the first had to wait for a step, and each leaves after two.
    assert driver.operator.metrics.disk_steps == -(-9 // chunk_rows) - 1
    assert driver.operator.pending <= 2 * chunk_rows
    driver.drain()
    assert sorted(found(driver.rows())) == [(number, number) for number in range(9)]


def test_w_changes_at_any_step() -> None:
    driver = driver_of(10, block_rows=5, chunk_rows=1)
    driver.offer(batch(1, 2))
    driver.call(lambda operator: operator.retune(chunk_rows=6))
    steps = driver.operator.metrics.disk_steps
    driver.offer(batch(3, 4, 5, first=2))
    assert driver.operator.metrics.disk_steps == steps
    driver.drain()
    assert sorted(found(driver.rows())) == [(number, number + 1) for number in range(5)]


def test_full_window_makes_room_with_steps() -> None:
    driver = driver_of(50, block_rows=10, budget=Budget(6_000))
    capacity = MeshJoin(driver.operator.spec).window_capacity  # type: ignore[attr-defined]
    keys = [number % 60 for number in range(3 * capacity)]
    driver.offer(batch(*keys))
    assert 0 < driver.operator.pending <= capacity
    assert driver.operator.metrics.cycles >= 2
    driver.drain()
    assert sorted(found(driver.rows())) == [(t, key) for t, key in enumerate(keys) if key < 50]


def test_semi_tuple_leaves_at_its_first_match_and_anti_tuple_at_the_end() -> None:
    semi = driver_of(4, block_rows=1, how="semi")
    semi.offer(batch(1, 9))
    assert (semi.step(), semi.operator.pending) == ([], 2)
    assert (semi.step(), semi.operator.pending) == ([{"k": 1, "t": 0}], 1)
    anti = driver_of(4, block_rows=1, how="anti")
    anti.offer(batch(1, 9))
    anti.step()
    assert (anti.step(), anti.operator.pending) == ([], 1)
    assert anti.drain() == [{"k": 9, "t": 1}]


def test_repeated_rows_of_a_value_cost_a_semi_join_one_probe() -> None:
    rows = [{"k": 5, "v": number} for number in range(1000)]
    shard = MemoryShard.of_rows(rows, RELATION_SCHEMA, lambda row: row["k"])
    spec = JoinSpec(shard=shard, stream_schema=batch().schema, on=(("k", "k"),), how="semi", block_rows=1000)
    join = MeshJoin(spec)
    list(join.offer(batch(*[5] * 20)))
    assert join._phases.state.window is not None
    pieces = list(join._phases.state.matcher.pairs(shard.read_block(0, 1000), join._phases.state.window, 100_000))
    assert sum(rows.size for rows, _ in pieces) == 20


@pytest.mark.parametrize("how", ["inner", "left", "semi", "anti"])
@pytest.mark.parametrize("budget_bytes", [8_000, 60_000])
def test_range_without_equality_is_searched_in_the_ordered_window(how: Any, budget_bytes: int) -> None:
    generator = np.random.default_rng(7)
    print("seed 7")
    rows = [{"low": int(low), "high": int(low + width)} for low, width in generator.integers(0, 30, (40, 2))]
    schema = pa.schema({"low": pa.int64(), "high": pa.int64()})
    shard = MemoryShard.of_rows(rows, schema, lambda row: 0)
    stream = [{"x": None if x == 0 else int(x), "t": t} for t, x in enumerate(generator.integers(0, 60, 120))]
    stream_schema = pa.schema({"x": pa.int64(), "t": pa.int64()})
    asked = 0

    def count_and_ask(s: pa.RecordBatch, r: pa.RecordBatch) -> Any:
        nonlocal asked
        asked += s.num_rows
        return Range("x", "low", "high").mask(s, r)

    expected = join_oracle(
        stream,
        rows,
        (),
        how,
        lambda s, r: None if s["x"] is None else bool(r["low"] <= s["x"] < r["high"]),
        equi=False,
        select=["low", "high"],
    )
    pairs_asked = []
    for condition in (Range("x", "low", "high"), BatchPredicate(count_and_ask, ["x"], ["low", "high"])):
        spec = JoinSpec(
            shard=shard,
            stream_schema=stream_schema,
            on=(),
            how=how,
            condition=condition,
            budget=Budget(budget_bytes),
            block_rows=7,
        )
        driver = Driver(MeshJoin(spec))
        for start in range(0, 120, 30):
            driver.offer(stream_batches(stream[start : start + 30], [], stream_schema)[0])
            driver.step()
        driver.drain()
        assert_same_rows(driver.rows(), expected)
        rejected = driver.operator.metrics.pairs_rejected
        pairs_asked.append(rejected)
    # The ordered window offers hardly a candidate that is none; the cross product offers them all.
    assert pairs_asked[0] * 4 < pairs_asked[1]
    assert asked > 0


def mesh_over(rows: int, batch_rows: int | None, budget_bytes: int = 20_000, **options: Any) -> MeshJoin:
    shard = MemoryShard(pa.Table.from_pylist(relation(rows)), list(range(rows)), batch_rows=batch_rows)
    budget = Budget(budget_bytes)
    return MeshJoin(JoinSpec(shard=shard, stream_schema=batch().schema, on=(("k", "k"),), budget=budget, **options))


def test_block_in_place_takes_no_memory_and_ends_with_its_record_batch() -> None:
    copied, in_place = mesh_over(5_000, None), mesh_over(5_000, batch_rows=1_600)
    assert copied.sizes()["block"] > 0 == in_place.sizes()["block"]
    assert in_place.block_rows == 4_096 > copied.block_rows
    assert in_place.window_capacity > copied.window_capacity
    driver = Driver(in_place)
    assert sorted(found(driver.offer(batch(7, 4_999)) + driver.drain())) == [(0, 7), (1, 4_999)]
    shard = in_place.spec.shard
    assert isinstance(shard, MemoryShard)
    assert shard.block_reads == [(0, 1_600), (1_600, 3_200), (3_200, 4_096), (4_096, 4_800), (4_800, 5_000)]


def test_interrupted_block_is_as_long_again_where_blocks_are_now_read_in_place() -> None:
    before, after = (mesh_over(20, batch_rows, block_rows=20) for batch_rows in (None, 8))
    list(before.offer(batch(*range(20))))
    before.results.max_rows = 6
    given = next(iter(before.step()))
    after.restore(before.snapshot())
    rest = [row for piece in after.drain() for row in piece.to_pylist()]
    assert given.num_rows == 6
    assert sorted(found(given.to_pylist() + rest)) == [(number, number) for number in range(20)]


def test_batch_that_was_let_go_is_not_held_while_the_next_one_is_made(monkeypatch):
    """It is no longer accounted for; held on to, it would be memory beyond the budget."""
    driver = driver_of(2_000, budget=Budget(60_000))
    plan, allocated = driver.operator.results.plan, []
    make = plan.joined

    def joined(*arguments: Any) -> pa.RecordBatch:
        allocated.append(pa.total_allocated_bytes())
        return make(*arguments)

    monkeypatch.setattr(plan, "joined", joined)
    assert list(driver.operator.offer(batch(*range(200)))) == []
    for batch_out in driver.operator.drain():
        del batch_out
    assert len(allocated) > 2, "several batches are needed to tell"
    assert set(allocated) == {allocated[0]}
