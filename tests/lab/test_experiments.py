"""Quick experiments, run for real, and what the judges make of numbers that are known."""

from dataclasses import replace
from pathlib import Path

import pytest

from dovetail.costs import CostFactors
from dovetail_lab import Axis, Measured, Panel, Request, Series, find, run_experiments
from dovetail_lab.semi_stream import memory_for_rates
from dovetail_lab.subjects import PAPER_BANDWIDTH, PAPER_SEEK_S, synthetic
from dovetail_lab.verdicts import Outcome, Verdict
from dovetail_lab.waiting import PageUse, matching_time_at


@pytest.mark.parametrize("name", ["hybridjoin-fig10", "hybridjoin-fig11"])
def test_the_benchmark_of_hybridjoin_is_as_its_paper_says(name: str, tmp_path: Path) -> None:
    request = Request(experiments=[find(name)], results=tmp_path / "r", data=tmp_path / "d", is_quick=True, seed=5)
    (result,) = run_experiments(request)
    assert result.verdict.outcome == "confirmed", result.verdict.numbers


def measured(rates: dict[str, tuple[float, ...]], x: tuple[float, ...], **parameters: object) -> Measured:
    axis = Axis("x")
    series = tuple(Series(name, x, values) for name, values in rates.items())
    return Measured((Panel("disk of the papers' day", axis, axis, series),) * 2, parameters)


@pytest.mark.parametrize(
    ("ssbj", "outcome"),
    [
        ((700.0, 1600.0), "confirmed"),
        ((200.0, 500.0), "confirmed with a different factor"),
        ((200.0, 300.0), "not confirmed"),
        ((100.0, 200.0), "not confirmed"),
    ],
)
def test_ssbj_by_memory_is_judged_by_its_gain_and_by_its_growth(ssbj: tuple[float, ...], outcome: str) -> None:
    numbers = measured({"MESHJOIN": (100.0, 200.0), "SSBJ": ssbj}, (1.0, 10.0), most_allowed=[1.8, 3.2])
    assert find("ssbj-fig5a").judge(numbers).outcome == outcome


@pytest.mark.parametrize(
    ("at_zero", "at_half", "outcome"),
    [
        (0.8, 1.5, "confirmed"),
        (1.1, 1.5, "confirmed with a different factor"),
        (0.8, 0.9, "not confirmed"),
    ],
)
def test_hybridjoin_by_skew_must_win_from_a_slight_skew_on(at_zero: float, at_half: float, outcome: str) -> None:
    rates = {"HYBRIDJOIN": (100 * at_zero, 100 * at_half, 180.0), "MESHJOIN": (100.0,) * 3, "INL": (1.0,) * 3}
    assert find("hybridjoin-fig7e").judge(measured(rates, (0.0, 0.5, 1.0))).outcome == outcome


def test_matching_time_counts_tuples_that_wait_longest(tmp_path: Path) -> None:
    """The mean wait in MESHJOIN is half of a cycle, also when many tuples are still waiting at the end."""
    papers = CostFactors.of_papers(probe_s=3e-7, expire_s=4e-7, append_s=5e-7)
    factors = replace(papers, seek_s=PAPER_SEEK_S, bandwidth_bytes_per_s=PAPER_BANDWIDTH)
    subject = synthetic(tmp_path, 20_000, lambda: {"direct": factors, "cached": factors})
    seconds = subject.rows * subject.row_bytes / PAPER_BANDWIDTH
    wait = matching_time_at(
        subject, "mesh", subject.budget(20.0), subject.stream(0.0, "ranked"), tuples_per_s=20_000.0, cycles=1.0
    )
    assert wait >= 0.4 * seconds


@pytest.mark.parametrize(
    ("outcomes", "worst"),
    [
        (("confirmed", "confirmed with a different factor"), "confirmed with a different factor"),
        (("confirmed", "not testable here"), "not testable here"),
        (("not confirmed", "not testable here"), "not confirmed"),
    ],
)
def test_outcome_of_a_claim_with_two_halves_is_the_worse_one(outcomes: tuple[Outcome, Outcome], worst: str) -> None:
    verdict = Verdict.of_halves({"a": outcomes[0], "b": outcomes[1]}, numbers="")
    assert verdict.outcome == worst
    assert verdict.text == f"a: {outcomes[0]}; b: {outcomes[1]}"


@pytest.mark.parametrize(
    ("predicted", "outcome"),
    [(105.0, "confirmed"), (120.0, "confirmed with a different factor"), (140.0, "not confirmed")],
)
def test_a_cost_model_is_judged_by_its_worst_prediction(predicted: float, outcome: str) -> None:
    numbers = measured({"measured": (100.0, 100.0), "predicted": (100.0, predicted)}, (1.0, 2.0))
    assert find("hybridjoin-fig8b").judge(numbers).outcome == outcome


def test_memory_for_a_rate_is_found_between_measured_points_and_never_beyond_them() -> None:
    assert memory_for_rates([1e6, 4e6], [100.0, 1600.0], [400.0]) == [pytest.approx(2e6)]
    assert memory_for_rates([1e6, 4e6], [100.0, 1600.0], [9e9]) == [pytest.approx(4e6)]


def test_reads_are_counted_where_they_were_even_across_the_border_of_two_groups() -> None:
    disk = PageUse(60e6, 0.008)
    for offset, length in ((0, 100), (50, 100), (150, 50)):
        disk.access("rows", offset, length)
    disk.access("index", 0, 10)
    assert disk.bytes_per_group(2).tolist() == [150.0, 100.0]
