"""SSBJ: what enters the cache and when, what leaves it, and that nothing but the time of results depends on it."""

import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.core.errors import PlanError
from dovetail.core.memory import Budget
from dovetail.joins import AutoJoin, BalancedJoin, BatchPredicate, JoinSpec, join_spec
from dovetail.joins.balanced import Phase
from dovetail.relation import Relation
from dovetail.testing.driver import Driver, drive
from dovetail.testing.oracle import join_oracle
from dovetail.testing.rows import assert_same_rows, rows_of
from dovetail.testing.shard import MemoryShard
from dovetail.testing.strategies import join_cases, schedules
from dovetail_lab.workloads import Zipf, make_relation_table

SCHEMA = pa.schema({"__code": pa.int64(), "id": pa.int64(), "t": pa.int64()})
RELATION = pa.schema({"id": pa.int64(), "name": pa.string()})


def relation_rows(counts: dict[int, int]) -> list[dict[str, Any]]:
    """Rows per join value, each with a name of its own."""
    return [{"id": code, "name": f"{code}-{n}"} for code, count in counts.items() for n in range(count)]


def spec_of(rows: list[dict[str, Any]], budget: int = 200_000, **options: Any) -> JoinSpec:
    shard = MemoryShard.of_rows(rows, RELATION, lambda row: row["id"])
    return JoinSpec(
        shard=shard, stream_schema=SCHEMA, on=(("id", "id"),), select=("name",), budget=Budget(budget), **options
    )


class Stream:
    """Batches of given codes, every tuple with a number of its own."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def batch(self, *codes: int) -> pa.RecordBatch:
        first = len(self.rows)
        self.rows += [{"id": code, "t": first + n} for n, code in enumerate(codes)]
        numbers = list(range(first, first + len(codes)))
        return pa.record_batch({"__code": list(codes), "id": list(codes), "t": numbers}, schema=SCHEMA)


def run_cycle(driver: Driver, batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Offer a batch and step until it has met the whole relation."""
    return driver.offer(batch) + driver.drain()


def cached_values(operator: BalancedJoin) -> dict[int, int]:
    """Rows per cached value."""
    values = operator.cache.values()
    return dict(zip(values.codes.tolist(), values.counts.tolist(), strict=True))


# ------------------------------------------------------------------------------------------------ exactness


@pytest.mark.parametrize("make", [BalancedJoin, AutoJoin])
@settings(max_examples=60)
@given(data=st.data())
def test_oracle_objective_memory_gives_the_exact_join(make: Any, data: st.DataObject) -> None:
    case = data.draw(join_cases(max_stream_rows=60))
    how, ordered = data.draw(st.sampled_from(["inner", "left", "semi", "anti"])), data.draw(st.booleans())
    batches = case.batches(seed=data.draw(st.integers(0, 99)), max_batch_rows=data.draw(st.sampled_from([1, 8, 40])))
    spec = JoinSpec(
        shard=case.shard(),
        stream_schema=batches[0].schema,
        on=case.on,
        code_kind=case.code_kind,
        how=how,
        ordered=ordered,
        budget=Budget(data.draw(st.sampled_from([20_000, 60_000]))),
        block_rows=data.draw(st.none() | st.integers(1, 9)),
    )
    drive(
        make(spec, objective="memory"),
        batches,
        data.draw(schedules(len(batches))),
        make_operator=lambda: make(spec, objective="memory"),
        expected=None if ordered else case.expected(how),
        expected_groups=case.expected_groups(how) if ordered else None,
    )


# ------------------------------------------------------------------------------------------------ entering


