"""The cache of relation rows against a dictionary of lists."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dovetail.core.errors import InternalError
from dovetail.joins.cache.relation_cache import RelationCache, bytes_of_rows
from dovetail.kernels.sorted_codes import expand_ranges
from dovetail.kernels.value_table import MAX_COUNT
from dovetail.testing.held import held_array_bytes

SCHEMA = pa.schema({"n": pa.int64(), "s": pa.string()})
CODES = st.integers(-3, 12)


def codes_of(*codes: int) -> np.ndarray:
    return np.array(codes, np.int64)


def rows_for(numbers: list[int]) -> pa.RecordBatch:
    return pa.record_batch({"n": numbers, "s": [None if n % 5 == 0 else "x" * (n % 7) for n in numbers]}, schema=SCHEMA)


def answers(cache: RelationCache, codes: np.ndarray) -> list[list[int] | None]:
    """Per code: the column n of its cached rows; None if it is not in the cache."""
    probe = cache.probe(codes)
    which, rows = expand_ranges(probe.first_rows, probe.counts.astype(np.int32))
    numbers = cache.gather_in_order(rows).column("n").to_pylist() if rows.size else []
    found: list[list[int] | None] = [None if miss else [] for miss in probe.is_miss.tolist()]
    for query, number in zip(which.tolist(), numbers, strict=True):
        found[query].append(number)
    return found


class CacheMachine(RuleBasedStateMachine):
    @initialize()
    def make(self):
        self.cache = RelationCache(SCHEMA)
        self.twin: dict[int, list[int]] = {}
        self.asked: dict[int, int] = {}
        self.next_number = 0

    @rule(values=st.lists(st.tuples(CODES, st.integers(1, 4)), max_size=6, unique_by=lambda value: value[0]))
    def insert(self, values):
        values = [(code, count) for code, count in values if code not in self.twin]
        numbers = list(range(self.next_number, self.next_number + sum(count for _, count in values)))
        self.next_number += len(numbers)
        row_codes = np.repeat([code for code, _ in values], [count for _, count in values]).astype(np.int64)
        for number, code in zip(numbers, row_codes.tolist(), strict=True):
            self.twin.setdefault(code, []).append(number)
        self.asked.update({code: 2 for code, _ in values})
        if values:
            self.cache.insert(row_codes, [rows_for(numbers)], np.full(len(values), 2))

    @rule(codes=st.lists(CODES, max_size=4, unique=True))
    def insert_negative(self, codes):
        codes = [code for code in codes if code not in self.twin]
        self.cache.insert_negative(codes_of(*codes), 1)
        self.twin.update({code: [] for code in codes})
        self.asked.update(dict.fromkeys(codes, 1))

    @rule(codes=st.lists(CODES, max_size=5, unique=True))
    def evict(self, codes):
        assert self.cache.evict(codes_of(*codes)) == sum(code in self.twin for code in codes)
        for code in codes:
            self.twin.pop(code, None)
            self.asked.pop(code, None)

    @rule(codes=st.lists(CODES, min_size=1, max_size=5))
    def observe(self, codes):
        self.cache.observe(self.cache.probe(codes_of(*codes)), np.arange(len(codes)))
        for code in codes:
            if code in self.asked:
                self.asked[code] += 1

    @rule(free_bytes=st.sampled_from([0, 300, 2_000, 1_000_000]))
    def tidy(self, free_bytes):
        before = self.cache.nbytes
        self.cache.tidy(free_bytes)
        assert self.cache.nbytes <= before

    @precondition(lambda self: len(self.twin) > 8)
    @rule()
    def clear(self):
        self.cache.clear()
        self.twin, self.asked = {}, {}

    @invariant()
    def answers_like_the_dictionary(self):
        if not hasattr(self, "cache"):
            return
        codes = list(range(-3, 13))
        assert answers(self.cache, codes_of(*codes)) == [self.twin.get(code) for code in codes]
        assert len(self.cache) == len(self.twin)
        assert self.cache.num_rows == sum(len(rows) for rows in self.twin.values())
        values = self.cache.values()
        assert dict(zip(values.codes.tolist(), values.frequencies.tolist(), strict=True)) == self.asked
        assert held_array_bytes(self.cache) <= self.cache.nbytes


CacheMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=15)
TestCache = CacheMachine.TestCase


def test_evicted_rows_count_until_their_page_is_rewritten():
    cache = RelationCache(SCHEMA)
    cache.insert(np.repeat(np.arange(10), 10), [rows_for(list(range(100)))], np.zeros(10, np.int64))
    full = cache.nbytes
    cache.evict(np.arange(5))
    assert cache.nbytes == full
    cache.tidy(0)  # no room to copy
    assert cache.nbytes == full
    cache.tidy(10_000)
    assert cache.nbytes < 0.7 * full
    assert answers(cache, codes_of(4, 5)) == [None, list(range(50, 60))]


def test_small_pages_become_one_where_there_is_room():
    cache = RelationCache(SCHEMA)
    for number in range(20):
        cache.insert(codes_of(number), [rows_for([number])], np.zeros(1, np.int64))
    assert cache.num_pages == 20
    cache.tidy(bytes_of_rows(rows_for([1])) * 3)
    assert 1 < cache.num_pages < 20
    cache.tidy(100_000)
    assert cache.num_pages == 1
    assert answers(cache, np.arange(20)) == [[number] for number in range(20)]


def test_row_numbers_of_pages_that_are_gone_are_used_again():
    cache = RelationCache(SCHEMA)
    for turn in range(5):
        cache.insert(codes_of(turn), [rows_for([turn, turn])[0:1]], np.zeros(1, np.int64))
        cache.evict(codes_of(turn - 1))
    assert cache.values().rows.max() <= 1


def test_without_columns_only_numbers_of_rows_are_kept():
    cache = RelationCache(pa.schema([]))
    cache.insert_counts(codes_of(1, 2), codes_of(3, 1))
    assert cache.probe(codes_of(2, 1, 0)).counts.tolist() == [1, 3, 0]
    assert not cache.keeps_rows
    assert cache.nbytes == cache.table_bytes


def test_value_with_too_many_rows_is_refused():
    count = MAX_COUNT + 1
    with pytest.raises(InternalError, match="4095 can be"):
        RelationCache(SCHEMA).insert(np.zeros(count, np.int64), [rows_for([1] * count)], np.zeros(1, np.int64))


def test_what_was_found_before_a_change_is_refused():
    cache = RelationCache(SCHEMA)
    cache.insert(codes_of(1), [rows_for([1])], codes_of(0))
    probe = cache.probe(codes_of(1))
    cache.insert_negative(codes_of(2))
    with pytest.raises(InternalError, match="changed since"):
        cache.observe(probe, codes_of(0))
