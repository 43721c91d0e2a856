"""`HybridJoin`: which block is read when, what takes part in a visit, and what an interruption keeps."""

import numpy as np
import pyarrow as pa
import pytest

from dovetail.core.errors import PlanError
from dovetail.core.memory import Budget
from dovetail.joins import HybridJoin, JoinSpec, OldestFirst, Range, join_spec
from dovetail.relation import Relation
from dovetail.testing.batches import stream_batches
from dovetail.testing.driver import Driver, drive
from dovetail.testing.oracle import join_oracle, join_oracle_by_tuple
from dovetail.testing.rows import assert_same_rows, rows_of
from dovetail.testing.shard import MemoryShard

JOIN_TYPES = ["inner", "left", "semi", "anti"]
STREAM = pa.schema({"k": pa.int64(), "t": pa.int64()})


def batch_of(*keys, first=0):
    rows = [{"k": key, "t": first + number} for number, key in enumerate(keys)]
    return stream_batches(rows, on="k", schema=STREAM)[0]


def shard_of(keys, stride=1, columns=("v",), **options):
    numbers = pa.array(range(len(keys)), pa.int64())
    table = pa.table({"k": pa.array(keys, pa.int64()), "v": numbers, "w": pa.array([10**6] * len(keys))})
    return MemoryShard(table, keys, columns=list(columns), fence_stride=stride, **options)


def spec_for(shard, how="inner", block_rows=4, budget=20_000, **options):
    return JoinSpec(
        shard=shard,
        stream_schema=batch_of(1).schema,
        on=(("k", "k"),),
        how=how,
        block_rows=block_rows,
        budget=Budget(budget),
        **options,
    )


def matched_keys(rows):
    return [row["k"] for row in rows]


# ---------------------------------------------------------------- which block is read


def test_oldest_waiting_code_picks_the_block_and_all_that_wait_are_joined_with_it():
    shard = shard_of(range(100))
    driver = Driver(HybridJoin(spec_for(shard)))
    assert driver.offer(batch_of(50, 9, 51, 10, 49)) == []
    assert matched_keys(driver.step()) == [49, 50, 51]
    assert shard.block_reads == [(48, 52)]
    assert matched_keys(driver.step()) == [9, 10]
    assert shard.block_reads == [(48, 52), (8, 12)]
    assert driver.operator.pending == 0


@pytest.mark.parametrize("how", JOIN_TYPES)
@pytest.mark.parametrize("ordered", [False, True])
def test_code_takes_part_whole_whichever_pairs_are_looked_at_together(how, ordered):
    """The block holds part of code 5 and all of 7; of 7 there are more tuples than pairs are looked at together."""
    keys = [0, 1, 2, 3, 4, 5, 5, 5, 5, 6, 7, 8, 9, 10, 11]
    shard = shard_of(keys, stride=3, columns=["v", "w"])
    operator = HybridJoin(spec_for(shard, how=how, ordered=ordered, budget=60_000, condition=Range("t", "v", "w")))
    stream = [6, 5, 5] + [7] * (2 * operator.results.max_rows)
    driver = Driver(operator)
    driver.offer(batch_of(*stream))
    driver.drain()
    rows = [{"k": key, "v": number, "w": 10**6} for number, key in enumerate(keys)]
    tuples = [{"k": key, "t": number} for number, key in enumerate(stream)]
    expected = join_oracle(tuples, rows, "k", how, lambda s, r: r["v"] <= s["t"] < r["w"], select=["v", "w"])
    assert_same_rows(driver.rows(), expected)


def test_steps_go_on_without_arrivals_and_read_nothing_when_nothing_waits():
    shard = shard_of(range(100))
    driver = Driver(HybridJoin(spec_for(shard)))
    driver.offer(batch_of(0, 20, 40))
    while driver.operator.pending:
        driver.step()
    assert len(shard.block_reads) == 3
    driver.step()
    assert len(shard.block_reads) == 3


def test_code_whose_rows_span_blocks_is_joined_with_all_of_them_at_once():
    shard = shard_of([1, 2, 3, 5, 5, 5, 5, 5, 5, 8, 9, 10])
    driver = Driver(HybridJoin(spec_for(shard)))
    driver.offer(batch_of(2, 5))
    # The block of code 2 holds one of code 5's six rows: it must not be put out now and again later.
    assert matched_keys(driver.step()) == [2]
    assert matched_keys(driver.step()) == [5] * 6
    assert driver.operator.pending == 0
    assert max(stop - start for start, stop in shard.block_reads) <= 4


def test_tuples_that_arrive_between_two_visits_of_a_long_code_get_all_rows():
    shard = shard_of([7] * 20)
    driver = Driver(HybridJoin(spec_for(shard)))
    driver.offer(batch_of(7))
    assert len(driver.step()) == 20
    driver.offer(batch_of(7, 7, first=1))
    assert len(driver.step()) == 40


