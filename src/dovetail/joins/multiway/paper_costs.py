"""Costs of a multi-way join's operations, and the paper's own formulas, which plans print for comparison.

The numerator of the output rate is corrected: results due to second t are the results of t seconds minus those of t -
1. S(k, l) and D(k, l) would split too often, because D multiplies unfiltered products.

Viglas, Naughton, Burger 2003, section 2.3 and appendix A.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MultiwayCosts", "discard_cost", "paper_output_rate", "split_cost"]


@dataclass(frozen=True)
class MultiwayCosts:
    """Seconds to hash, move and compare one tuple. The defaults are the paper's table 3."""

    hash_s: float = 1.75e-7
    move_s: float = 4.27e-7
    compare_s: float = 4.91e-8

    @property
    def insert_s(self) -> float:
        """Seconds to insert one tuple into a hash table."""
        return self.hash_s + self.move_s


def paper_output_rate(
    rates: Sequence[float], selectivities: Sequence[float], second: float, costs: MultiwayCosts
) -> float:
    """Equation 2: results due to one second over the cost of its arrivals, with the numerator corrected."""
    count = len(rates)
    due = math.prod(selectivities) * math.prod(rates) * (second**count - max(0.0, second - 1) ** count)
    probes = 1.0 + math.prod(selectivities[:-1]) if len(selectivities) > 1 else 1.0
    cost = sum(rates) * (costs.insert_s + costs.compare_s * probes)
    return due / cost


def split_cost(
    left: Sequence[float],
    left_selectivities: Sequence[float],
    right: Sequence[float],
    right_selectivities: Sequence[float],
    costs: MultiwayCosts,
) -> float:
    """Equation 3, S(k, l): the cost of storing and probing the intermediate results of both sides."""
    stored = math.prod(left_selectivities) * math.prod(left) + math.prod(right_selectivities) * math.prod(right)
    return stored * (costs.insert_s + costs.compare_s)


def discard_cost(
    left: Sequence[float],
    left_selectivities: Sequence[float],
    right: Sequence[float],
    right_selectivities: Sequence[float],
    costs: MultiwayCosts,
) -> float:
    """Equation 4, D(k, l): the cost of discarding and recomputing. It multiplies unfiltered products."""
    discarded = sum(1 - s for s in right_selectivities) * math.prod(right)
    discarded += sum(1 - s for s in left_selectivities) * math.prod(left)
    return discarded * costs.compare_s