def test_balanced_caches_after_a_counting_and_a_switching_cycle():
    driver, stream = Driver(BalancedJoin(spec_of(relation_rows({1: 2, 2: 1})))), Stream()
    codes = [1] * 30 + [2] * 30
    assert driver.operator.phase is Phase.COUNTING
    run_cycle(driver, stream.batch(*codes))
    assert cached_values(driver.operator) == {}
    run_cycle(driver, stream.batch(*codes))
    assert driver.operator.phase is Phase.PHASE_OUT
    assert cached_values(driver.operator) == {1: 2, 2: 1}
    rows = driver.offer(stream.batch(1, 2))
    assert sorted(row["name"] for row in rows) == ["1-0", "1-1", "2-0"]
    assert driver.operator.pending == 0
    assert_same_rows(driver.rows(), join_oracle(stream.rows, relation_rows({1: 2, 2: 1}), "id"))


def test_balanced_obeys_the_cache_inequality():
    """m rows are cached if they take less than n waiting tuples do, with everything that belongs to them."""
    counts = {1: 1, 2: 80}
    operator = BalancedJoin(spec_of(relation_rows(counts)), objective="memory")
    driver, stream = Driver(operator), Stream()
    for _ in range(2):
        run_cycle(driver, stream.batch(*[1] * 8, *[2] * 8))
    row_bytes, tuple_bytes = operator.spec.shard.row_bytes, operator._border.tuple_bytes
    assert row_bytes + 20 < 8 * tuple_bytes < 80 * row_bytes
    assert cached_values(operator) == {1: 1}


def test_balanced_caches_values_that_come_often_first_where_there_is_little_room():
    counts = dict.fromkeys(range(200), 1)
    spec = spec_of(relation_rows(counts), budget=12_000)
    driver, stream = Driver(BalancedJoin(spec)), Stream()
    codes = [code for code in range(200) for _ in range(1 + 30 * (code < 5))]
    # In the order of the codes, a window would see one hot value at a time.
    chance = random.Random(7)
    for _ in range(24):
        chance.shuffle(codes)
        run_cycle(driver, stream.batch(*codes))
    cached = cached_values(driver.operator)
    assert set(range(5)) <= set(cached)
    assert len(cached) < 150
    assert_same_rows(driver.rows(), join_oracle(stream.rows, relation_rows(counts), "id"))


def test_balanced_switches_no_part_of_a_value():
    """Rows of a value in several blocks, steps of one row, tuples that come in mid-cycle: all rows or none."""
    counts = {1: 5, 2: 3, 3: 4}
    spec = spec_of(relation_rows(counts), block_rows=1)
    driver, stream = Driver(BalancedJoin(spec)), Stream()
    for _ in range(60):
        driver.offer(stream.batch(1, 1, 1, 2, 2, 2, 3, 3))
        driver.step()
        assert all(count == counts[code] for code, count in cached_values(driver.operator).items())
    driver.drain()
    assert cached_values(driver.operator) == counts
    assert_same_rows(driver.rows(), join_oracle(stream.rows, relation_rows(counts), "id"))


def test_balanced_finishes_waiting_tuples_by_scan_when_their_value_enters_the_cache():
    rows = relation_rows({1: 1, 5: 1, 9: 1})
    driver, stream = Driver(BalancedJoin(spec_of(rows, block_rows=1))), Stream()
    for _ in range(2):
        run_cycle(driver, stream.batch(*[1] * 30))
    while driver.operator.phase is not Phase.SWITCHING:
        driver.offer(stream.batch(*[9] * 30))
        driver.step()
    driver.offer(stream.batch(*[9] * 7))
    while driver.operator.phase is not Phase.PHASE_OUT:
        driver.step()
        driver.offer(stream.batch(9))
    waited = driver.operator.pending
    assert 9 in cached_values(driver.operator)
    assert waited > 0
    driver.drain()
    assert_same_rows(driver.rows(), join_oracle(stream.rows, rows, "id"))


@pytest.mark.parametrize("factor", [0.5, 1.0, 50.0])
def test_balanced_switching_factor_raises_the_bar(factor):
    operator = BalancedJoin(spec_of(relation_rows({1: 1})), objective="memory", switching_factor=factor)
    driver, stream = Driver(operator), Stream()
    for _ in range(3):
        run_cycle(driver, stream.batch(*[1] * 6))
    is_worth_it = 6 * operator._border.tuple_bytes > factor * (operator.spec.shard.row_bytes + 20)
    assert (cached_values(operator) == {1: 1}) is is_worth_it