def test_one_join_value_with_thousands_of_rows_stays_within_the_budget():
    shard = shard_of([7] * 5_000)
    operator = HybridJoin(spec_for(shard, block_rows=64, budget=60_000))
    stream = [{"k": 7, "t": number} for number in range(40)]
    # The driver checks the size after every batch.
    output = drive(operator, stream_batches(stream, on="k", schema=STREAM))
    assert sum(batch.num_rows for batch in output) == 40 * 5_000


# ---------------------------------------------------------------- no match


def test_code_outside_the_relation_leaves_on_arrival():
    driver = Driver(HybridJoin(spec_for(shard_of(range(10)), how="left")))
    assert driver.offer(batch_of(-5, 99)) == [{"k": -5, "t": 0, "v": None}, {"k": 99, "t": 1, "v": None}]
    assert driver.operator.pending == 0


def test_codes_that_a_block_proves_absent_leave_with_one_read():
    shard = shard_of(range(0, 100, 2))
    driver = Driver(HybridJoin(spec_for(shard, how="anti", block_rows=8)))
    driver.offer(batch_of(3, 2, 5, 7, 9, 81))
    # Codes 3 to 9 lie in the first block; 81 does not.
    assert matched_keys(driver.step()) == [3, 5, 7, 9]
    assert (len(shard.block_reads), driver.operator.pending) == (1, 1)
    assert matched_keys(driver.step()) == [81]
    assert driver.operator.metrics.unmatched_tuples == 5


def test_absent_codes_are_not_sought_where_every_code_matches():
    shard = shard_of(range(0, 100, 2))
    driver = Driver(HybridJoin(spec_for(shard, block_rows=8)))
    driver.offer(batch_of(2, 3))
    driver.step()
    assert driver.operator.pending == 1, "the code that picked the block matched, so nobody looked for others"


@pytest.mark.parametrize("how", JOIN_TYPES)
def test_empty_relation_matches_nothing(how):
    rows = [{"k": 1, "t": 0}, {"k": None, "t": 1}]
    expected = join_oracle(rows, [], on="k", how=how, select=["v"])
    drive(HybridJoin(spec_for(shard_of([]), how=how)), stream_batches(rows, on="k", schema=STREAM), expected=expected)


def test_condition_without_equality_is_refused_with_the_operator_to_use():
    spec = spec_for(shard_of(range(3)))
    spec = JoinSpec(shard=spec.shard, stream_schema=STREAM, on=(), condition=Range("t", "v", "v"))
    with pytest.raises(PlanError, match="mesh"):
        HybridJoin(spec)


# ---------------------------------------------------------------- interruptions


def interrupted(how="inner", ordered=False):
    """An operator that was given up in the middle of a visit of several pieces, what came out of it, and the rest."""
    keys = [1] * 3 + [5] * 30 + [6, 7]
    spec = spec_for(shard_of(keys), how=how, block_rows=4, budget=6_400, ordered=ordered)
    operator = HybridJoin(spec)
    rows = [{"k": key, "t": number} for number, key in enumerate([5, 1, 5, 6, 8, 5])]
    given = list(operator.offer(stream_batches(rows, on="k", schema=STREAM)[0]))
    step = operator.step()
    given += [next(step) for _ in range(3)]
    step.close()
    return operator, spec, rows, given, [{"k": key, "v": number} for number, key in enumerate(keys)]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("how", ["inner", "left"])
def test_visit_that_was_given_up_goes_on_where_it_stopped(how, ordered):
    operator, _, rows, given, relation = interrupted(how, ordered)
    assert operator.pending
    late = [{"k": 5, "t": 6}, {"k": 1, "t": 7}]
    given += operator.offer(stream_batches(late, on="k", schema=STREAM)[0])
    given += operator.drain()
    expected = join_oracle_by_tuple(rows + late, relation, on="k", how=how)
    assert_same_rows(rows_of(given), [row for group in expected for row in group])


@pytest.mark.parametrize("ordered", [False, True])
def test_snapshot_in_the_middle_of_a_visit_keeps_it(ordered):
    operator, spec, rows, given, relation = interrupted("left", ordered)
    other = HybridJoin(spec)
    other.restore(operator.snapshot())
    assert other.pending == operator.pending
    given += other.drain()
    assert_same_rows(rows_of(given), join_oracle(rows, relation, on="k", how="left"))


class FailingShard(MemoryShard):
    """A shard of which one block cannot be read at the first attempt."""

    def read_block(self, start, rows):
        if len(self.block_reads) == 3:
            self.block_reads.append((start, start))
            raise OSError("the disk is gone for a moment")
        return super().read_block(start, rows)


