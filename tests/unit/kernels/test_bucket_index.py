"""The bucket index against a naive twin: dictionaries of lists."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dovetail.kernels.bucket_index import (
    bucket_count_of,
    expand_piece,
    find_in_buckets,
    order_by_bucket,
    partitions_of,
    start_buckets,
    stretch_of_partition,
)

CODES = st.lists(st.integers(-5, 5) | st.sampled_from([2**63 - 1, -(2**63)]), max_size=60)


def naive_rows(codes: list[int], query: int) -> list[int]:
    return [row for row, code in enumerate(codes) if code == query]


@given(codes=CODES, queries=CODES, partitions=st.sampled_from([1, 4, 16]), max_pairs=st.integers(1, 9))
def test_every_row_of_a_code_is_found_once_and_in_its_order(
    codes: list[int], queries: list[int], partitions: int, max_pairs: int
) -> None:
    stored = np.array(codes, np.int64)
    order, starts = order_by_bucket(stored, bucket_count_of(len(codes), partitions))
    assert sorted(order.tolist()) == list(range(len(codes)))
    first, count, total = find_in_buckets(starts, stored[order], np.array(queries, np.int64))
    pairs, state = [], (0, 0, total)
    while state[2]:
        rows, places, state = expand_piece(first, count, state, max_pairs)
        assert rows.size <= max_pairs
        pairs += list(zip(rows.tolist(), order[places].tolist(), strict=True))
    assert pairs == [(i, row) for i, query in enumerate(queries) for row in naive_rows(codes, query)]


@given(codes=CODES, partitions=st.sampled_from([1, 4, 16]))
def test_partition_is_one_slice_of_the_stored_order(codes: list[int], partitions: int) -> None:
    stored = np.array(codes, np.int64)
    buckets = bucket_count_of(len(codes), partitions)
    order, starts = order_by_bucket(stored, buckets)
    assert np.array_equal(starts, start_buckets(stored[order], buckets))
    slices = starts[:: buckets // partitions]
    for partition in range(partitions):
        inside = stored[order][slices[partition] : slices[partition + 1]]
        assert (partitions_of(inside, partitions) == partition).all()
        assert stretch_of_partition(stored[order], partitions, partition) == (slices[partition], slices[partition + 1])
    assert slices[-1] == len(codes)


@given(codes=CODES, queries=CODES, start=st.integers(0, 60), stop=st.integers(0, 60))
def test_part_of_the_stored_order_is_searched_with_fewer_buckets(
    codes: list[int], queries: list[int], start: int, stop: int
) -> None:
    stored = np.array(codes, np.int64)
    order, _ = order_by_bucket(stored, 64)
    part = stored[order][start:stop]
    first, count, _ = find_in_buckets(start_buckets(part, 2), part, np.array(queries, np.int64))
    assert count.tolist() == [int((part == query).sum()) for query in queries]
    assert all((part[f : f + c] == query).all() for f, c, query in zip(first, count, queries, strict=True))


def test_bucket_with_many_codes_is_searched_by_halves() -> None:
    seed = 11
    print(f"seed {seed}")
    codes = np.random.default_rng(seed).integers(0, 40, 500)
    order, starts = order_by_bucket(codes, 1)
    first, count, total = find_in_buckets(starts, codes[order], np.arange(-1, 41))
    assert count.tolist() == [int((codes == code).sum()) for code in range(-1, 41)]
    assert total == 500
    assert all(codes[order][start] == code for code, start in zip(range(40), first[1:-1], strict=True))


def test_long_bucket_of_many_hashes_is_searched_by_halves() -> None:
    codes = np.arange(300)
    order, starts = order_by_bucket(codes, 2)
    first, count, total = find_in_buckets(starts, codes[order], np.arange(-10, 310))
    assert total == 300
    assert count[10:-10].tolist() == [1] * 300
    assert codes[order][first[10:-10]].tolist() == codes.tolist()


def test_codes_of_another_type_are_refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        order_by_bucket(np.array([1.0]), 4)
