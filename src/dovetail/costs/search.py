"""Maximum of a function that rises and then falls, up to small steps: what all tuners look for."""

import math
from collections.abc import Callable

from dovetail.errors import PlanError

__all__ = ["maximise", "maximise_integer"]

_GRID_POINTS = 25
_REFINED_POINTS = 9
_STAIRCASE_POINTS = 500


def maximise(function: Callable[[float], float], low: float, high: float, *, precision: float = 1e-7) -> float:
    """Find where a function of one number is largest, to `precision` of the interval.

    An even grid finds the highest hill, and ever finer grids its top, so that a curve with several humps, or
    one that is flat outside a small part of the interval, is no trap unless it is finer than the grid.

    Examples
    --------
    >>> round(maximise(lambda x: -((x - 0.3) ** 2), 0.0, 1.0), 6)
    0.3
    """
    points = [low + (high - low) * i / (_GRID_POINTS - 1) for i in range(_GRID_POINTS)]
    while True:
        values = [function(point) for point in points]
        best = max(range(len(points)), key=values.__getitem__)
        left, right = points[max(best - 1, 0)], points[min(best + 1, len(points) - 1)]
        if right - left <= precision * max(high - low, 1e-300):
            return points[best]
        points = [left + (right - left) * i / (_REFINED_POINTS - 1) for i in range(_REFINED_POINTS)]


def maximise_integer(
    function: Callable[[int], float],
    low: int,
    high: int,
    *,
    is_staircase: bool = False,
    precision: float = 0.0,
) -> int:
    """Find the whole number at which a function is largest, on a logarithmic scale.

    Parameters
    ----------
    function
        What to maximise.
    low, high
        The range, inclusive.
    is_staircase
        Whether the function jumps up and down by a few per cent from one number to the next, because of what
        is rounded inside it. Then more numbers around the top are tried.

    Examples
    --------
    >>> maximise_integer(lambda rows: -abs(rows - 12_345), 1, 10**9)
    12345
    """
    if not 1 <= low <= high:
        raise PlanError(f"There is no whole number to choose from between {low} and {high}.")
    values: dict[int, float] = {}

    def best_of(candidates: list[int]) -> int:
        for candidate in candidates:
            if candidate not in values:
                values[candidate] = function(candidate)
        return max(range(len(candidates)), key=lambda i: values[candidates[i]])

    points = _geometric(low, high, _GRID_POINTS)
    if high - low < _GRID_POINTS:
        points = list(range(low, high + 1))
    while True:
        best = best_of(points)
        left, right = points[max(best - 1, 0)], points[min(best + 1, len(points) - 1)]
        finer = _geometric(left, right, _REFINED_POINTS)
        if len(finer) > right - left or finer == points or right - left <= precision * left:
            best_of(finer)
            break
        points = finer
    top = max(values, key=values.__getitem__)
    if is_staircase:
        best_of(_geometric(max(low, top // 10), min(high, 10 * top), _STAIRCASE_POINTS))
    return max(values, key=values.__getitem__)


def _geometric(low: int, high: int, count: int) -> list[int]:
    ratio = math.log(high / low)
    spread = {min(high, max(low, round(low * math.exp(ratio * i / (count - 1))))) for i in range(count)}
    return sorted(spread | {low, high})
