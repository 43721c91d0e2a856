"""What is joined: hit curves in every form, blocks and their shares."""

import math

import numpy as np
import pytest

from dovetail.core.errors import PlanError
from dovetail.costs import JoinProfile, as_hit_curve
from dovetail.costs.profile import kernel_bytes_per_entry
from dovetail.kernels.multimap import DENSE_LOAD, MultiMap
from dovetail_lab.workloads import Zipf


def test_uniform_curve():
    curve = as_hit_curve(None, 1000)
    assert [curve(rows) for rows in (-5, 0, 250, 1000, 2000)] == [0.0, 0.0, 0.25, 1.0, 1.0]


def test_array_and_function_give_the_same_curve():
    distribution = Zipf(5000, 0.8)
    listed = as_hit_curve(distribution.storage_cumulative(), 5000)
    function = distribution.hit_curve()
    for rows in (0, 0.5, 1, 17.25, 4999.5, 5000, 6000):
        assert listed(rows) == pytest.approx(function(rows), rel=1e-9)


@pytest.mark.parametrize("curve", [[], [0.5, 0.4], [0.5, 1.1], [math.nan], [-0.1, 0.5]])
def test_impossible_curves_are_refused(curve):
    with pytest.raises(PlanError, match="cumulative shares"):
        as_hit_curve(curve, 10)


def test_hit_ratio_of_a_whole_relation_is_1_even_if_part_of_the_stream_has_no_match():
    """The cache then also knows what has no match."""
    profile = JoinProfile.declared(relation_rows=10, hit_curve=lambda rows: 0.05 * rows)
    assert profile.hit_ratio(9) == pytest.approx(0.45)
    assert profile.hit_ratio(10) == 1.0


@pytest.mark.parametrize("block_rows", [1, 3, 10, 99, 100, 1000])
def test_block_shares_add_up(block_rows):
    distribution = Zipf(100, 1.0)
    for curve in (None, distribution.hit_curve(), distribution.storage_cumulative()):
        profile = JoinProfile.declared(relation_rows=100, storage_curve=curve)
        shares, counts = profile.block_shares(block_rows)
        assert float((shares * counts).sum()) == pytest.approx(1.0)
        assert counts.sum() == profile.blocks(block_rows) == math.ceil(100 / block_rows)


def test_blocks_never_asked_for_are_left_out():
    cumulative = np.array([0.5, 0.5, 0.5, 1.0])
    shares, counts = JoinProfile.declared(relation_rows=4, storage_curve=cumulative).block_shares(1)
    assert shares.tolist() == [0.5, 0.5]
    assert counts.tolist() == [1.0, 1.0]


def test_overhead_is_that_of_the_kernels():
    profile = JoinProfile.with_overhead(relation_rows=10, stream_tuple_bytes=20)
    large = 1_000_000
    assert profile.window_entry_bytes == pytest.approx(20 + MultiMap(large, DENSE_LOAD).nbytes / large, rel=1e-3)
    assert profile.cache_entry_bytes == pytest.approx(120 + kernel_bytes_per_entry())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"relation_rows": 0}, "relation_rows=0"),
        ({"relation_row_bytes": 0}, "relation_row_bytes=0"),
        ({"stream_tuple_bytes": -1}, "stream_tuple_bytes=-1"),
        ({"stream_tuple_bytes": math.inf}, "stream_tuple_bytes=inf"),
        ({"matches_per_tuple": -1}, "matches_per_tuple=-1"),
    ],
)
def test_impossible_profiles_are_refused(change, reason):
    with pytest.raises(PlanError, match=reason):
        JoinProfile.declared(**({"relation_rows": 10} | change))
