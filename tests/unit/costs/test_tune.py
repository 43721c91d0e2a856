"""Tuners against exhaustive search, against each other, and against the paper's claims about them."""

import math
from itertools import pairwise

import pytest

from dovetail.core.errors import BudgetError, PlanError
from dovetail.costs import (
    BalancedModel,
    CachedIndexModel,
    CostFactors,
    HybridModel,
    IndexNestedLoopModel,
    JoinProfile,
    MeshModel,
    minimum_budget,
    tune,
)
from dovetail_lab.workloads import Zipf

PAPER_FACTORS = CostFactors.of_papers(
    probe_s=60e-9, output_s=100e-9, expire_s=80e-9, stream_read_s=20e-9, append_s=120e-9, switch_s=50e-9
)
FAST_DISK_FACTORS = PAPER_FACTORS.with_disk(seek_s=1e-4, bandwidth_bytes_per_s=2e9, read_call_s=1e-5)
STRATEGIES = ["mesh", "hybrid", "balanced", "index_nested_loop", "auto"]


def skewed(rows: int, exponent: float = 1.0) -> JoinProfile:
    return JoinProfile.with_overhead(
        relation_rows=rows,
        window_overhead_bytes=49,
        cache_overhead_bytes=49,
        hit_curve=Zipf(rows, exponent).hit_curve(),
    )


@pytest.fixture(scope="module")
def paper_profile() -> JoinProfile:
    return JoinProfile.declared(relation_rows=3_500_000, hit_curve=Zipf(3_500_000, 1.0).hit_curve())


