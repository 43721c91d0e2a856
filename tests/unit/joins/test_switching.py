"""Which values are decided on, and how their rows come together in the switching buffer."""

import numpy as np
import pyarrow as pa
import pytest

from dovetail.core.errors import InternalError
from dovetail.joins import BalancedJoin, join_spec
from dovetail.joins.cache.relation_cache import bytes_of_rows
from dovetail.joins.cache.switching import ENTRY_BYTES, Candidates, Decision, SwitchingBuffer
from dovetail.kernels.value_table import MAX_COUNT
from dovetail.relation import Relation
from dovetail.testing.held import held_array_bytes
from dovetail.testing.shard import MemoryBlock


def int64_array(*values):
    return np.array(values, np.int64)


def block_of(*codes):
    rows = pa.record_batch({"v": [f"{code}" for code in codes]})
    return MemoryBlock(0, len(codes), int64_array(*codes), rows)


def decision_of(counts):
    codes = int64_array(*counts)
    return Decision(codes, int64_array(*counts.values()), np.ones(codes.size), 100 * codes.size)


def decide(candidates, waiting, **options):
    settings = {"tuple_bytes": 50.0, "row_bytes": 100.0, "factor": 1.0, "max_rows": 1000, "max_bytes": 100_000}
    return candidates.decide(int64_array(*waiting), 1.0, **(settings | options))


def counted(first_waiting, counts):
    candidates = Candidates(int64_array(*counts), int64_array(*first_waiting), scale=1.0)
    for code, count in counts.items():
        candidates.table.count_rows(np.full(count, code, np.int64))
    return candidates


def waiting_in_order(candidates, waiting):
    """Numbers per code, in the order in which the table gives its codes."""
    return [waiting[code] for code in candidates.table.items().codes.tolist()]


# ------------------------------------------------------------------------------------------------ deciding


def test_frequency_is_the_mean_of_two_looks():
    candidates = counted([4, 0], {1: 1, 2: 1})
    decision = decide(candidates, waiting_in_order(candidates, {1: 2, 2: 6}))
    assert dict(zip(decision.codes.tolist(), decision.frequencies.tolist(), strict=True)) == {1: 3.0, 2: 3.0}


def test_value_must_outweigh_its_rows_by_the_factor():
    # 100 bytes of row and the entry against 3 tuples of 50 bytes each.
    candidates = counted([3], {1: 1})
    assert decide(candidates, [3]).codes.tolist() == [1]
    assert decide(candidates, [3], factor=1.3).codes.tolist() == []


def test_best_values_come_first_and_fill_what_there_is():
    candidates = counted([30, 10, 20, 10], {1: 1, 2: 1, 3: 1, 4: 5})
    waiting = waiting_in_order(candidates, {1: 30, 2: 10, 3: 20, 4: 10})
    assert decide(candidates, waiting).codes.tolist() == [1, 3, 2]
    room = int(2 * (100 + ENTRY_BYTES)) + 1
    limited = decide(candidates, waiting, max_bytes=room)
    assert limited.codes.tolist() == [1, 3]
    assert limited.nbytes <= room


def test_values_with_too_many_rows_or_none_are_left_out():
    counts = {1: 0, 2: 5, 3: MAX_COUNT + 5}
    candidates = counted([9_000_000] * 3, counts)
    waiting = [9_000_000] * 3
    assert decide(candidates, waiting, max_rows=10_000, max_bytes=10**9).codes.tolist() == [2]
    assert decide(candidates, waiting, max_rows=4, max_bytes=10**9).codes.tolist() == []
    codes, frequencies = candidates.without_rows(int64_array(*waiting), 1.0, 50.0, 1.0)
    assert (codes.tolist(), frequencies.tolist()) == ([1], [9_000_000.0])


# ------------------------------------------------------------------------------------------------ collecting


def test_only_rows_of_decided_values_are_collected():
    buffer = SwitchingBuffer(decision_of({2: 2, 5: 1}))
    buffer.collect(block_of(1, 2, 2, 3))
    buffer.collect(block_of(4, 5, 6))
    codes, pages = buffer.pages(10_000)
    assert codes.tolist() == [2, 2, 5]
    assert [value for page in pages for value in page.column("v").to_pylist()] == ["2", "2", "5"]


def test_rows_of_a_value_that_the_scan_meets_apart_come_together():
    buffer = SwitchingBuffer(decision_of({1: 3, 2: 2}))
    for block in (block_of(1, 2), block_of(1), block_of(1, 2)):
        buffer.collect(block)
    assert not buffer.is_contiguous()
    codes, pages = buffer.pages(1)
    assert codes.tolist() == [1, 1, 1, 2, 2]
    assert [page.column("v").to_pylist() for page in pages] == [["1", "1", "1", "2", "2"]]


def test_pages_are_cut_between_values_only():
    # Each batch is larger than those before, so that they stay apart.
    buffer = SwitchingBuffer(decision_of({1: 3000, 2: 4000}))
    buffer.collect(block_of(*[1] * 2000))
    buffer.collect(block_of(*[1] * 1000, *[2] * 500))
    buffer.collect(block_of(*[2] * 3500))
    codes, pages = buffer.pages(1)
    sizes = [page.num_rows for page in pages]
    assert sum(sizes) == codes.size == 7000
    for end in np.cumsum(sizes)[:-1].tolist():
        assert codes[end] != codes[end - 1]


def test_size_is_what_arrays_hold():
    buffer = SwitchingBuffer(decision_of(dict.fromkeys(range(500), 1)))
    for code in range(500):
        buffer.collect(block_of(code))
        assert held_array_bytes([buffer._batches, buffer._codes]) <= buffer.nbytes
    # Small batches are made one, or paddings would be most of it.
    assert buffer.rows_nbytes < 2 * bytes_of_rows(pa.record_batch({"v": [f"{code}" for code in range(500)]}))


def test_cycle_that_does_not_meet_every_row_is_our_mistake():
    buffer = SwitchingBuffer(decision_of({1: 2}))
    buffer.collect(block_of(1))
    with pytest.raises(InternalError, match="Of 2 rows that were to enter the cache, a cycle met 1"):
        buffer.pages(100)


def test_values_in_several_segments_are_cached_whole(tmp_path):
    first = pa.table({"k": list(range(100)), "v": [f"a{k}" for k in range(100)]})
    second = pa.table({"k": list(range(0, 100, 2)), "v": [f"b{k}" for k in range(0, 100, 2)]})
    relation = Relation.build(first, str(tmp_path / "r"), on="k", shards=1).append(second)
    codes = np.repeat(np.arange(100), 20)
    batch = pa.record_batch({"__code": codes, "k": codes, "t": codes})
    operator = BalancedJoin(join_spec(relation, batch.schema, budget="2MB"))
    assert operator.spec.shard.num_segments == 2
    for _ in range(6):
        given = [*operator.offer(batch), *operator.drain()]
        assert sum(out.num_rows for out in given) == 20 * 150
    values = operator.cache.values()
    assert dict(zip(values.codes.tolist(), values.counts.tolist(), strict=True)) == {
        code: 1 + (code % 2 == 0) for code in range(100)
    }
    given = list(operator.offer(batch))
    assert operator.pending == 0
    names = {(row["k"], row["v"]) for out in given for row in out.to_pylist()}
    assert names == {(k, f"a{k}") for k in range(100)} | {(k, f"b{k}") for k in range(0, 100, 2)}
