"""Sets of integers as intervals, against sets of integers."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from dovetail.joins.promises.intervals import LEAST, MOST, IntervalSet

EDGES = [LEAST, LEAST + 1, LEAST + 2, *range(-3, 12), MOST - 2, MOST - 1, MOST]
SETS = st.sets(st.sampled_from(EDGES))


def naive(values: set[int]) -> list[tuple[int, int]]:
    pairs: list[list[int]] = []
    for value in sorted(values):
        if pairs and pairs[-1][1] == value - 1:
            pairs[-1][1] = value
        else:
            pairs.append([value, value])
    return [(low, high) for low, high in pairs]


@given(one=SETS, other=SETS)
def test_operations_are_those_of_sets(one: set[int], other: set[int]) -> None:
    a, b = IntervalSet.of(one), IntervalSet.of(other)
    assert a.pairs() == naive(one)
    assert a.union(b).pairs() == naive(one | other)
    assert a.intersection(b).pairs() == naive(one & other)
    assert a.minus(b).pairs() == naive(one - other)
    assert a.complement().complement() == a
    assert a.contains(np.array(EDGES)).tolist() == [value in one for value in EDGES]
    points = a.points(len(EDGES))
    assert points is not None
    assert set(points.tolist()) == one


@given(values=SETS, low=st.sampled_from(EDGES), high=st.sampled_from(EDGES))
def test_range_is_covered_if_one_interval_holds_it(values: set[int], low: int, high: int) -> None:
    if low > high:
        low, high = high, low
    is_near = high - low < 50
    expected = is_near and all(value in values for value in range(low, high + 1))
    assert IntervalSet.of(values).covers(low, high) == expected


def test_a_million_neighbours_are_one_interval() -> None:
    order = np.random.default_rng(1).permutation(1_000_000)
    closed = IntervalSet.empty()
    for part in np.array_split(order, 10):
        closed = closed.union(IntervalSet.of(part))
    assert closed.pairs() == [(0, 999_999)]
    assert closed.points(1000) is None


@given(st.sets(st.integers(-40, 40)), st.sets(st.integers(-40, 40)))
def test_bridged_set_has_the_same_of_the_values_that_come(closed: set[int], coming: set[int]) -> None:
    def comes(values: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        return np.isin(values, sorted(coming))

    bridged = IntervalSet.of(sorted(closed)).bridged(comes)
    values = np.array(sorted(coming), np.int64)
    assert set(values[bridged.contains(values)].tolist()) == closed & coming
    # No two intervals are left between which nothing comes.
    for (_, high), (low, _) in pairwise(bridged.pairs()):
        assert any(high < value < low for value in coming)


def test_gap_as_wide_as_all_numbers_is_left_alone() -> None:
    ends = IntervalSet.of([-(2**63), 2**63 - 1])
    assert ends.bridged(lambda values: np.zeros(len(values), np.bool_)) == ends
