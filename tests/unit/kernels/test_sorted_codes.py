"""Lookups, grouping, merging and statistics of sorted codes against plain Python."""

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dovetail.kernels.sorted_codes import (
    expand_ranges,
    group_by_block,
    lookup_sorted,
    make_fences,
    merge_sorted_runs,
    run_statistics,
)

INT64 = np.iinfo(np.int64)
CODES = st.one_of(st.sampled_from([INT64.min, INT64.min + 1, INT64.max - 1, INT64.max, -1, 0]), st.integers(-6, 6))
RUN = st.lists(CODES, max_size=60).map(sorted)


def int64_array(values):
    return np.array(values, dtype=np.int64)


@given(codes=RUN, queries=st.lists(CODES, max_size=150), stride=st.integers(1, 70))
@example(codes=[], queries=[0, INT64.min], stride=4)
@example(codes=[5] * 50, queries=[4, 5, 6], stride=4)
@example(codes=[1, *[5] * 40, 7], queries=[1, 5, 7, 8], stride=8)
@example(codes=[INT64.min] * 3 + [INT64.max] * 3, queries=[INT64.min, 0, INT64.max], stride=2)
def test_lookup_gives_the_equal_ranges_that_bisection_gives(codes, queries, stride):
    array = int64_array(codes)
    first, count = lookup_sorted(make_fences(array, stride), stride, array, int64_array(queries))
    assert first.tolist() == [bisect_left(codes, query) for query in queries]
    assert count.tolist() == [bisect_right(codes, query) - bisect_left(codes, query) for query in queries]
    assert (first.dtype, count.dtype) == (np.int64, np.int32)


def test_lookup_in_a_larger_array_agrees_with_searchsorted():
    rng = np.random.default_rng(21)
    codes = np.sort(rng.integers(0, 3000, 5000))
    queries = rng.integers(-10, 3010, 1000)
    for stride in (1, 2, 64, 128, 4999, 5000, 9000):
        first, count = lookup_sorted(make_fences(codes, stride), stride, codes, queries)
        assert first.tolist() == np.searchsorted(codes, queries, "left").tolist()
        assert (first + count).tolist() == np.searchsorted(codes, queries, "right").tolist()


def test_lookup_in_a_mapped_file(tmp_path):
    path = tmp_path / "codes.bin"
    np.arange(0, 2000, 2).tofile(path)
    codes = np.memmap(path, dtype=np.int64, mode="r")
    first, count = lookup_sorted(make_fences(codes, 16), 16, codes, int64_array([0, 7, 1998]))
    assert (first.tolist(), count.tolist()) == ([0, 4, 999], [1, 0, 1])


def test_lookup_refuses_fences_of_another_stride():
    codes = np.arange(100)
    with pytest.raises(ValueError, match="100 codes with a stride of 10 have 10 fences, not 20"):
        lookup_sorted(make_fences(codes, 5), 10, codes, codes)
    with pytest.raises(ValueError, match="at least 1"):
        make_fences(codes, 0)
    with pytest.raises(ValueError, match="at least 1"):
        lookup_sorted(codes, 0, codes, codes)
    with pytest.raises(TypeError, match="Queries"):
        lookup_sorted(codes, 1, codes, np.array([1.5]))


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 5)), max_size=40))
def test_ranges_expand_to_rows_and_positions(ranges):
    first = int64_array([start for start, _ in ranges])
    count = np.array([size for _, size in ranges], dtype=np.int32)
    rows, positions = expand_ranges(first, count)
    expected = [(row, start + i) for row, (start, size) in enumerate(ranges) for i in range(size)]
    assert list(zip(rows.tolist(), positions.tolist(), strict=True)) == expected


def naive_groups(positions, block_of):
    groups: dict[int, list[int]] = {}
    for position in positions:
        groups.setdefault(block_of(position), []).append(position)
    return groups


