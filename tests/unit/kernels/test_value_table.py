"""`ValueTable` against a dictionary, and `frequent_codes` against a count."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dovetail.core.errors import BudgetError
from dovetail.kernels.frequent import frequent_codes
from dovetail.kernels.multimap import MultiMap
from dovetail.kernels.value_table import MAX_COUNT, MAX_FREQUENCY, MAX_ROW, ValueTable

INT64 = np.iinfo(np.int64)
CODES = st.one_of(st.sampled_from([INT64.min, INT64.max, -1, 0, 1]), st.integers(2, 25))
ROWS = st.one_of(st.sampled_from([0, MAX_ROW]), st.integers(0, 1000))
COUNTS = st.one_of(st.sampled_from([0, 1, MAX_COUNT]), st.integers(0, 2 * MAX_COUNT))
FREQUENCIES = st.one_of(st.sampled_from([0, MAX_FREQUENCY - 1, MAX_FREQUENCY]), st.integers(0, 2 * MAX_FREQUENCY))


def int64_array(values):
    return np.array(values, dtype=np.int64)


class ValueTableMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 30))
    def make(self, capacity):
        self.table = ValueTable(capacity)
        self.twin: dict[int, list[int]] = {}

    @rule(items=st.lists(st.tuples(CODES, ROWS, COUNTS, FREQUENCIES), max_size=12))
    def put(self, items):
        columns = [int64_array([item[i] for item in items]) for i in range(4)]
        if len(self.twin.keys() | {item[0] for item in items}) > self.table.capacity:
            with pytest.raises(BudgetError, match="do not fit"):
                self.table.put(*columns)
            return
        self.table.put(*columns)
        for code, row, count, frequency in items:
            self.twin[code] = [row, min(count, MAX_COUNT), min(frequency, MAX_FREQUENCY)]

    @rule(codes=st.lists(CODES, max_size=12))
    def remove(self, codes):
        expected = [self.twin.pop(code, None) is not None for code in codes]
        assert self.table.remove(int64_array(codes)).tolist() == expected

    @rule(codes=st.lists(CODES, max_size=12))
    def observe(self, codes):
        self.table.observe(self.table.find(int64_array(codes)))
        for code in codes:
            if code in self.twin:
                self.twin[code][2] = min(self.twin[code][2] + 1, MAX_FREQUENCY)

    @rule(codes=st.lists(CODES, max_size=12))
    def count_rows(self, codes):
        self.table.count_rows(int64_array(codes))
        for code in codes:
            if code in self.twin:
                self.twin[code][1] = min(self.twin[code][1] + 1, MAX_COUNT)

    @rule()
    def reset_frequencies(self):
        self.table.reset_frequencies()
        for known in self.twin.values():
            known[2] = 0

    @rule(extra=st.integers(0, 20))
    def resize(self, extra):
        self.table = self.table.resized(len(self.twin) + extra)

    @invariant()
    def knows_the_same(self):
        if not hasattr(self, "table"):
            return
        assert len(self.table) == len(self.twin)
        items = zip(*(column.tolist() for column in self.table.items()), strict=True)
        assert {code: known for code, *known in items} == self.twin
        asked = int64_array([*self.twin, 26, 27])
        found = self.table.find(asked)
        assert (found >= 0).tolist() == [True] * len(self.twin) + [False, False]
        there = found[: len(self.twin)]
        columns = (self.table.rows_at(there), self.table.counts_at(there), self.table.frequencies_at(there))
        assert [list(known) for known in zip(*(c.tolist() for c in columns), strict=True)] == list(self.twin.values())


ValueTableMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=15)
TestValueTable = ValueTableMachine.TestCase


@pytest.mark.parametrize("size_bytes", [0, 63, 100, 500, 4096, 100_000])
def test_capacity_within_is_the_largest_that_fits(size_bytes):
    capacity = ValueTable.capacity_within(size_bytes)
    assert capacity == 0 or ValueTable.nbytes_of(capacity) <= size_bytes
    assert ValueTable.nbytes_of(capacity + 8) > size_bytes


def test_entry_costs_twenty_bytes():
    assert ValueTable.nbytes_of(100_000) == pytest.approx(20 * 100_000, rel=0.01)


@pytest.mark.parametrize("capacity", [0, -1, MAX_ROW])
def test_impossible_capacity_is_refused(capacity):
    with pytest.raises(ValueError, match="holds between"):
        ValueTable(capacity)


@given(
    codes=st.lists(st.integers(0, 12), max_size=60),
    min_count=st.integers(1, 6),
    max_codes=st.integers(1, 15),
)
def test_frequent_codes_are_those_with_most_entries(codes, min_count, max_codes):
    window = MultiMap(100)
    window.insert(int64_array(codes))
    found, counts = frequent_codes(window, min_count, max_codes)
    twin = Counter(codes)
    given_counts = dict(zip(found.tolist(), counts.tolist(), strict=True))
    assert len(given_counts) == found.size <= max_codes
    assert all(twin[code] == count >= min_count for code, count in given_counts.items())
    left_out = [count for code, count in twin.items() if count >= min_count and code not in given_counts]
    # What was left out came no more often than what was given, and was left out for lack of room only.
    if left_out:
        assert max(left_out) <= min(given_counts.values(), default=max(left_out))
        same = sum(count == max(left_out) for count in twin.values())
        assert sum(count > max(left_out) for count in twin.values()) + same > max_codes


def test_frequent_codes_with_more_entries_than_are_told_apart():
    window = MultiMap(2000)
    window.insert(np.repeat(np.arange(4), [300, 400, 500, 2]).astype(np.int64))
    codes, counts = frequent_codes(window, 3, 2)
    assert codes.size == 2
    assert set(counts.tolist()) <= {300, 400, 500}


def test_value_table_over_the_slots_of_another_finds_its_entries() -> None:
    table = ValueTable(10)
    table.put(int64_array([7, 9]), rows=int64_array([3, 4]))
    slots = table.slots.view()
    slots.flags.writeable = False
    again = ValueTable.over(slots, len(table))
    assert len(again) == 2
    assert again.rows_at(again.find(int64_array([9, 7]))).tolist() == [4, 3]
