"""The index nested loops baseline: one lookup per stream tuple, and a buffer pool of pages.

The papers give no equations for it. The pool is least recently used, whose hit ratio Che's approximation
gives: with T the time, in requests, that a page stays in the pool, a page on which the share p of the
requests falls is there with probability 1 - exp(-p T), and T is such that these probabilities sum to the
pool's pages.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.model.costs import CostFactors, LoopCost
from dovetail.model.profile import JoinProfile

__all__ = ["IndexNestedLoopModel", "lru_hit_ratio"]


def lru_hit_ratio(pool_pages: float, shares: NDArray[np.float64], counts: NDArray[np.float64] | None = None) -> float:
    """Share of the requests that a least-recently-used pool serves.

    Parameters
    ----------
    pool_pages
        Pages that the pool holds.
    shares, counts
        The share of the requests that falls on each page; `counts` pages have each share (1 if left out).

    Examples
    --------
    >>> round(lru_hit_ratio(25, np.array([0.01]), np.array([100.0])), 3)
    0.25
    >>> lru_hit_ratio(0, np.array([1.0])), lru_hit_ratio(3, np.array([0.5, 0.5]))
    (0.0, 1.0)
    """
    counts = np.ones(shares.size) if counts is None else counts
    if pool_pages <= 0:
        return 0.0
    if pool_pages >= counts.sum():
        return 1.0
    low, high = 0.0, 1.0
    while float((counts * -np.expm1(-shares * high)).sum()) < pool_pages:
        low, high = high, 2.0 * high
    while high - low > 1e-9 * high:
        middle = 0.5 * (low + high)
        if float((counts * -np.expm1(-shares * middle)).sum()) < pool_pages:
            low = middle
        else:
            high = middle
    return float((counts * shares * -np.expm1(-shares * high)).sum())


@dataclass(frozen=True)
class IndexNestedLoopModel:
    """Cost of one stream tuple: a lookup, a row, and a random page read unless the pool has the page.

    Examples
    --------
    The papers' relation and disk with a pool of 1 %: little more than a hundred tuples per second.

    >>> model = IndexNestedLoopModel(JoinProfile.declared(relation_rows=3_500_000), CostFactors.of_papers())
    >>> round(model.loop(page_rows=68, pool_pages=514).service_rate)
    124
    """

    profile: JoinProfile
    factors: CostFactors

    def memory(self, page_rows: int, pool_pages: float) -> dict[str, float]:
        """Bytes by component."""
        return {"cache": pool_pages * page_rows * self.profile.relation_row_bytes}

    def pool_hit_ratio(self, page_rows: int, pool_pages: float) -> float:
        """Share of the stream whose page is in the pool."""
        return lru_hit_ratio(pool_pages, *self.profile.block_shares(page_rows))

    def loop(self, page_rows: int, pool_pages: float) -> LoopCost:
        """Cost of one stream tuple."""
        profile, factors = self.profile, self.factors
        misses = 1.0 - self.pool_hit_ratio(page_rows, pool_pages)
        page_bytes = page_rows * profile.relation_row_bytes
        return LoopCost(
            terms={
                "read": misses * factors.read_seconds(page_bytes, sequential=False),
                "lookup": factors.lookup_s,
                "gather": profile.matches_per_tuple * factors.gather_s,
                "stream": factors.stream_read_s,
                "output": profile.matches_per_tuple * factors.output_s,
            },
            stream_tuples=1.0,
        )
