"""The bursty stream against a priority queue, its steady state, its Hurst exponent and its keys."""

import heapq

import numpy as np
import pyarrow as pa
import pytest

from dovetail.core.errors import PlanError
from dovetail.runtime.generator.mixing import stream_key, uniforms_at
from dovetail.testing.flows import Feed
from dovetail.testing.statistics import follows
from dovetail_lab.workloads import BurstyArrivals, BurstyStream, hurst_exponent, write_bursty_files

SEED = 2011


def queued_counts(arrivals: BurstyArrivals, steps: int) -> list[int]:
    """The paper's figure 9, object by object out of a priority queue."""
    start = arrivals.start()
    queue, is_on, drawn = [], {}, {}
    for number in range(arrivals.objects):
        is_on[number] = start.swaps[number] == 1
        drawn[number] = start.swaps[number]
        heapq.heappush(queue, (start.next_swaps[number], number))
    counts = []
    for step in range(steps):
        while queue[0][0] <= step:
            due, number = heapq.heappop(queue)
            is_on[number] = not is_on[number]
            drawn[number] += 1
            share = uniforms_at(stream_key(SEED, 0xB0B, number), drawn[number] + 1, 1)[0]
            heapq.heappush(queue, (due + share * 2 ** (number + 1), number))
        counts.append(sum(2 ** (number + 1) for number in is_on if is_on[number]))
    return counts


def fractional_noise(hurst: float, size: int) -> np.ndarray:
    """Gaussian noise of a known Hurst exponent, exactly, by circulant embedding."""
    lags = np.arange(size)
    covariance = 0.5 * (
        np.abs(lags + 1.0) ** (2 * hurst) - 2 * lags ** (2.0 * hurst) + np.abs(lags - 1.0) ** (2 * hurst)
    )
    spectrum = np.fft.fft(np.concatenate([covariance, covariance[-2:0:-1]])).real.clip(min=0)
    random = np.random.default_rng(SEED)
    white = random.normal(size=spectrum.size) + 1j * random.normal(size=spectrum.size)
    return np.fft.fft(np.sqrt(spectrum / spectrum.size) * white).real[:size]


@pytest.mark.parametrize("objects", [1, 4, 10])
def test_counts_are_those_of_a_priority_queue(objects: int) -> None:
    arrivals = BurstyArrivals(objects=objects, seed=SEED)
    assert arrivals.counts(3000).tolist() == queued_counts(arrivals, 3000)


def test_any_part_of_the_stream_can_be_made_again() -> None:
    stream = BurstyStream(keys=500, tuples_per_step=3.3, seed=SEED)
    whole, _ = stream.batch(stream.arrivals.start(), 2500)
    parts = pa.concat_batches(list(stream.batches(2500, 640)))
    assert parts.equals(whole)
    state = stream.arrivals.seek(1234)
    again, _ = stream.batch(state, 100)
    first = stream.arrivals.tuples_before(state)
    assert again.equals(whole.slice(first, again.num_rows))
    assert stream.arrivals.seek(2000, known=state) == stream.arrivals.seek(2000)


def test_every_combination_of_objects_is_as_likely_at_the_start() -> None:
    print("seeds 0 to 799")
    counts = np.array([BurstyArrivals(seed=seed).counts(700)[[0, -1]] // 2 for seed in range(800)])
    assert follows(np.bincount(counts[:, 0] // 64, minlength=16), np.full(16, 50.0))
    # And still so later on: the start is the steady state.
    assert follows(np.bincount(counts[:, 1] // 64, minlength=16), np.full(16, 50.0))


@pytest.mark.parametrize("hurst", [0.5, 0.7, 0.9])
def test_estimator_finds_a_known_hurst_exponent(hurst: float) -> None:
    assert hurst_exponent(fractional_noise(hurst, 1 << 17)) == pytest.approx(hurst, abs=0.06)


def test_stream_is_self_similar_over_the_scales_of_its_objects_and_no_further() -> None:
    print(f"seed {SEED}")
    counts = BurstyArrivals(seed=SEED).counts(1 << 20)
    assert hurst_exponent(counts, 1, 256) > 0.9
    assert hurst_exponent(counts, 1 << 12, 1 << 15) < 0.65
    # The same counts in random order are not: it is their order that makes the bursts.
    assert hurst_exponent(np.random.default_rng(SEED).permutation(counts), 1, 256) == pytest.approx(0.5, abs=0.05)
    # Four more objects reach sixteen times as far.
    further = BurstyArrivals(objects=14, seed=SEED).counts(1 << 20)
    assert hurst_exponent(further, 1, 1 << 12) > 0.9


@pytest.mark.parametrize("tuples_per_step", [0.2, 7.5, 1023.0])
def test_mean_is_as_asked_for(tuples_per_step: float) -> None:
    counts = BurstyArrivals(tuples_per_step, seed=SEED).counts(1 << 20)
    assert counts.min() >= 0
    assert counts.mean() == pytest.approx(tuples_per_step, rel=0.05)


def test_keys_follow_zipf() -> None:
    stream = BurstyStream(keys=40, order="ranked", tuples_per_step=100.0, seed=SEED)
    batch, _ = stream.batch(stream.arrivals.start(), 3000)
    counts = np.bincount(batch["k"].to_numpy(), minlength=41)[1:]
    assert follows(counts, batch.num_rows * stream.keys.probabilities(np.arange(1, 41)))


def test_times_are_those_of_the_steps() -> None:
    stream = BurstyStream(keys=10, tuples_per_step=4.0, step_us=250, start_us=1_000_000, seed=SEED)
    counts = stream.arrivals.counts(50)
    batch, _ = stream.batch(stream.arrivals.start(), 50)
    steps = (batch["ts"].cast(pa.int64()).to_numpy() - 1_000_000) // 250
    assert np.bincount(steps, minlength=50).tolist() == counts.tolist()


def test_files_hold_the_stream(tmp_path) -> None:
    stream = BurstyStream(keys=30, tuples_per_step=2.0, seed=SEED)
    files = write_bursty_files(stream, tmp_path, 100, 40)
    assert len(files) == 3
    whole, _ = stream.batch(stream.arrivals.start(), 100)
    assert Feed(tmp_path).rows() == whole.to_pylist()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: BurstyArrivals(objects=0), "objects=0"),
        (lambda: BurstyArrivals(0.0), "tuples_per_step=0.0"),
        (lambda: BurstyStream(step_us=0), "step_us=0"),
        (lambda: BurstyArrivals().advance(BurstyArrivals().start(), -1), "steps=-1"),
        (lambda: hurst_exponent(np.ones(100, dtype=np.int64)), "too few"),
    ],
)
def test_impossible_arguments_are_refused(call, reason) -> None:
    with pytest.raises(PlanError, match=reason):
        call()
