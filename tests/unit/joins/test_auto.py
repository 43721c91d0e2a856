"""The join that chooses: each of its ways, mixtures of them, and how it decides between them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.core.errors import BudgetError
from dovetail.core.memory import Budget
from dovetail.costs.costs import CostFactors, Curve
from dovetail.joins import AutoJoin, JoinSpec, join_spec
from dovetail.joins.explaining import factors_for
from dovetail.relation import Relation
from dovetail.relation.io import SimulatedDisk
from dovetail.testing.driver import Driver, drive
from dovetail.testing.oracle import join_oracle
from dovetail.testing.rows import assert_same_rows
from dovetail.testing.shard import MemoryShard
from dovetail.testing.strategies import join_cases, schedules
from dovetail_lab.workloads import Zipf, make_relation_table

# Each makes one way the cheapest, whatever there is to join.
SCAN = CostFactors(
    seek_s=10.0, bandwidth_bytes_per_s=1e6, lookup_s=1e9, gather_s=1e9, probe_s=Curve.constant(1e-3), step_s=1e-6
)
WHOLE_CYCLE = replace(SCAN, remove_s=Curve.constant(1e9), seek_s=1e9)
SKIP = CostFactors(seek_s=0.0, bandwidth_bytes_per_s=1.0, lookup_s=1e-9, gather_s=1e12, probe_s=Curve.constant(1e3))
LOOKUP = CostFactors(seek_s=0.0, bandwidth_bytes_per_s=1e12, probe_s=Curve.constant(1e3))
LOOKUP_OF_DEVICE = replace(LOOKUP, seek_s=1e-5)  # slow enough to learn what to cache
WAYS = {"scan": SCAN, "whole_cycle": WHOLE_CYCLE, "skip": SKIP, "lookup": LOOKUP_OF_DEVICE}

SCHEMA = pa.schema({"__code": pa.int64(), "id": pa.int64(), "t": pa.int64()})
RELATION = pa.schema({"id": pa.int64(), "name": pa.string()})


def relation_rows(counts: dict[int, int]) -> list[dict[str, Any]]:
    return [{"id": code, "name": f"{code}-{n}"} for code, count in counts.items() for n in range(count)]


def spec_of(rows: list[dict[str, Any]], budget: int = 200_000, **options: Any) -> JoinSpec:
    shard = MemoryShard.of_rows(rows, RELATION, lambda row: row["id"])
    return JoinSpec(
        shard=shard, stream_schema=SCHEMA, on=(("id", "id"),), select=("name",), budget=Budget(budget), **options
    )


class Stream:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def batch(self, *codes: int) -> pa.RecordBatch:
        first = len(self.rows)
        self.rows += [{"id": code, "t": first + n} for n, code in enumerate(codes)]
        numbers = list(range(first, first + len(codes)))
        return pa.record_batch({"__code": list(codes), "id": list(codes), "t": numbers}, schema=SCHEMA)


# ------------------------------------------------------------------------------------------------ exactness


def minimum_budget(spec: JoinSpec) -> int:
    with pytest.raises(BudgetError) as refused:
        AutoJoin(replace(spec, budget=Budget(1)))
    assert refused.value.minimum_bytes is not None
    return refused.value.minimum_bytes


@pytest.mark.parametrize("way", list(WAYS))
@settings(max_examples=60)
@given(data=st.data())
def test_oracle_every_way_gives_the_exact_join(way: str, data: st.DataObject) -> None:
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
        block_rows=data.draw(st.none() | st.integers(1, 9)),
    )
    extra = data.draw(st.sampled_from([0, 2_000, 20_000]))
    spec = replace(spec, budget=Budget(minimum_budget(spec) + extra))
    drive(
        AutoJoin(spec, factors=WAYS[way]),
        batches,
        data.draw(schedules(len(batches))),
        make_operator=lambda: AutoJoin(replace(spec, budget=Budget(200_000)), factors=WAYS[way]),
        expected=None if ordered else case.expected(how),
        expected_groups=case.expected_groups(how) if ordered else None,
    )


@pytest.mark.parametrize("how", ["inner", "left"])
@pytest.mark.parametrize("way", list(WAYS))
def test_warm_cache_and_changing_ways_give_the_exact_join(way: str, how: Any) -> None:
    zipf = Zipf(200, exponent=1.2, order="shuffled", seed=9)
    rows = relation_rows({code: 1 + code % 3 for code in range(1, 181)})
    spec = spec_of(rows, budget=40_000, how=how, block_rows=16)
    driver, stream = Driver(AutoJoin(spec, factors=WAYS[way]), measure_arrays=True, borrowed=[spec]), Stream()
    ways = list(WAYS.values())
    for turn in range(120):
        driver.offer(stream.batch(*zipf.sample(30).tolist()))
        if turn > 80:
            driver.operator.use_costs(ways[turn % len(ways)])
    driver.drain()
    metrics = driver.operator.metrics
    assert metrics.cache_hits > 200
    assert_same_rows(driver.rows(), join_oracle(stream.rows, rows, "id", how, select=["name"]))


# ------------------------------------------------------------------------------------------------ the ways


def test_lookup_answers_on_arrival():
    rows = relation_rows({1: 2, 3: 1})
    driver, stream = Driver(AutoJoin(spec_of(rows, how="left"), factors=LOOKUP)), Stream()
    given = driver.offer(stream.batch(1, 2, 3))
    assert sorted(str(row["name"]) for row in given) == ["1-0", "1-1", "3-0", "None"]
    assert driver.operator.pending == 0
    assert driver.operator.metrics.lookups == 3
    assert driver.operator.spec.shard.block_reads == []


def test_looked_up_tuple_with_very_many_rows_is_emitted_bit_by_bit():
    rows = relation_rows({1: 300, 2: 1})
    spec = spec_of(rows, budget=8_000)
    operator = AutoJoin(spec, factors=LOOKUP)
    assert operator.results.max_rows < 300
    stream = Stream()
    batches = operator.offer(stream.batch(1, 2))
    first = next(batches).num_rows
    assert 0 < first < 300
    batches.close()
    assert operator.pending == 1
    assert sum(batch.num_rows for batch in operator.drain()) == 300 - first
    assert operator.metrics.stream_tuples_in == 1


def test_scan_lets_tuples_leave_when_they_have_met_all_their_rows():
    rows = relation_rows(dict.fromkeys(range(10), 2))
    driver, stream = Driver(AutoJoin(spec_of(rows, block_rows=8), factors=SCAN)), Stream()
    assert driver.operator.leaves_early
    driver.offer(stream.batch(1, 2, 9))
    # Rows 0 to 7 are of codes 0 to 3; code 3 is the block's last and might have more.
    assert sorted(row["name"] for row in driver.step()) == ["1-0", "1-1", "2-0", "2-1"]
    assert driver.operator.pending == 1


def test_scan_keeps_tuples_whose_rows_may_go_on_in_the_next_block():
    rows = relation_rows({1: 2, 2: 4, 3: 2})
    driver, stream = Driver(AutoJoin(spec_of(rows, block_rows=4), factors=SCAN)), Stream()
    driver.offer(stream.batch(2))
    assert [row["name"] for row in driver.step()] == ["2-0", "2-1"]
    assert driver.operator.pending == 1
    assert [row["name"] for row in driver.drain()] == ["2-2", "2-3"]


def test_scan_finds_out_early_what_has_no_match():
    rows = relation_rows(dict.fromkeys(range(0, 400, 2), 1))
    operator = AutoJoin(spec_of(rows, how="left", block_rows=20), factors=SCAN)
    driver, stream = Driver(operator), Stream()
    driver.offer(stream.batch(*range(1, 99, 2)))
    driver.drain()
    # After a cycle with many unmatched tuples it looks for them block by block.
    driver.offer(stream.batch(*range(100, 140), 399))
    gone = [row["id"] for _ in range(10) for row in driver.step()]
    assert set(range(100, 138)) <= set(gone)
    driver.drain()
    assert_same_rows(driver.rows(), join_oracle(stream.rows, rows, "id", "left", select=["name"]))


def test_skip_reads_only_where_rows_can_be():
    rows = relation_rows(dict.fromkeys(range(2_000), 1))
    driver, stream = Driver(AutoJoin(spec_of(rows, block_rows=100), factors=SKIP)), Stream()
    shard = driver.operator.spec.shard
    driver.offer(stream.batch(1_500))
    assert [row["name"] for row in driver.drain()] == ["1500-0"]
    assert sum(stop - start for start, stop in shard.block_reads) <= 200
    assert driver.operator.pending == 0


def test_skip_goes_round_for_tuples_that_come_in_the_middle():
    rows = relation_rows(dict.fromkeys(range(2_000), 1))
    driver, stream = Driver(AutoJoin(spec_of(rows, block_rows=100), factors=SKIP)), Stream()
    driver.offer(stream.batch(1_500, 20))
    driver.step()
    driver.offer(stream.batch(10, 1_999, 5_000))
    driver.drain()
    assert_same_rows(driver.rows(), join_oracle(stream.rows, rows, "id"))


# ------------------------------------------------------------------------------------------------ the choice


def test_way_that_was_slow_for_a_while_is_taken_again() -> None:
    choice = AutoJoin(spec_of(relation_rows(dict.fromkeys(range(2_000), 1)))).choice
    tuples = choice.state.window_capacity
    scan_s = tuples * choice.scan_seconds(choice.leaves_early, tuples)
    usual = 2 * scan_s / choice.lookup_seconds(tuples)  # on this host a lookup costs twice a scan
    assert 1 / 16 < usual < 16
    for _ in range(50):
        choice.note_lookup(usual, 1.0)
        choice.note_scan(1.0, 1.0)
    assert not choice.looks_up(tuples)
    for _ in range(20):
        choice.note_scan(10.0, 1.0)
    assert choice.looks_up(tuples)
    for _ in range(500):
        choice.note_lookup(usual, 1.0)
    assert not choice.looks_up(tuples), "a device that was slow for a while is avoided for good"


@pytest.fixture(scope="module")
def relation(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    path = tmp_path_factory.mktemp("auto") / "r"
    return Relation.build(make_relation_table(20_000), str(path), on="k", shards=1)


def operator_on(
    relation: Relation, io: Any, budget: str = "60kB", factors: CostFactors | None = None, **options: Any
) -> AutoJoin:
    schema = pa.schema({"__code": pa.int64(), "k": pa.int64(), "t": pa.int64()})
    return AutoJoin(join_spec(relation, schema, budget=budget, io=io, **options), factors=factors)


def test_pages_in_memory_are_looked_up_and_a_slow_disk_is_scanned(relation):
    slow = SimulatedDisk(60e6, 0.008, virtual=True)
    assert operator_on(relation, "map").looks_up
    assert not operator_on(relation, slow).looks_up
    assert operator_on(relation, slow, budget="1MB").leaves_early


def test_factors_are_those_of_the_disk_that_the_shard_is_on(relation):
    slow = SimulatedDisk(60e6, 0.008, virtual=True)
    of_slow = factors_for(relation.shard(0, io=slow))
    assert (of_slow.seek_s, of_slow.bandwidth_bytes_per_s) == (0.008, 60e6)
    assert factors_for(relation.shard(0)).seek_s == 0.0
    assert factors_for(relation.shard(0, io="buffered")).seek_s > 0.0


def test_few_waiting_tuples_on_a_slow_disk_are_read_for_by_index(relation):
    slow = SimulatedDisk(60e6, 0.0005, virtual=True)
    operator = operator_on(relation, slow)
    codes = pa.array([15_000, 3])
    batch = pa.record_batch({"__code": codes, "k": codes, "t": codes})
    given = [*operator.offer(batch), *operator.drain()]
    assert sum(out.num_rows for out in given) == 2
    assert operator.metrics.relation_rows_read < 2_000


def test_scan_of_a_slow_disk_serves_twice_what_waits_per_cycle(relation):
    slow = SimulatedDisk(60e6, 0.008, virtual=True)
    operator = operator_on(relation, slow, budget="300kB")
    generator = np.random.default_rng(3)
    while operator.metrics.cycles < 5:
        codes = generator.integers(1, 20_001, 256)
        for _ in operator.offer(pa.record_batch({"__code": codes, "k": codes, "t": codes})):
            pass
    cycles = operator.metrics.relation_rows_read / 20_000
    assert operator.metrics.matched_tuples / cycles > 1.6 * operator.window_capacity


def test_hot_values_enter_the_cache_out_of_the_blocks_of_a_scan(relation):
    slow = SimulatedDisk(60e6, 0.008, virtual=True)
    operator = operator_on(relation, slow, budget="200kB")
    zipf = Zipf(20_000, exponent=1.0, order="shuffled", seed=4)
    before = operator.metrics.copy()
    while operator.metrics.cycles < 14:
        if operator.metrics.cycles <= 10:
            before = operator.metrics.copy()
        codes = zipf.sample(256)
        for _ in operator.offer(pa.record_batch({"__code": codes, "k": codes, "t": codes})):
            pass
    since = operator.metrics - before
    assert since.cache_hits > 0.3 * since.stream_tuples_in
    hottest = zipf.codes_of(np.arange(1, 11))
    assert not operator.cache.probe(hottest).is_miss.any()


def test_cache_is_mostly_grown_after_few_cycles(tmp_path):
    """Values that find no room are not forgotten, and room is asked for ahead of them."""
    rows = 60_000
    large = Relation.build(make_relation_table(rows), str(tmp_path / "r"), on="k", shards=1)
    operator = operator_on(large, SimulatedDisk(60e6, 0.008, virtual=True), budget="600kB")
    zipf = Zipf(rows, exponent=1.0, order="shuffled", seed=4)
    values = []
    for cycle in range(1, 13):
        while operator.metrics.relation_rows_read < cycle * rows:
            codes = zipf.sample(1_024)
            for out in operator.offer(pa.record_batch({"__code": codes, "k": codes, "t": codes})):
                del out
        values.append(len(operator.cache))
    assert values[3] > 0.6 * values[-1], values


def test_cache_that_does_not_pay_is_given_up(relation):
    """On a uniform stream a few values are frequent by chance; looking for them would cost more than they save."""
    factors = factors_for(relation.shard(0)).with_disk(seek_s=1.0, bandwidth_bytes_per_s=1e12)
    schema = pa.schema({"__code": pa.int64(), "k": pa.int64(), "t": pa.int64()})
    costly = replace(factors, cache_probe_s=Curve.constant(1.0), gather_s=1.0)
    operator = AutoJoin(join_spec(relation, schema, budget="1MB"), factors=costly)
    zipf = Zipf(20_000, exponent=1.0, order="shuffled", seed=4)
    sizes = []
    while operator.metrics.cycles < 12:
        codes = zipf.sample(512)
        for _ in operator.offer(pa.record_batch({"__code": codes, "k": codes, "t": codes})):
            pass
        sizes.append(len(operator.cache))
    assert max(sizes) > 0
    assert sizes[-1] == 0
    assert operator.metrics.cache_evictions > 0


def test_values_that_are_looked_up_often_enter_the_cache(relation):
    operator = operator_on(relation, "map", budget="60kB", factors=LOOKUP_OF_DEVICE)
    zipf = Zipf(20_000, exponent=1.0, order="shuffled", seed=4)
    assert operator.looks_up
    assert operator.choice.waits_for_device
    for _ in range(60):
        codes = zipf.sample(512)
        codes[::7] = -codes[::7]
        for _ in operator.offer(pa.record_batch({"__code": codes, "k": codes, "t": codes})):
            pass
    assert operator.pending == 0
    hottest = zipf.codes_of(np.arange(1, 11))
    assert not operator.cache.probe(hottest).is_miss.any()
    assert operator.metrics.negative_hits > 0


def test_pages_in_memory_are_looked_up_without_a_cache(relation):
    operator = operator_on(relation, "map", budget="60kB", factors=LOOKUP)
    codes = np.full(512, 7)
    for _ in range(60):
        list(operator.offer(pa.record_batch({"__code": codes, "k": codes, "t": codes})))
    assert len(operator.cache) == 0
    assert operator.sizes()["learning"] == 0


@pytest.mark.parametrize("how", ["inner", "left", "semi", "anti"])
def test_tuples_that_met_part_of_the_relation_are_looked_up_for_the_rest(how):
    """A scan stops half way, then a lookup is cheaper: no row is met twice and none is left out."""
    rows = relation_rows({code: 1 + code % 4 for code in range(0, 120, 2)})
    spec = spec_of(rows, how=how, block_rows=8)
    operator = AutoJoin(spec, factors=WHOLE_CYCLE)
    driver, stream = Driver(operator), Stream()
    generator = np.random.default_rng(5)
    for _ in range(6):
        driver.offer(stream.batch(*generator.integers(0, 125, 20).tolist()))
        driver.step()
        driver.step()
    assert operator.pending > 20
    operator.use_costs(LOOKUP)
    reads = operator.metrics.blocks_read
    driver.drain()
    assert operator.metrics.blocks_read == reads
    assert operator.metrics.lookups > 0
    assert_same_rows(driver.rows(), join_oracle(stream.rows, rows, "id", how, select=["name"]))


# ------------------------------------------------------------------------------------------------ explain


@pytest.mark.parametrize("io", ["map", "slow"])
def test_explain_tells_strategy_memory_and_what_binds(relation, io):
    slow = SimulatedDisk(60e6, 0.008, virtual=True)
    dear_scan = replace(factors_for(relation.shard(0)), probe_s=Curve.constant(1.0))
    operator = operator_on(relation, slow, "1MB") if io == "slow" else operator_on(relation, "map", factors=dear_scan)
    plan = operator.explain()
    assert plan.strategy == "auto"
    assert plan.access == ("scan" if io == "slow" else "index")
    assert plan.binds == ("disk" if io == "slow" else "cpu")
    assert plan.total_bytes == operator.size()
    assert plan.service_rate > 0
    assert "auto" in plan.text()
    assert plan.as_dict()["block_rows"] == operator.block_rows
