"""The time index against naive twins."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dovetail.kernels.time_index import EVERY_PLACE, are_runs_in_time_order, narrow_to_times, sort_runs_by_time

RUNS = st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=40), max_size=6)


@given(runs=RUNS)
def test_runs_are_sorted_by_time_and_stably(runs: list[list[int]]) -> None:
    codes = np.array([number for number, run in enumerate(runs) for _ in run], np.int64)
    times = np.array([time for run in runs for time in run], np.int64)
    # Place i holds row order[i]: rows may lie anywhere.
    rows = np.random.default_rng(len(times)).permutation(len(times)).astype(np.int32)
    at_rows = np.empty_like(times)
    at_rows[rows] = times
    order = rows.copy()
    sort_runs_by_time(codes, at_rows, order)
    expected, start = [], 0
    for run in runs:
        expected += sorted(rows[start : start + len(run)].tolist(), key=lambda row: at_rows[row])
        start += len(run)
    assert order.tolist() == expected
    assert are_runs_in_time_order(codes, at_rows[order])
    naive = all(run == sorted(run) for run in runs)
    assert are_runs_in_time_order(codes, times) == naive


@given(runs=RUNS, bounds=st.lists(st.tuples(st.integers(-10, 10), st.integers(-10, 10)), min_size=6, max_size=6))
def test_places_are_narrowed_to_the_bounds_of_each_query(runs: list[list[int]], bounds: list[tuple[int, int]]) -> None:
    times = np.array([time for run in runs for time in sorted(run)], np.int64)
    starts = np.cumsum([0, *map(len, runs)])
    for order in (EVERY_PLACE, np.arange(len(times), dtype=np.int32)[::-1].copy()):
        held = times if order is EVERY_PLACE else times[::-1].copy()
        first = starts[:-1].astype(np.int32)
        count = np.diff(starts).astype(np.int32)
        earliest, latest = (np.array([b[side] for b in bounds[: len(runs)]], np.int64) for side in (0, 1))
        total = narrow_to_times(first, count, held, order, earliest, latest)
        assert total == count.sum()
        for number, run in enumerate(runs):
            low, high = bounds[number]
            inside = [p for p in range(starts[number], starts[number + 1]) if low <= times[p] <= high]
            assert list(range(first[number], first[number] + count[number])) == inside, (run, low, high)
