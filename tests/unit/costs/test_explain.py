"""Plans as text and as data, and what they call the bottleneck."""

import json

import pytest

from dovetail.costs import CostFactors, JoinProfile, tune
from dovetail.costs.access import expected_blocks, index_cost
from dovetail_lab.workloads import Zipf

PROFILE = JoinProfile.declared(relation_rows=3_500_000, hit_curve=Zipf(3_500_000, 1.0).hit_curve())
CPU = {"probe_s": 6e-8, "output_s": 1e-7, "append_s": 1e-7, "expire_s": 1e-7, "stream_read_s": 1e-8}
STRATEGIES = ["mesh", "hybrid", "balanced", "index_nested_loop", "auto"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plan_survives_json_and_adds_up(strategy):
    plan = tune(strategy, profile=PROFILE, factors=CostFactors.of_papers(**CPU), budget="21MB")
    data = json.loads(json.dumps(plan.as_dict(), allow_nan=False))
    assert data["strategy"] == strategy
    assert data["total_bytes"] == sum(data["memory_bytes"].values()) <= 21_000_000
    assert data["service_rate"] == plan.service_rate
    assert sum(data["loop_terms"].values()) == pytest.approx(data["loop_seconds"])
    assert data["binds"] in ("disk", "cpu", "memory")
    assert set(data["gains"]) == {"disk", "cpu", "memory"}


def test_plan_whose_loop_costs_nothing_is_still_json():
    plan = tune(
        "balanced", profile=JoinProfile.declared(relation_rows=10), factors=CostFactors.of_papers(), budget=2000
    )
    assert plan.as_dict()["service_rate"] is None
    assert "no limit" in plan.text()
    json.dumps(plan.as_dict(), allow_nan=False)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_text_names_what_people_ask_for(strategy):
    plan = tune(strategy, profile=PROFILE, factors=CostFactors.of_papers(**CPU), budget="21MB")
    text = plan.text()
    for word in (strategy, "budget of 21 MB", "rows per disk step", "tuples/s", f"binds         {plan.binds}:"):
        assert word in text
    for component, size in plan.memory_bytes.items():
        assert (component in text) == (size > 0)
    assert all(len(line) < 220 for line in text.splitlines())


def test_text_of_the_other_objective():
    plan = tune("balanced", profile=PROFILE, factors=CostFactors.of_papers(**CPU), objective="memory", rate=25_000)
    assert "memory, for 25 000 tuples/s" in plan.text()
    assert plan.budget_bytes is None


def test_slow_disk_binds():
    plan = tune("mesh", profile=PROFILE, factors=CostFactors.of_papers(**CPU), budget="21MB")
    assert plan.binds == "disk"
    assert plan.gains["disk"] > 1.5 > plan.gains["cpu"]


def test_fast_disk_leaves_the_cpu_to_bind():
    factors = CostFactors.of_papers(**CPU).with_disk(seek_s=0.0, bandwidth_bytes_per_s=20e9)
    plan = tune("mesh", profile=PROFILE, factors=factors, budget="42MB")
    assert plan.binds == "cpu"
    assert plan.gains["cpu"] > plan.gains["disk"]


def test_block_buffer_that_crowds_out_the_window_makes_memory_bind():
    plan = tune("hybrid", profile=PROFILE, factors=CostFactors.of_papers(**CPU), budget="2.1MB", block_rows=14_000)
    assert plan.binds == "memory"
    assert plan.gains["memory"] > 3.0
    assert "block buffer takes 80 %" in plan.why


def test_index_over_all_blocks_reads_without_a_seek():
    factors = CostFactors.of_papers()
    everything = index_cost(waiting_tuples=1e9, profile=PROFILE, factors=factors, block_rows=10_000, blocks_asked=350)
    assert everything.disk_seconds == pytest.approx(PROFILE.relation_bytes / 60e6)


def test_known_blocks_take_the_place_of_expected_ones():
    factors = CostFactors.of_papers()
    few = index_cost(waiting_tuples=1000, profile=PROFILE, factors=factors, block_rows=100, blocks_asked=5)
    assert few.disk_seconds == pytest.approx(5 * (0.008 + 100 * 120 / 60e6), rel=1e-3)


def test_expected_blocks():
    assert expected_blocks(0, 10) == 0.0
    assert expected_blocks(1, 10) == pytest.approx(1.0)
    assert expected_blocks(10**6, 10) == pytest.approx(10.0)
    assert expected_blocks(0.5, 1) == 0.5
    assert expected_blocks(7, 1) == 1.0
