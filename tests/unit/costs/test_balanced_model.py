"""SSBJ's equations, the cache inequality, and the most that a cache can bring."""

import math

import numpy as np
import pytest

from dovetail.costs import (
    BalancedModel,
    CostFactors,
    JoinProfile,
    MeshModel,
    is_better_cached,
    optimal_cache_share,
    tune,
)
from dovetail.costs.balanced import loop_cost, memory_components
from dovetail_lab.workloads import Zipf

FACTORS = CostFactors.of_papers(
    probe_s=1e-7, output_s=2e-7, expire_s=3e-7, stream_read_s=4e-8, append_s=5e-7, switch_s=6e-7
)


def test_cache_inequality_of_figure_3():
    assert is_better_cached(relation_rows=2, row_bytes=1, stream_tuples_per_cycle=3, tuple_bytes=1)
    assert not is_better_cached(relation_rows=4, row_bytes=1, stream_tuples_per_cycle=3, tuple_bytes=1)
    # The inequality is strict: equal memory is no reason to move.
    assert not is_better_cached(relation_rows=1, row_bytes=120, stream_tuples_per_cycle=6, tuple_bytes=20)


def test_equation_1_by_hand():
    parts = memory_components(
        disk_tuples=500,
        block_rows=1000,
        cached_rows=2000,
        relation_rows=20_000_000,
        relation_row_bytes=120,
        stream_tuple_bytes=20,
        pointer_bytes=4,
        fudge=4.8,
    )
    assert parts == {
        "block_buffer": 1000 * 120,
        "cache": pytest.approx(2000 * 4.8 * 120),
        "window": pytest.approx(500 * 20_000 * (4 + 4.8 * 20)),
    }


def test_equation_2_by_hand():
    cost = loop_cost(
        cache_tuples=700,
        disk_tuples=300,
        block_rows=1000,
        relation_row_bytes=120,
        window_tuples=1e6,
        cached_rows=1e5,
        factors=FACTORS,
    )
    expected = 1000 * 120 / 60e6 + 1000 * (1e-7 + 6e-7) + 700 * (4e-8 + 1e-7 + 2e-7) + 300 * (3e-7 + 4e-8 + 5e-7 + 2e-7)
    assert cost.seconds == pytest.approx(expected)
    assert cost.service_rate == pytest.approx(1000 / expected)


def test_running_operator_also_looks_up_misses_and_switches_nothing():
    arguments = {
        "cache_tuples": 700,
        "disk_tuples": 300,
        "block_rows": 1000,
        "relation_row_bytes": 120,
        "window_tuples": 1e6,
        "cached_rows": 1e5,
        "factors": FACTORS,
    }
    written = loop_cost(**arguments)
    running = loop_cost(**arguments, switched_share=0.0, charges_misses=True)
    assert running.seconds == pytest.approx(written.seconds - 1000 * 6e-7 + 300 * 1e-7)


def test_without_a_cache_it_is_mesh():
    profile = JoinProfile.declared(relation_rows=100_000, hit_curve=lambda rows: min(1.0, rows / 1e5))
    factors = CostFactors.of_papers(append_s=1e-7, expire_s=1e-7, output_s=1e-7, stream_read_s=1e-8)
    balanced = BalancedModel(profile, factors).loop(1000, 0, 50)
    assert balanced.seconds == pytest.approx(MeshModel(profile, factors).loop(1000, 50).seconds)


@pytest.mark.parametrize(("share_of_relation", "gain"), [(0.01, 2.05), (0.05, 2.72), (0.10, 3.20)])
def test_optimal_gain_over_mesh_at_exponent_1(share_of_relation, gain):
    budget_bytes = share_of_relation * 3_500_000 * 120
    share, best = optimal_cache_share(
        budget_bytes=budget_bytes, cache_entry_bytes=120, hit_curve=Zipf(3_500_000, 1.0).hit_curve()
    )
    assert best == pytest.approx(gain, abs=0.005)
    assert 0.1 < share < 0.25


@pytest.mark.parametrize("share_of_relation", [0.01, 0.05, 0.10])
@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.3])
def test_optimal_share_equals_exhaustive_search(share_of_relation, exponent):
    budget_bytes = share_of_relation * 100_000 * 120
    curve = Zipf(100_000, exponent).hit_curve()
    shares = np.linspace(0, 0.999, 2000)
    exhaustive = max((1 - a) / (1 - curve(a * budget_bytes / 120)) for a in shares)
    _, best = optimal_cache_share(budget_bytes=budget_bytes, cache_entry_bytes=120, hit_curve=curve)
    assert best >= exhaustive * (1 - 1e-9)


def test_uniform_stream_gains_nothing_from_a_small_cache():
    share, gain = optimal_cache_share(
        budget_bytes=1200, cache_entry_bytes=120, hit_curve=lambda rows: min(1.0, rows / 1000)
    )
    assert share == 0.0
    assert gain == 1.0


def test_everything_in_the_cache_has_no_limit_by_the_disk():
    share, gain = optimal_cache_share(
        budget_bytes=240_000, cache_entry_bytes=120, hit_curve=lambda rows: min(1.0, rows / 1000)
    )
    assert share == 1.0
    assert math.isinf(gain)


@pytest.mark.parametrize("share_of_relation", [0.01, 0.05, 0.10])
def test_tuned_gain_over_mesh_reaches_the_optimum_when_disk_bound(share_of_relation):
    profile = JoinProfile.declared(relation_rows=3_500_000, hit_curve=Zipf(3_500_000, 1.0).hit_curve())
    budget = int(share_of_relation * profile.relation_bytes)
    factors = CostFactors.of_papers()
    mesh = tune("mesh", profile=profile, factors=factors, budget=budget)
    balanced = tune("balanced", profile=profile, factors=factors, budget=budget)
    _, optimum = optimal_cache_share(
        budget_bytes=budget, cache_entry_bytes=profile.cache_entry_bytes, hit_curve=profile.hit_curve
    )
    assert 0.97 * optimum <= balanced.service_rate / mesh.service_rate <= 1.03 * optimum


@pytest.mark.parametrize("rate", [1_000.0, 20_000.0, 100_000.0])
def test_disk_tuples_for_rate_serve_the_rate(rate):
    profile = JoinProfile.declared(relation_rows=100_000, hit_curve=Zipf(100_000, 1.0).hit_curve())
    model = BalancedModel(profile, FACTORS)
    disk_tuples = model.disk_tuples_for_rate(1000, 5000, rate)
    assert model.loop(1000, 5000, disk_tuples).service_rate == pytest.approx(rate, rel=1e-6)


def test_all_of_r_cached_needs_neither_window_nor_block_buffer():
    profile = JoinProfile.declared(relation_rows=1000)
    model = BalancedModel(profile, FACTORS)
    assert model.memory(100, 1000, 0) == {"block_buffer": 0.0, "cache": 120_000.0, "window": 0.0}
    assert model.loop(100, 1000, 0).service_rate == pytest.approx(1 / (4e-8 + 1e-7 + 2e-7))
    assert math.isinf(model.disk_tuples_for_rate(100, 1000, 1e9))
    assert model.disk_tuples_for_rate(100, 1000, 1e6) == 0.0
