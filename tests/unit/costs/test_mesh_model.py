"""MESHJOIN's equations, by hand-computed numbers and by the shapes that the paper draws."""

import math

import pytest

from dovetail.costs import CostFactors, IndexNestedLoopModel, JoinProfile, MeshModel
from dovetail.costs.mesh import (
    loop_cost,
    memory_components,
    reads_per_second,
    reads_per_tuple,
    required_chunk,
    solve_chunk,
)
from dovetail.costs.tune import tune

# The relation of table 2 in pages of 8 kB: 68 rows each.
PAGES = 51_471
FACTORS = CostFactors(
    seek_s=8e-3,
    bandwidth_bytes_per_s=50e6,
    read_call_s=1e-3,
    **{
        name: getattr(CostFactors.of_papers(probe_s=3e-7, expire_s=4e-7, append_s=5e-7), name)
        for name in ("probe_s", "cache_probe_s", "expire_s", "append_s")
    },
    stream_read_s=1e-7,
    output_s=2e-7,
)


def test_equation_1_by_hand():
    parts = memory_components(
        chunk_tuples=1000,
        block_pages=50,
        relation_pages=PAGES,
        page_bytes=8192,
        stream_tuple_bytes=20,
        pointer_bytes=4,
        fudge=1.5,
    )
    assert parts["block_buffer"] == 50 * 8192
    assert parts["stream_buffer"] == 20_000
    assert parts["window"] == pytest.approx(1000 * 1029.42 * 4 + 1000 * 1.5 * 1029.42 * 20)


def test_equation_2_by_hand():
    cost = loop_cost(
        chunk_tuples=1000,
        block_pages=50,
        relation_pages=PAGES,
        page_bytes=8192,
        relation_row_bytes=120,
        selectivity=0.2,
        factors=FACTORS,
    )
    rows = 50 * 8192 / 120
    assert cost.terms == pytest.approx(
        {
            "read": 1e-3 + 50 * 8192 / 50e6,
            "expire": 1000 * 4e-7,
            "stream": 1000 * 1e-7,
            "append": 1000 * 5e-7,
            "probe": rows * 3e-7,
            "output": 0.2 * rows * 2e-7,
            "step": 0.0,
        }
    )
    assert cost.service_rate == pytest.approx(1000 / cost.seconds)


def test_equations_4_and_6():
    assert reads_per_tuple(block_pages=50, chunk_tuples=1000) == 0.05
    assert reads_per_second(block_pages=50, loop_seconds=0.01) == 5000
    assert required_chunk(rate=1000, fixed_seconds=0.02, seconds_per_tuple=0.0) == 20
    assert math.isinf(required_chunk(rate=1000, fixed_seconds=0.02, seconds_per_tuple=0.001))


@pytest.mark.parametrize("rate", [100.0, 5_000.0, 40_000.0, 200_000.0])
def test_required_chunk_serves_exactly_the_rate(rate):
    model = MeshModel(JoinProfile.declared(relation_rows=3_500_000), FACTORS)
    chunk = model.chunk_for_rate(5000, rate)
    assert model.loop(5000, chunk).service_rate == pytest.approx(rate, rel=1e-6)


def test_rate_beyond_the_cpu_needs_infinite_chunks():
    model = MeshModel(JoinProfile.declared(relation_rows=3_500_000), FACTORS)
    assert math.isinf(model.chunk_for_rate(5000, 1e7))
    assert math.isinf(solve_chunk(1e7, lambda tuples: model.loop(5000, tuples)))


@pytest.mark.parametrize("block_rows", [1, 7, 100, 999, 1000, 1001])
def test_chunk_for_budget_uses_the_budget_up(block_rows):
    model = MeshModel(JoinProfile.declared(relation_rows=1000), FACTORS)
    chunk = model.chunk_for_budget(block_rows, 200_000)
    assert sum(model.memory(block_rows, chunk).values()) == pytest.approx(200_000)


def test_a_last_shorter_block_counts_as_a_step_of_the_window_but_not_as_a_full_read():
    model = MeshModel(JoinProfile.declared(relation_rows=1001), CostFactors.of_papers())
    assert model.memory(1000, 1)["window"] == 2 * 20
    assert model.loop(1000, 1).disk_seconds == pytest.approx(1001 * 120 / 60e6 / 2)


def test_figure_5b_service_rate_rises_and_then_falls_with_the_block():
    model = MeshModel(JoinProfile.declared(relation_rows=3_500_000), FACTORS)
    blocks = [100, 300, 1000, 3000, 10_000, 30_000, 100_000, 170_000]
    rates = [model.loop(b, model.chunk_for_budget(b, 21e6)).service_rate for b in blocks]
    top = rates.index(max(rates))
    assert 0 < top < len(rates) - 1
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] < 0.1 * max(rates)


def test_figure_5a_memory_falls_and_then_rises_with_the_block():
    model = MeshModel(JoinProfile.declared(relation_rows=3_500_000), FACTORS)
    blocks = [100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000]
    sizes = [sum(model.memory(b, model.chunk_for_rate(b, 20_000)).values()) for b in blocks]
    top = sizes.index(min(sizes))
    assert 0 < top < len(sizes) - 1
    assert sizes[: top + 1] == sorted(sizes[: top + 1], reverse=True)
    assert sizes[top:] == sorted(sizes[top:])


@pytest.mark.parametrize("share", [0.005, 0.01, 0.05, 0.1])
def test_mesh_is_at_least_ten_times_index_nested_loops(share):
    """Figure 6b: "a 10x improvement for all memory allocations"."""
    profile = JoinProfile.declared(relation_rows=3_500_000)
    budget = int(share * profile.relation_bytes)
    mesh = tune("mesh", profile=profile, factors=FACTORS, budget=budget).service_rate
    assert mesh > 10 * tune("index_nested_loop", profile=profile, factors=FACTORS, budget=budget).service_rate


def test_index_nested_loop_with_all_of_r_in_the_pool_reads_nothing():
    profile = JoinProfile.declared(relation_rows=1000)
    model = IndexNestedLoopModel(profile, FACTORS)
    assert model.loop(page_rows=68, pool_pages=profile.blocks(68)).disk_seconds == 0.0
    assert model.loop(page_rows=68, pool_pages=1).disk_seconds > 0.0
