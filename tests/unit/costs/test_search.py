"""The searches that tuners rest on."""

import math

import pytest

from dovetail.core.errors import PlanError
from dovetail.costs.search import maximise, maximise_integer


@pytest.mark.parametrize("top", [0.0, 1e-6, 0.123, 0.5, 0.999999, 1.0])
def test_maximum_of_a_hill(top):
    assert maximise(lambda x: -abs(x - top), 0.0, 1.0) == pytest.approx(top, abs=1e-6)


def test_maximum_of_the_higher_of_two_hills():
    def hills(x):
        return math.exp(-((x - 0.2) ** 2) / 0.01) + 1.1 * math.exp(-((x - 0.8) ** 2) / 0.01)

    assert maximise(hills, 0.0, 1.0) == pytest.approx(0.8, abs=1e-4)


def test_empty_interval():
    assert maximise(lambda x: x, 3.0, 3.0) == 3.0


@pytest.mark.parametrize("top", [1, 2, 3, 17, 1000, 999_999, 3_500_000])
def test_maximum_over_whole_numbers(top):
    assert maximise_integer(lambda n: -abs(math.log(n / top)), 1, 3_500_000) == top


@pytest.mark.parametrize("high", [1, 2, 3, 5, 25])
def test_small_ranges_are_searched_completely(high):
    for top in range(1, high + 1):
        assert maximise_integer(lambda n, top=top: float(n == top), 1, high) == top


def test_staircase_is_searched_around_its_top():
    """Every third number is worth 10 % more than its neighbours."""

    def stairs(n):
        return -abs(math.log(n / 100)) + (0.1 if n % 3 == 0 else 0.0)

    assert maximise_integer(stairs, 1, 10**6, is_staircase=True) == 99


@pytest.mark.parametrize(("low", "high"), [(0, 5), (6, 5), (-1, -1)])
def test_empty_ranges_are_refused(low, high):
    with pytest.raises(PlanError, match="no whole number"):
        maximise_integer(float, low, high)
