"""`CodeMap` against a dictionary."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from dovetail.errors import BudgetError
from dovetail.kernels.codemap import CodeMap

INT64 = np.iinfo(np.int64)
EXTREMES = [INT64.min, INT64.max, -1, 0, 1]
CODES = st.one_of(st.sampled_from(EXTREMES), st.integers(2, 25))
VALUES = st.one_of(st.sampled_from([INT64.min + 1, INT64.max, -1, 0]), st.integers(-100, 100))


def int64_array(values):
    return np.array(values, dtype=np.int64)


class CodeMapMachine(RuleBasedStateMachine):
    @initialize(capacity=st.integers(1, 30), max_load=st.sampled_from([0.25, 0.5, 0.9]))
    def make(self, capacity, max_load):
        self.map = CodeMap(capacity, max_load)
        self.twin: dict[int, int] = {}

    def fits(self, codes):
        return len(self.twin.keys() | set(codes)) <= self.map.capacity

    @rule(items=st.lists(st.tuples(CODES, VALUES), max_size=12))
    def insert(self, items):
        codes, values = [code for code, _ in items], [value for _, value in items]
        if not self.fits(codes):
            with pytest.raises(BudgetError, match="do not fit"):
                self.map.insert(int64_array(codes), int64_array(values))
            return
        added = len(set(codes) - self.twin.keys())
        assert self.map.insert(int64_array(codes), int64_array(values)) == added
        self.twin.update(items)

    @rule(items=st.lists(st.tuples(CODES, st.integers(-5, 5)), max_size=12))
    def add(self, items):
        # Sums of the extremes would overflow; counters do not come near them.
        items = [(code, amount) for code, amount in items if abs(self.twin.get(code, 0)) < 2**40]
        codes, amounts = [code for code, _ in items], [amount for _, amount in items]
        if not self.fits(codes):
            with pytest.raises(BudgetError, match="do not fit"):
                self.map.add(int64_array(codes), int64_array(amounts))
            return
        expected = []
        for code, amount in items:
            self.twin[code] = self.twin.get(code, 0) + amount
            expected.append(self.twin[code])
        assert self.map.add(int64_array(codes), int64_array(amounts)).tolist() == expected

    @rule(codes=st.lists(CODES, max_size=12))
    def remove(self, codes):
        expected = [self.twin.pop(code, None) is not None for code in codes]
        assert self.map.remove(int64_array(codes)).tolist() == expected

    @rule(codes=st.lists(CODES, max_size=12), default=st.integers(-3, 3))
    def get(self, codes, default):
        assert self.map.get(int64_array(codes), default).tolist() == [self.twin.get(code, default) for code in codes]
        assert self.map.contains(int64_array(codes)).tolist() == [code in self.twin for code in codes]

    @rule(capacity=st.integers(1, 40))
    def resize(self, capacity):
        if capacity < len(self.twin):
            with pytest.raises(BudgetError, match="cannot get the capacity"):
                self.map.resized(capacity)
            return
        self.map = self.map.resized(capacity)
        assert self.map.capacity == capacity

    @rule()
    def clear(self):
        self.map.clear()
        self.twin = {}

    @invariant()
    def agrees(self):
        if hasattr(self, "map"):
            assert len(self.map) == len(self.twin)
            codes, values = self.map.items()
            assert dict(zip(codes.tolist(), values.tolist(), strict=True)) == self.twin


CodeMapMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestCodeMapMachine = CodeMapMachine.TestCase


def test_add_counts_by_one_unless_told():
    seen = CodeMap(4)
    assert seen.add(int64_array([3, 3, 4])).tolist() == [1, 2, 1]
    assert seen.add(int64_array([4]), 10).tolist() == [11]


def test_a_full_map_takes_codes_that_it_already_has():
    full = CodeMap(2)
    full.insert(int64_array([1, 2]), int64_array([10, 20]))
    assert full.insert(int64_array([2, 1, 2]), int64_array([21, 11, 22])) == 0
    assert full.get(int64_array([1, 2])).tolist() == [11, 22]
    with pytest.raises(BudgetError, match=r"1 more codes do not fit a CodeMap of capacity 2 that holds 2"):
        full.add(int64_array([1, 3, 3]))
    assert full.get(int64_array([1, 3])).tolist() == [11, -1], "nothing was added before the refusal"


def test_the_value_that_cannot_be_stored_is_refused():
    with pytest.raises(ValueError, match="smallest int64"):
        CodeMap(2).insert(int64_array([1]), int64_array([INT64.min]))


def test_values_must_match_codes():
    with pytest.raises(ValueError, match="one value for each"):
        CodeMap(2).insert(int64_array([1]), int64_array([1, 2]))
    with pytest.raises(TypeError, match="one-dimensional int64"):
        CodeMap(2).get(np.array([1], dtype=np.int32))


@pytest.mark.parametrize(("capacity", "max_load"), [(0, 0.5), (2**31, 0.5), (10, 0.05), (10, 0.95)])
def test_impossible_sizes_are_refused(capacity, max_load):
    with pytest.raises(ValueError, match="CodeMap"):
        CodeMap(capacity, max_load)


@pytest.mark.parametrize("capacity", [1, 3, 1000])
def test_declared_bytes_are_the_bytes_allocated(capacity):
    counters = CodeMap(capacity)
    assert counters.nbytes == CodeMap.nbytes_of(capacity) == counters._slots.base.nbytes
