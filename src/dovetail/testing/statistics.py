"""Tests of whether a sample follows a distribution, using only numpy."""

import math

import numpy as np
from numpy.typing import ArrayLike

__all__ = ["chi_square", "chi_square_limit", "follows"]


def chi_square(counts: ArrayLike, expected: ArrayLike) -> float:
    """Pearson's statistic of observed against expected counts."""
    observed, wanted = np.asarray(counts, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    return float(((observed - wanted) ** 2 / wanted).sum())


def chi_square_limit(degrees_of_freedom: int) -> float:
    """The value that a chi-square variable exceeds about once in a thousand (Wilson-Hilferty).

    >>> round(chi_square_limit(10), 1)
    29.8
    """
    ninth = 2.0 / (9.0 * degrees_of_freedom)
    return degrees_of_freedom * (1.0 - ninth + 3.09 * math.sqrt(ninth)) ** 3


def follows(counts: ArrayLike, expected: ArrayLike) -> bool:
    """Whether counts deviate from the expected ones no more than chance does 999 times in a thousand.

    The total is fixed, so there is one degree of freedom less than counts.

    >>> follows([520, 480], [500, 500]), follows([600, 400], [500, 500])
    (True, False)
    """
    return chi_square(counts, expected) < chi_square_limit(np.size(np.asarray(counts)) - 1)