# ------------------------------------------------------------------------------------------------ leaving


def test_balanced_evicts_value_gone_cold_once_in_ten_cycles():
    rows = relation_rows({1: 1, 2: 1})
    driver, stream = Driver(BalancedJoin(spec_of(rows))), Stream()
    for _ in range(2):
        run_cycle(driver, stream.batch(*[1] * 30, *[2] * 30))
    assert cached_values(driver.operator) == {1: 1, 2: 1}
    evictions = []
    for _ in range(24):
        # Value 1 is never asked for again; what makes the scan go on are tuples without a match.
        run_cycle(driver, stream.batch(*[2] * 30, 77 + len(stream.rows)))
        evictions.append(driver.operator.metrics.cache_evictions)
    assert cached_values(driver.operator).get(1) is None
    assert cached_values(driver.operator)[2] == 1
    changes = [cycle for cycle in range(1, 24) if evictions[cycle] != evictions[cycle - 1]]
    assert all(later - earlier >= 10 for earlier, later in pairwise(changes))
    assert_same_rows(driver.rows(), join_oracle(stream.rows, rows, "id"))


def test_balanced_keeps_value_that_has_just_entered():
    """A value that entered shortly before the tenth cycle was asked for in few cycles only; that is accounted for."""
    rows = relation_rows({1: 1})
    driver, stream = Driver(BalancedJoin(spec_of(rows))), Stream()
    for _ in range(7):
        run_cycle(driver, stream.batch(500 + len(stream.rows)))
    for _ in range(30):
        run_cycle(driver, stream.batch(*[1] * 20, 500 + len(stream.rows)))
    assert driver.operator.metrics.cache_insertions == 1
    assert cached_values(driver.operator).get(1) == 1


# ------------------------------------------------------------------------------------------------ no match


@pytest.mark.parametrize("how", ["inner", "left", "semi", "anti"])
def test_balanced_keeps_values_without_rows_as_negative(how):
    rows = relation_rows({1: 1})
    driver, stream = Driver(BalancedJoin(spec_of(rows, how=how))), Stream()
    for _ in range(4):
        run_cycle(driver, stream.batch(*[7] * 20))
    assert cached_values(driver.operator) == {7: 0}
    given = driver.offer(stream.batch(7, 7))
    assert driver.operator.pending == 0
    assert len(given) == (2 if how in ("left", "anti") else 0)
    assert driver.operator.metrics.negative_hits >= 2
    assert_same_rows(driver.rows(), join_oracle(stream.rows, rows, "id", how, select=["name"]))


def test_balanced_takes_a_rejected_match_for_no_proof_of_no_row():
    """With a condition, tuples may go unmatched although their value has rows; a later tuple may match."""
    rows = relation_rows({1: 1})
    condition = BatchPredicate(lambda stream, _: stream.column("t").to_numpy() >= 100, ["t"], [], name="late")
    driver, stream = Driver(BalancedJoin(spec_of(rows, how="left", condition=condition))), Stream()
    for _ in range(8):
        run_cycle(driver, stream.batch(*[1] * 20, *[7] * 20))
    assert cached_values(driver.operator) == {1: 1, 7: 0}
    expected = join_oracle(stream.rows, rows, "id", "left", lambda s, r: s["t"] >= 100, select=["name"])
    assert_same_rows(driver.rows(), expected)


# ------------------------------------------------------------------------------------------------ memory