@pytest.mark.parametrize("factors", [PAPER_FACTORS, FAST_DISK_FACTORS], ids=["paper disk", "fast disk"])
@pytest.mark.parametrize("share", [0.1, 0.25, 1.0])
class TestAgainstExhaustiveSearch:
    ROWS = 2000

    def budget(self, share: float) -> int:
        return int(share * self.ROWS * 120)

    def test_mesh_rate(self, share, factors):
        profile, budget = skewed(self.ROWS), self.budget(share)
        model = MeshModel(profile, factors)
        best = 0.0
        for block_rows in range(1, self.ROWS + 1):
            chunk = math.floor(model.chunk_for_budget(block_rows, budget))
            if chunk >= 1:
                best = max(best, model.loop(block_rows, chunk).service_rate)
        plan = tune("mesh", profile=profile, factors=factors, budget=budget)
        assert plan.total_bytes <= budget
        assert plan.service_rate >= 0.97 * best

    def test_hybrid_rate(self, share, factors):
        profile, budget = skewed(self.ROWS), self.budget(share)
        model = HybridModel(profile, factors)
        best = 0.0
        for block_rows in range(1, self.ROWS + 1, 7):
            window = math.floor(model.window_for_budget(block_rows, budget))
            if window >= 1:
                best = max(best, model.loop(block_rows, window).service_rate)
        plan = tune("hybrid", profile=profile, factors=factors, budget=budget)
        assert plan.total_bytes <= budget
        assert plan.service_rate >= 0.99 * best

    def test_balanced_rate(self, share, factors):
        profile, budget = skewed(self.ROWS), self.budget(share)
        model = BalancedModel(profile, factors)
        best = 0.0
        for block_rows in range(10, self.ROWS + 1, 40):
            for cached_rows in range(0, self.ROWS, 20):
                disk_tuples = math.floor(model.disk_tuples_for_budget(block_rows, cached_rows, budget))
                if disk_tuples >= 1:
                    best = max(best, model.loop(block_rows, cached_rows, disk_tuples).service_rate)
        plan = tune("balanced", profile=profile, factors=factors, budget=budget)
        assert plan.total_bytes <= budget
        assert plan.service_rate >= 0.97 * best

    def test_mesh_memory(self, share, factors):
        profile = skewed(self.ROWS)
        model = MeshModel(profile, factors)
        rate = 0.9 * tune("mesh", profile=profile, factors=factors, budget=self.budget(share)).service_rate
        least = math.inf
        for block_rows in range(1, self.ROWS + 1):
            chunk = max(1, math.ceil(model.chunk_for_rate(block_rows, rate)))
            least = min(least, sum(model.memory(block_rows, chunk).values()))
        plan = tune("mesh", profile=profile, factors=factors, objective="memory", rate=rate)
        assert plan.service_rate >= rate * (1 - 1e-9)
        assert plan.total_bytes <= 1.03 * least

    def test_balanced_memory(self, share, factors):
        profile = skewed(self.ROWS)
        model = BalancedModel(profile, factors)
        rate = 0.9 * tune("balanced", profile=profile, factors=factors, budget=self.budget(share)).service_rate
        least = math.inf
        for block_rows in range(10, self.ROWS + 1, 40):
            for cached_rows in range(0, self.ROWS + 1, 20):
                disk_tuples = model.disk_tuples_for_rate(block_rows, cached_rows, rate)
                if math.isfinite(disk_tuples):
                    chunk = max(1, math.ceil(disk_tuples))
                    least = min(least, sum(model.memory(block_rows, cached_rows, chunk).values()))
        plan = tune("balanced", profile=profile, factors=factors, objective="memory", rate=rate)
        assert plan.service_rate >= rate * (1 - 1e-6)
        assert plan.total_bytes <= 1.03 * least

    def test_index_nested_loop_memory(self, share, factors):
        profile = skewed(self.ROWS)
        model = IndexNestedLoopModel(profile, factors)
        page_rows = round(8192 / 120)
        budget = self.budget(share)
        rate = 0.9 * tune("index_nested_loop", profile=profile, factors=factors, budget=budget).service_rate
        least = min(
            pages
            for pages in range(1, profile.blocks(page_rows) + 1)
            if model.loop(page_rows, pages).service_rate >= rate
        )
        plan = tune("index_nested_loop", profile=profile, factors=factors, objective="memory", rate=rate)
        assert plan.total_bytes == least * page_rows * 120

    def test_auto_is_the_better_of_scan_and_index(self, share, factors):
        profile, budget = skewed(self.ROWS), self.budget(share)
        plan = tune("auto", profile=profile, factors=factors, budget=budget)
        scan = tune("balanced", profile=profile, factors=factors, budget=budget)
        model = CachedIndexModel(profile, factors)
        best = scan.service_rate
        for block_rows in (1, 10, 100, 500, 1000):
            for cached_rows in range(0, self.ROWS, 50):
                window = (
                    budget - block_rows * 120 - cached_rows * profile.cache_entry_bytes
                ) // profile.window_entry_bytes
                if window >= 1:
                    best = max(best, model.loop(block_rows, cached_rows, window).service_rate)
        assert plan.total_bytes <= budget
        assert plan.service_rate >= 0.97 * best


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_more_memory_is_never_slower(strategy, paper_profile):
    rates = [
        tune(strategy, profile=paper_profile, factors=PAPER_FACTORS, budget=int(share * 420e6)).service_rate
        for share in (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)
    ]
    assert all(later >= 0.999 * earlier for earlier, later in pairwise(rates))
    assert rates[-1] > 10 * rates[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_higher_rate_never_takes_less_memory(strategy, paper_profile):
    most = tune(strategy, profile=paper_profile, factors=PAPER_FACTORS, budget=42_000_000).service_rate
    plans = [
        tune(strategy, profile=paper_profile, factors=PAPER_FACTORS, objective="memory", rate=share * most)
        for share in (0.1, 0.3, 0.6, 0.9)
    ]
    sizes = [plan.total_bytes for plan in plans]
    assert all(later >= 0.999 * earlier for earlier, later in pairwise(sizes))
    for share, plan in zip((0.1, 0.3, 0.6, 0.9), plans, strict=True):
        assert plan.service_rate >= share * most * (1 - 1e-6)


@pytest.mark.parametrize("strategy", ["mesh", "hybrid", "balanced"])
@pytest.mark.parametrize("share", [0.01, 0.05, 0.1])
def test_the_two_objectives_are_each_other_s_inverse(strategy, share, paper_profile):
    budget = int(share * 420e6)
    fastest = tune(strategy, profile=paper_profile, factors=PAPER_FACTORS, budget=budget)
    smallest = tune(
        strategy, profile=paper_profile, factors=PAPER_FACTORS, objective="memory", rate=fastest.service_rate
    )
    assert smallest.total_bytes <= 1.03 * budget
    assert smallest.total_bytes >= 0.9 * budget


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 1.0])
def test_plans_stay_within_the_budget_and_predict_what_their_model_says(strategy, share, paper_profile):
    budget = int(share * 420e6)
    plan = tune(strategy, profile=paper_profile, factors=PAPER_FACTORS, budget=budget)
    assert 0 < plan.total_bytes <= budget
    assert plan.loop_seconds == pytest.approx(sum(plan.loop_terms.values()))
    if strategy == "mesh":
        cost = MeshModel(paper_profile, PAPER_FACTORS).loop(plan.block_rows, plan.chunk_tuples)
        assert plan.service_rate == pytest.approx(cost.service_rate)
        assert plan.window_tuples == plan.chunk_tuples * paper_profile.blocks(plan.block_rows)


