"""The index nested loops baseline: one lookup per stream tuple, and a buffer pool of pages.

The papers give no equations for it. The hit ratio of the pool (least recently used) follows Che's approximation. Let T
be the time, in requests, that a page stays in the pool. A page that gets the fraction p of the requests is in the pool
with probability 1 - exp(-p T). T is such that these probabilities sum to the pages of the pool.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.costs.costs import CostFactors, LoopCost
from dovetail.costs.profile import JoinProfile
from dovetail.costs.search import first_reaching

__all__ = ["IndexNestedLoopModel", "lru_hit_ratio"]


def lru_hit_ratio(pool_pages: float, shares: NDArray[np.float64], counts: NDArray[np.float64] | None = None) -> float:
    """Fraction of the requests that a least-recently-used pool serves.

    ``shares`` are the fractions of the requests per page; `counts` pages have each fraction (default 1).

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
    stays = first_reaching(lambda requests: float((counts * -np.expm1(-shares * requests)).sum()), pool_pages)
    return float((counts * shares * -np.expm1(-shares * stays)).sum())


@dataclass(frozen=True)
class IndexNestedLoopModel:
    """Cost of one stream tuple: a lookup, a row, and a random page read if the page is not in the pool.

    The papers' relation and disk with a pool of 1 %: little more than a hundred tuples per second.

    >>> model = IndexNestedLoopModel(JoinProfile.declared(relation_rows=3_500_000), CostFactors.of_papers())
    >>> round(model.loop(page_rows=68, pool_pages=514).service_rate)
    124
    """

    profile: JoinProfile
    factors: CostFactors

    def memory(self, page_rows: int, pool_pages: float) -> dict[str, float]:
        """Bytes per component."""
        return {"cache": pool_pages * page_rows * self.profile.relation_row_bytes}

    def pool_hit_ratio(self, page_rows: int, pool_pages: float) -> float:
        """Fraction of the stream whose page is in the pool."""
        return lru_hit_ratio(pool_pages, *self.profile.block_shares(page_rows))

    def loop(self, page_rows: int, pool_pages: float) -> LoopCost:
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
