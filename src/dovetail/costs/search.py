"""Maximum of a function that rises and then falls, apart from small steps: used by all tuners."""

import math
from collections.abc import Callable

from dovetail.core.errors import PlanError

__all__ = ["first_reaching", "maximise", "maximise_integer"]

_GRID_POINTS = 25
_REFINED_POINTS = 9
_STAIRCASE_POINTS = 500


def maximise(function: Callable[[float], float], low: float, high: float, *, precision: float = 1e-7) -> float:
    """Find where a function of one number is largest, to `precision` of the interval.

    A coarse grid finds the highest peak, and ever finer grids its top. Several peaks, or a function that is flat except
    in a small part of the interval, are handled unless they are finer than the grid.
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
    """Find the integer at which a function is largest, searching on a logarithmic scale; the range is inclusive.

    ``is_staircase``: the function jumps by a few per cent between neighbouring numbers, because of rounding inside it,
    so more numbers around the top are tried.
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


def first_reaching(function: Callable[[float], float], target: float) -> float:
    """The point at which an increasing function reaches the target; infinity if it is out of range."""
    low, high = 0.0, 1.0
    while function(high) < target:
        low, high = high, 2.0 * high
        if high > 1e18:
            return math.inf
    while high - low > 1e-9 * high:
        middle = 0.5 * (low + high)
        if function(middle) < target:
            low = middle
        else:
            high = middle
    return high


def _geometric(low: int, high: int, count: int) -> list[int]:
    ratio = math.log(high / low)
    spread = {min(high, max(low, round(low * math.exp(ratio * i / (count - 1))))) for i in range(count)}
    return sorted(spread | {low, high})