def test_balanced_becomes_a_main_memory_join_on_a_uniform_stream(tmp_path):
    """Theorem 3, in small: with enough memory all of the relation ends up in the cache, and the disk is left alone."""
    rows = 2_000
    relation = Relation.build(make_relation_table(rows, row_bytes=60), str(tmp_path / "r"), on="k", shards=1)
    generator = np.random.default_rng(5)

    def batch(size: int = 10_000) -> pa.RecordBatch:
        codes = generator.integers(1, rows + 1, size)
        return pa.record_batch({"__code": codes, "k": codes})

    budget = 8 * relation.stats.bytes
    operator = BalancedJoin(join_spec(relation, batch(1).schema, budget=budget))
    for _ in range(50):
        for _ in operator.offer(batch()):
            pass
        for _ in operator.drain():
            pass
    assert len(operator.cache) == rows
    before = operator.metrics.copy()
    given = sum(out.num_rows for out in operator.offer(batch()))
    assert given == 10_000
    assert operator.pending == 0
    assert (operator.metrics - before).relation_rows_read == 0


def test_balanced_keeps_its_window_full_for_values_that_are_frequent_by_chance(tmp_path):
    """On a uniform stream a few values come twice; to make room for them would cost more than they can save."""
    rows = 50_000
    relation = Relation.build(make_relation_table(rows), str(tmp_path / "r"), on="k", shards=1)
    schema = pa.schema({"__code": pa.int64(), "k": pa.int64()})
    # Small blocks: the room through which the window is moved is small against it.
    operator = BalancedJoin(join_spec(relation, schema, budget=rows * 12, block_rows=256, io="buffered"))
    generator = np.random.default_rng(7)
    served = []
    for _ in range(12):
        before = operator.metrics.copy()
        while (operator.metrics - before).relation_rows_read < rows:
            codes = generator.integers(1, rows + 1, 512)
            for out in operator.offer(pa.record_batch({"__code": codes, "k": codes}, schema=schema)):
                del out
        done = operator.metrics - before
        served.append(done.tuples_left / done.relation_rows_read * rows)
    assert min(served[1:]) > 0.9 * operator.window_capacity


def test_balanced_gives_the_window_back_what_the_cache_no_longer_needs():
    rows = relation_rows(dict.fromkeys(range(50), 1))
    driver, stream = Driver(BalancedJoin(spec_of(rows, budget=60_000))), Stream()
    at_first = driver.operator.window_capacity
    for _ in range(6):
        run_cycle(driver, stream.batch(*(np.arange(400) % 50).tolist()))
    beside_cache = driver.operator.window_capacity
    assert beside_cache < at_first
    for _ in range(40):
        run_cycle(driver, stream.batch(900 + len(stream.rows)))
    assert driver.operator.window_capacity > beside_cache
    assert len(driver.operator.cache) < 50


def test_balanced_components_add_up_and_obey_the_budget_at_every_moment():
    zipf = Zipf(300, exponent=1.0, order="shuffled", seed=3)
    rows = relation_rows({code: 1 + code % 3 for code in range(1, 301)})
    spec = spec_of(rows, budget=30_000, block_rows=20)
    driver = Driver(BalancedJoin(spec), measure_arrays=True, borrowed=[spec])
    stream = Stream()
    for _ in range(150):
        driver.offer(stream.batch(*zipf.sample(40).tolist()))
    driver.drain()
    operator = driver.operator
    assert operator.metrics.cache_hits > len(stream.rows) // 4
    assert {"cache", "learning", "switching", "window", "block"} <= set(operator.sizes())
    expected = Counter(row["id"] for row in stream.rows)
    assert len(driver.rows()) == sum(count * (1 + code % 3) for code, count in expected.items())


def test_balanced_with_objective_memory_holds_what_the_stream_needs():
    rows = relation_rows(dict.fromkeys(range(50), 1))
    spec = spec_of(rows, budget=2_000_000, block_rows=10)
    stream = Stream()
    driver = Driver(BalancedJoin(spec, objective="memory"), measure_arrays=True, borrowed=[spec])
    generator = np.random.default_rng(8)

    def run_cycles(cycles: int, tuples_per_step: int) -> int:
        until = driver.operator._scan.odometer + 50 * cycles
        while driver.operator._scan.odometer < until:
            driver.offer(stream.batch(*generator.integers(0, 1_000_000, tuples_per_step).tolist()))
            driver.step()
        return driver.operator.size()

    slow = run_cycles(4, 20)
    fast = run_cycles(4, 400)
    slow_again = run_cycles(8, 20)
    assert slow < fast / 3
    assert slow_again < fast / 3
    assert fast < 500_000
    driver.drain()
    assert_same_rows(driver.rows(), join_oracle(stream.rows, rows, "id"))