def test_balanced_cache_follows_the_cache_inequality(paper_profile):
    """Theorem 2: at the least memory, the last value cached takes as much room as it would in the window."""
    # Costs that do not differ between the phases, so that memory is all that decides.
    factors = CostFactors.of_papers()
    plan = tune("balanced", profile=paper_profile, factors=factors, objective="memory", rate=60_000)
    cycle_s = plan.loop_seconds * paper_profile.blocks(plan.block_rows)
    probability = Zipf(3_500_000, 1.0).probabilities([plan.cache_rows])[0]
    waiting = probability * plan.service_rate * cycle_s
    assert waiting * paper_profile.window_entry_bytes == pytest.approx(paper_profile.cache_entry_bytes, rel=0.06)


def test_balanced_becomes_a_main_memory_join(paper_profile):
    """Theorem 3: with memory for R, or a rate for which a window would take more, all of R is cached."""
    profile = JoinProfile.declared(relation_rows=100_000)
    plan = tune("balanced", profile=profile, factors=PAPER_FACTORS, budget=12_100_000)
    assert plan.cache_rows == 100_000
    assert plan.window_tuples == 0
    assert plan.binds == "cpu"
    fast = tune("balanced", profile=profile, factors=PAPER_FACTORS, objective="memory", rate=3_500_000)
    assert fast.cache_rows == 100_000
    assert fast.total_bytes == 12_000_000


def test_fixed_block_size_is_kept(paper_profile):
    plan = tune("mesh", profile=paper_profile, factors=PAPER_FACTORS, budget="21MB", block_rows=5000)
    assert plan.block_rows == 5000
    small = tune("mesh", profile=paper_profile, factors=PAPER_FACTORS, budget="21MB", max_block_rows=50)
    assert small.block_rows <= 50


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_budget_below_the_minimum_names_it(strategy):
    profile = skewed(100_000)
    minimum = minimum_budget(strategy, profile=profile, factors=PAPER_FACTORS)
    assert tune(strategy, profile=profile, factors=PAPER_FACTORS, budget=minimum).total_bytes <= minimum
    with pytest.raises(BudgetError, match=f"at least {minimum} bytes") as caught:
        tune(strategy, profile=profile, factors=PAPER_FACTORS, budget=minimum // 2)
    assert caught.value.minimum_bytes == minimum


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_impossible_rate_names_the_highest(strategy):
    with pytest.raises(PlanError, match="more shards"):
        tune(strategy, profile=skewed(10_000), factors=PAPER_FACTORS, objective="memory", rate=1e9)


def test_rate_that_the_budget_cannot_serve_is_refused(paper_profile):
    with pytest.raises(BudgetError, match="more than the budget") as caught:
        tune("mesh", profile=paper_profile, factors=PAPER_FACTORS, objective="memory", rate=1e5, budget="1MB")
    assert caught.value.minimum_bytes > 1_000_000


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"strategy": "nested"}, "strategy='nested'"),
        ({"objective": "speed"}, "objective='speed'"),
        ({"budget": None}, "needs a memory budget"),
        ({"rate": 5.0}, "belongs to objective='memory'"),
        ({"objective": "memory"}, "positive rate"),
        ({"objective": "memory", "rate": -1.0}, "positive rate"),
        ({"objective": "memory", "rate": math.nan}, "positive rate"),
        ({"block_rows": 0}, "block_rows=0"),
        ({"max_block_rows": 0}, "max_block_rows=0"),
        ({"budget": "much"}, "much"),
    ],
)
def test_impossible_requests_are_refused(arguments, reason):
    request = {"strategy": "mesh", "profile": skewed(1000), "factors": PAPER_FACTORS, "budget": "1MB"} | arguments
    with pytest.raises((PlanError, BudgetError), match=reason):
        tune(request.pop("strategy"), **request)
