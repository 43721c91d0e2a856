"""Poisson arrivals: delays, rates that change, and the order of several streams."""

import numpy as np
import pytest

from dovetail.core.errors import PlanError
from dovetail.testing.statistics import follows
from dovetail_lab.workloads import ArrivalPhase, arrival_order, arrival_slices, poisson_times

SEED = 2003


@pytest.mark.parametrize("mean_delay_ms", [0.5, 20.0])
def test_delays_are_exponential(mean_delay_ms: float) -> None:
    print(f"seed {SEED}")
    times = poisson_times(50_000, mean_delay_ms, seed=SEED)
    delays = np.diff(times, prepend=0.0)
    # Twenty bins of equal probability.
    edges = -mean_delay_ms * np.log1p(-np.linspace(0.0, 1.0, 21)[1:-1])
    assert follows(np.bincount(np.searchsorted(edges, delays), minlength=20), np.full(20, 2500.0))


def test_arrivals_in_a_second_follow_poisson() -> None:
    times = poisson_times(40_000, 250.0, seed=SEED)
    per_second = np.bincount((times / 1000).astype(np.int64))[:-1]
    counts = np.bincount(np.minimum(per_second, 9), minlength=10)
    probabilities = [np.exp(-4.0)]
    for k in range(1, 9):
        probabilities.append(probabilities[-1] * 4.0 / k)
    probabilities.append(1.0 - sum(probabilities))
    assert follows(counts, per_second.size * np.array(probabilities))


def test_phases_have_their_own_rates() -> None:
    phases = [ArrivalPhase(0.3, 1.0), ArrivalPhase(0.2, 8.0), ArrivalPhase(0.5, 2.0)]
    delays = np.diff(poisson_times(30_000, phases, seed=SEED), prepend=0.0)
    for first, last, mean in ((0, 9000, 1.0), (9000, 15_000, 8.0), (15_000, 30_000, 2.0)):
        assert delays[first:last].mean() == pytest.approx(mean, rel=0.05)


def test_order_is_that_of_the_moments() -> None:
    times = {name: poisson_times(500, delay, seed=n) for n, (name, delay) in enumerate((("a", 3.0), ("b", 1.0)))}
    inputs, positions = arrival_order(times)
    moments = [list(times.values())[i][p] for i, p in zip(inputs, positions, strict=True)]
    assert moments == sorted(moments)
    for number in (0, 1):
        assert positions[inputs == number].tolist() == list(range(500))


def test_slices_hold_every_tuple_once_and_none_too_early() -> None:
    times = {"a": poisson_times(300, 3.0, seed=1), "b": poisson_times(700, 1.0, seed=2), "c": np.zeros(0)}
    sent = dict.fromkeys(times, 0)
    for moment, name, first, last in arrival_slices(times, slice_ms=25.0):
        assert first == sent[name]
        assert moment - 25.0 <= times[name][first] <= times[name][last - 1] < moment
        sent[name] = last
    assert sent == {"a": 300, "b": 700, "c": 0}


@pytest.mark.parametrize(
    "call",
    [
        lambda: poisson_times(-1, 1.0),
        lambda: poisson_times(10, -1.0),
        lambda: poisson_times(10, []),
        lambda: poisson_times(10, [ArrivalPhase(0.5, 1.0)]),
        lambda: list(arrival_slices({}, 0.0)),
    ],
)
def test_impossible_arguments_are_refused(call) -> None:
    with pytest.raises(PlanError):
        call()