def test_balanced_drops_the_cache_rather_than_refuse_a_smaller_budget():
    rows = relation_rows(dict.fromkeys(range(100), 1))
    driver, stream = Driver(BalancedJoin(spec_of(rows, budget=60_000))), Stream()
    for _ in range(6):
        run_cycle(driver, stream.batch(*(np.arange(400) % 100).tolist()))
    assert len(driver.operator.cache) > 20
    driver.call(lambda operator: operator.resize_budget(12_000))
    assert driver.operator.cache.nbytes < 12_000
    run_cycle(driver, stream.batch(*range(100)))
    assert_same_rows(driver.rows(), join_oracle(stream.rows, rows, "id"))


def test_balanced_restart_begins_with_an_empty_cache():
    rows = relation_rows({1: 1, 2: 1})
    spec = spec_of(rows)
    driver, stream = Driver(BalancedJoin(spec), make_operator=lambda: BalancedJoin(replace(spec))), Stream()
    for _ in range(2):
        run_cycle(driver, stream.batch(*[1] * 30))
    driver.offer(stream.batch(2, 1))
    driver.snapshot_restore()
    assert len(driver.operator.cache) == 0
    driver.drain()
    assert_same_rows(driver.rows(), join_oracle(stream.rows, rows, "id"))


def test_balanced_restore_into_an_operator_with_a_warm_cache():
    rows = relation_rows({1: 1, 2: 1})
    spec, stream = spec_of(rows), Stream()
    cold, warm = BalancedJoin(spec), Driver(BalancedJoin(spec))
    assert rows_of(list(cold.offer(stream.batch(1, 2, 9)))) == []
    saved = cold.snapshot()
    for _ in range(2):
        run_cycle(warm, stream.batch(*[1] * 30))
    assert len(warm.operator.cache) == 1
    warm.operator.restore(saved)
    assert sorted(row["name"] for row in rows_of(list(warm.operator.drain()))) == ["1-0", "2-0"]


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "speed"}, "objective='speed'"),
        ({"switching_factor": 0}, "switching_factor=0"),
        ({"switching_factor": float("inf")}, "switching_factor=inf"),
    ],
)
def test_balanced_refuses_wrong_options(options, message):
    with pytest.raises(PlanError, match=message):
        BalancedJoin(spec_of(relation_rows({1: 1})), **options)


def test_predicate_that_raises_on_cached_rows_changes_nothing():
    rows = relation_rows({1: 1})
    fails = []

    def holds(stream: pa.RecordBatch, _: pa.RecordBatch) -> np.ndarray:
        if fails:
            raise ArithmeticError("the predicate's own mistake")
        return np.ones(stream.num_rows, np.bool_)

    condition = BatchPredicate(holds, ["t"], [], name="fickle")
    driver, stream = Driver(BalancedJoin(spec_of(rows, condition=condition))), Stream()
    for _ in range(2):
        run_cycle(driver, stream.batch(*[1] * 30))
    operator = driver.operator
    assert len(operator.cache) == 1
    before = operator.metrics.copy()
    fails.append(True)
    batch = stream.batch(1, 1)
    with pytest.raises(Exception, match="fickle"):
        list(operator.offer(batch))
    accepted = operator.metrics - before
    assert (accepted.stream_tuples_in, accepted.output_rows, operator.pending) == (0, 0, 0)
    fails.clear()
    assert len(rows_of(list(operator.offer(batch)))) == 2
