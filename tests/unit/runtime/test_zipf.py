"""Zipf codes against the distribution they claim to follow."""

import math

import numba
import numpy as np
import pytest

from dovetail.core.errors import PlanError
from dovetail.runtime.generator.zipf import HEAD_RANKS
from dovetail.testing.statistics import follows
from dovetail_lab.workloads import Zipf

SEED = 20_240_607
# Without the compiler a draw takes microseconds.
DRAWS = 20_000 if numba.config.DISABLE_JIT else 1_000_000
EXPONENTS = [0.0, 0.25, 0.5, 0.99, 1.0, 1.0 + 1e-9, 1.5, 2.0]


def exact_cumulative(n: int, exponent: float) -> np.ndarray:
    """Cumulative probabilities summed term by term in extended precision."""
    weights = np.arange(1, n + 1, dtype=np.longdouble) ** np.longdouble(-exponent)
    sums = np.cumsum(weights)
    return sums / sums[-1]


@pytest.mark.parametrize("order", ["ranked", "shuffled"])
@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("n", [7, 1000, 300_000])
def test_drawn_codes_pass_chi_square_test(n, exponent, order):
    print(f"seed {SEED}")
    distribution = Zipf(n, exponent, order=order, seed=SEED)
    codes = distribution.sample(DRAWS)
    assert codes.min() >= 1
    assert codes.max() <= n
    # Codes in the order of their ranks, grouped into bins of about equal probability.
    cumulative = exact_cumulative(n, exponent)
    rank_of_code = np.empty(n + 1, dtype=np.int64)
    rank_of_code[distribution.codes_of(np.arange(1, n + 1))] = np.arange(1, n + 1)
    edges = np.unique(np.append(np.searchsorted(cumulative, np.linspace(0.01, 0.99, 99)), n - 1))
    counts = np.bincount(np.searchsorted(edges, rank_of_code[codes] - 1), minlength=edges.size)
    expected = np.diff(cumulative[edges], prepend=0.0).astype(np.float64) * DRAWS
    assert follows(counts, expected)


def test_chi_square_test_refuses_a_slightly_different_exponent():
    """Guards the test above: its statistic must be able to tell 1.0 from 0.9."""
    cumulative = exact_cumulative(1000, 0.9)
    edges = np.unique(np.append(np.searchsorted(cumulative, np.linspace(0.01, 0.99, 99)), 999))
    codes = Zipf(1000, 1.0, seed=SEED).sample(DRAWS)
    counts = np.bincount(np.searchsorted(edges, codes - 1), minlength=edges.size)
    expected = np.diff(cumulative[edges], prepend=0.0).astype(np.float64) * DRAWS
    assert not follows(counts, expected)


@pytest.mark.parametrize("exponent", EXPONENTS)
@pytest.mark.parametrize("n", [1, 2, HEAD_RANKS - 1, HEAD_RANKS, HEAD_RANKS + 1, 400_000])
def test_inversion_equals_search_in_exact_cumulative_sums(n, exponent):
    cumulative = exact_cumulative(n, exponent)
    uniforms = np.random.Generator(np.random.PCG64(SEED)).random(2000)
    expected = np.searchsorted(cumulative, uniforms, side="right") + 1
    np.testing.assert_array_equal(Zipf(n, exponent).ranks_at(uniforms), expected)


@pytest.mark.parametrize("exponent", [0.0, 0.7, 1.0, 1.3])
def test_inversion_is_right_on_both_sides_of_every_boundary(exponent):
    """A hair below and above the cumulative sums in the tail, where a formula replaces the table."""
    n = 4 * HEAD_RANKS
    distribution = Zipf(n, exponent)
    ranks = np.array([HEAD_RANKS, HEAD_RANKS + 1, HEAD_RANKS + 2, 2 * HEAD_RANKS, 3 * HEAD_RANKS + 17, n - 1])
    boundaries = exact_cumulative(n, exponent)[ranks - 1].astype(np.float64)
    hair = distribution.probabilities(ranks) * 1e-5
    np.testing.assert_array_equal(distribution.ranks_at(boundaries - hair), ranks)
    np.testing.assert_array_equal(distribution.ranks_at(boundaries + hair), ranks + 1)