@pytest.mark.parametrize("block_rows", [1, 3, 12])
def test_block_size_may_change_between_the_blocks_of_a_visit_that_failed(block_rows):
    keys = [1] * 3 + [5] * 30 + [6, 7]
    table = pa.table({"v": pa.array(range(len(keys)), pa.int64())})
    operator = HybridJoin(spec_for(FailingShard(table, keys, fence_stride=1), budget=6_400))
    rows = [{"k": key, "t": number} for number, key in enumerate([5, 1, 5, 6, 5])]
    given = list(operator.offer(stream_batches(rows, on="k", schema=STREAM)[0]))
    step = operator.step()
    with pytest.raises(OSError, match="gone"):
        given.extend(step)
    assert given, "some blocks of the visit were joined before"
    operator.retune(block_rows=block_rows)
    given += operator.drain()
    relation = [{"k": key, "v": number} for number, key in enumerate(keys)]
    assert_same_rows(rows_of(given), join_oracle(rows, relation, on="k"))


def test_block_size_cannot_change_while_a_block_is_joined_in_part():
    operator, _, rows, given, relation = interrupted("inner")
    with pytest.raises(PlanError, match="partly joined"):
        operator.retune(block_rows=2)
    given += operator.drain()
    assert_same_rows(rows_of(given), join_oracle(rows, relation, on="k"))


def test_shedding_drops_what_waits_and_keeps_the_rest_exact():
    keys = list(range(200))
    spec = spec_for(shard_of(keys), block_rows=4, budget=5_600, shed=OldestFirst())
    operator = HybridJoin(spec)
    rows = [{"k": (7 * number) % 200, "t": number} for number in range(300)]
    output = drive(operator, stream_batches(rows, on="k", schema=STREAM, seed=3, max_batch_rows=64))
    shed = operator.metrics.shed["oldest_first"]
    assert shed > 0
    given = rows_of(output)
    assert len(given) == 300 - shed
    kept = {row["t"] for row in given}
    relation = [{"k": key, "v": key} for key in keys]
    assert_same_rows(given, join_oracle([row for row in rows if row["t"] in kept], relation, on="k"))


# ---------------------------------------------------------------- several segments


@pytest.fixture
def changed_relation(tmp_path):
    """A relation with rows in several segments and deleted ones, and its rows as they are now."""
    generator = np.random.default_rng(11)

    def some(count, high, first):
        keys = generator.integers(0, high, count)
        return pa.table({"k": pa.array(keys), "v": pa.array(np.arange(first, first + count))})

    relation = Relation.build(some(3_000, 900, 0), tmp_path / "r", on="k", shards=1)
    relation = relation.append(some(150, 900, 10_000))
    relation = relation.upsert(some(60, 1_200, 20_000))
    relation = relation.delete(pa.table({"k": pa.array(generator.integers(0, 900, 50))}))
    relation = relation.append(some(700, 1_000, 30_000))
    shard = relation.shard(0)
    rows = [row for block in shard.blocks(1000) for row in block.rows.to_pylist()]
    return relation, rows


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("how", JOIN_TYPES)
def test_rows_in_several_segments_are_met_once_each(changed_relation, how, ordered):
    relation, relation_rows = changed_relation
    generator = np.random.default_rng(12)
    rows = [{"k": int(key), "t": number} for number, key in enumerate(generator.integers(-50, 1_250, 800))]
    batches = stream_batches(rows, on="k", schema=STREAM, seed=5, max_batch_rows=300)
    spec = join_spec(
        relation, batches[0].schema, how=how, budget=40_000, block_rows=300, ordered=ordered, io="buffered"
    )
    oracle = join_oracle_by_tuple if ordered else join_oracle
    expected = oracle(rows, relation_rows, on="k", how=how)
    drive(
        HybridJoin(spec),
        batches,
        schedule=6,
        make_operator=lambda: HybridJoin(spec),
        expected=None if ordered else expected,
        expected_groups=expected if ordered else None,
    )


def test_block_of_one_segment_is_joined_with_the_same_codes_of_the_others(tmp_path):
    keys = np.arange(12_800)
    table = pa.table({"k": pa.array(keys), "v": pa.array(keys)})
    relation = Relation.build(table, tmp_path / "r", on="k", shards=1).append(table.take(pa.array(keys[::5])))
    rows = [{"k": int(key), "t": int(key)} for key in keys[1_300:2_500]]
    batches = stream_batches(rows, on="k", schema=STREAM)
    operator = HybridJoin(join_spec(relation, batches[0].schema, budget="1MB", block_rows=1_280))
    drive(operator, batches)
    # The codes lie in one block and its neighbour's edge: a visit for each code would be a thousand.
    assert operator.metrics.disk_steps <= 12