@given(st.lists(st.integers(0, 200), max_size=60).map(sorted), st.integers(1, 50))
def test_positions_are_grouped_by_blocks_of_one_size(positions, block_rows):
    block_ids, offsets = group_by_block(int64_array(positions), block_rows)
    expected = naive_groups(positions, lambda position: position // block_rows)
    assert block_ids.tolist() == list(expected)
    assert [positions[a:b] for a, b in itertools.pairwise(offsets)] == list(expected.values())


@given(st.lists(st.integers(0, 200), max_size=60).map(sorted), st.sets(st.integers(1, 190), max_size=20))
def test_positions_are_grouped_by_blocks_of_given_starts(positions, starts):
    starts = [0, *sorted(starts)]
    block_ids, offsets = group_by_block(int64_array(positions), int64_array(starts))
    expected = naive_groups(positions, lambda position: bisect_right(starts, position) - 1)
    assert block_ids.tolist() == list(expected)
    assert [positions[a:b] for a, b in itertools.pairwise(offsets)] == list(expected.values())


def test_impossible_blocks_are_refused():
    with pytest.raises(ValueError, match="at least 1 row"):
        group_by_block(int64_array([1]), 0)
    for starts in ([], [1, 5]):
        with pytest.raises(ValueError, match="start at row 0"):
            group_by_block(int64_array([1]), int64_array(starts))


@given(st.lists(RUN, max_size=5), st.integers(1, 30))
@example(runs=[[0] * 40, [0] * 3, []], max_rows=7)
def test_runs_merge_in_the_order_of_code_source_and_row(runs, max_rows):
    arrays = [int64_array(run) for run in runs]
    expected = sorted((code, source, row) for source, run in enumerate(runs) for row, code in enumerate(run))
    cursors = np.zeros(len(runs), dtype=np.int64)
    merged = []
    while len(merged) < len(expected):
        sources, rows = merge_sorted_runs(arrays, cursors, max_rows)
        assert sources.size == min(max_rows, len(expected) - len(merged)), "chunks are full until the end"
        merged += [(runs[s][r], s, r) for s, r in zip(sources.tolist(), rows.tolist(), strict=True)]
        consumed = Counter(source for _, source, _ in merged)
        assert cursors.tolist() == [consumed[source] for source in range(len(runs))]
    assert merged == expected
    sources, rows = merge_sorted_runs(arrays, cursors, max_rows)
    assert (sources.size, rows.size) == (0, 0)


def test_merge_refuses_what_it_cannot_go_on_from():
    runs = [np.arange(3), np.arange(3)]
    with pytest.raises(ValueError, match="at least 1 row"):
        merge_sorted_runs(runs, np.zeros(2, dtype=np.int64), 0)
    for cursors in (np.zeros(1, dtype=np.int64), np.zeros(2, dtype=np.int32)):
        with pytest.raises(ValueError, match="2 runs need 2 int64 cursors"):
            merge_sorted_runs(runs, cursors, 5)


@given(
    st.lists(
        RUN.flatmap(
            lambda run: st.tuples(
                st.just(run), st.none() | st.lists(st.booleans(), min_size=len(run), max_size=len(run))
            )
        ),
        max_size=4,
    )
)
def test_statistics_count_the_live_rows_of_all_runs(runs):
    arrays = [int64_array(run) for run, _ in runs]
    masks = [None if mask is None else np.array(mask, dtype=np.bool_) for _, mask in runs]
    counts = Counter(code for run, mask in runs for row, code in enumerate(run) if mask is None or not mask[row])
    assert run_statistics(arrays, masks) == (len(counts), max(counts.values(), default=0))


@given(RUN)
def test_statistics_of_one_array(run):
    counts = Counter(run)
    assert run_statistics(int64_array(run)) == (len(counts), max(counts.values(), default=0))


def test_statistics_go_on_across_chunks(monkeypatch):
    monkeypatch.setattr("dovetail.kernels.sorted_codes._STATISTICS_ROWS", 3)
    assert run_statistics(int64_array([1, 2, 2, 2, 2, 2, 2, 2, 3])) == (3, 7)
    assert run_statistics([int64_array([1, 2, 2, 2]), int64_array([2, 2, 3])]) == (3, 5)
    assert run_statistics([int64_array([5, 5, 5, 5, 6])], [np.array([1, 1, 1, 1, 0], dtype=np.bool_)]) == (1, 1)


def test_statistics_refuse_masks_of_another_length():
    with pytest.raises(ValueError, match="one element per row"):
        run_statistics([int64_array([1, 2])], [np.array([True])])