def test_inversion_never_decreases():
    uniforms = np.linspace(0.0, 1.0, 20_001)[:-1]
    assert (np.diff(Zipf(10**9, 1.0).ranks_at(uniforms)) >= 0).all()


def test_extreme_numbers_stay_in_the_domain():
    for exponent in EXPONENTS:
        ranks = Zipf(10**9, exponent).ranks_at([0.0, np.nextafter(1.0, 0.0)])
        assert ranks[0] == 1
        assert 1 < ranks[1] <= 10**9


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_hit_ratio_is_the_cumulative_probability(exponent):
    n = 3 * HEAD_RANKS
    cumulative = exact_cumulative(n, exponent)
    distribution = Zipf(n, exponent)
    for top_k in (1, 10, HEAD_RANKS, HEAD_RANKS + 1, 2 * HEAD_RANKS, n - 1):
        assert distribution.hit_ratio(top_k) == pytest.approx(float(cumulative[top_k - 1]), rel=1e-12)
    assert distribution.hit_ratio(-1) == 0.0
    assert distribution.hit_ratio(n + 1) == 1.0
    assert distribution.hit_ratio(0.5) == pytest.approx(0.5 * float(cumulative[0]), rel=1e-12)


def test_hit_curve_counts_all_rows_of_a_code():
    distribution = Zipf(1000, 1.0)
    assert distribution.hit_curve(rows_per_code=4)(40) == distribution.hit_ratio(10)


@pytest.mark.parametrize("n", [1, 2, 3, 10, 64, 1000, 4097])
def test_shuffle_is_a_permutation(n):
    codes = Zipf(n, 1.0, order="shuffled", seed=SEED).codes_of(np.arange(1, n + 1))
    assert sorted(codes.tolist()) == list(range(1, n + 1))


def test_shuffled_hot_codes_are_not_neighbours():
    print(f"seed {SEED}")
    n, hot = 200_000, 1000
    codes = np.sort(Zipf(n, 1.0, order="shuffled", seed=SEED).codes_of(np.arange(1, hot + 1)))
    # A random set of this size has hot * hot / n = 5 adjacent pairs on average.
    assert (np.diff(codes) == 1).sum() <= 15
    counts = np.bincount((codes - 1) // (n // 20), minlength=20)
    assert follows(counts, np.full(20, hot / 20))


def test_seed_decides_permutation_and_draws():
    first, again, other = (Zipf(10_000, 0.5, order="shuffled", seed=seed) for seed in (1, 1, 2))
    drawn = first.sample(1000)
    np.testing.assert_array_equal(drawn, again.sample(1000))
    assert (drawn != other.sample(1000)).any()
    assert (first.codes_of(np.arange(1, 100)) != other.codes_of(np.arange(1, 100))).any()
    assert (first.sample(1000) != drawn).any(), "the stream moves on"


def test_storage_cumulative_adds_up_by_code():
    distribution = Zipf(1000, 1.0, order="shuffled", seed=SEED)
    cumulative = distribution.storage_cumulative()
    assert cumulative[-1] == pytest.approx(1.0)
    hottest = distribution.codes_of([1])[0]
    step = cumulative[hottest - 1] - (cumulative[hottest - 2] if hottest > 1 else 0.0)
    assert step == pytest.approx(distribution.hit_ratio(1))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"n": 0, "exponent": 1.0}, "n=0"),
        ({"n": 10, "exponent": -0.1}, "exponent=-0.1"),
        ({"n": 10, "exponent": 2.1}, "exponent=2.1"),
        ({"n": 10, "exponent": math.nan}, "exponent=nan"),
        ({"n": 10, "exponent": 1.0, "order": "sorted"}, "order='sorted'"),
    ],
)
def test_impossible_arguments_are_refused(arguments, reason):
    with pytest.raises(PlanError, match=reason):
        Zipf(**arguments)
