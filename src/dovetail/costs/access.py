"""Reading R by index: what it costs to serve all that waits, and a cache in front of that."""

import math
from dataclasses import dataclass

from dovetail.model.costs import CostFactors, LoopCost
from dovetail.model.profile import JoinProfile

__all__ = ["CachedIndexModel", "expected_blocks", "index_cost"]


def expected_blocks(waiting_tuples: float, blocks: int) -> float:
    """Expected number of different blocks that so many tuples ask for, all blocks being equally likely.

    Examples
    --------
    >>> round(expected_blocks(1, 100), 1), round(expected_blocks(100, 100), 1)
    (1.0, 63.4)
    """
    if blocks <= 1:
        return min(1.0, waiting_tuples)
    return -blocks * math.expm1(waiting_tuples * math.log1p(-1.0 / blocks))


def index_cost(
    *,
    waiting_tuples: float,
    profile: JoinProfile,
    factors: CostFactors,
    block_rows: int,
    blocks_asked: float | None = None,
) -> LoopCost:
    """Cost of serving everything that waits by visiting, in ascending order, the blocks that it asks for.

    A block next to the last one read needs no seek, so that the cost goes over into a scan's as more tuples
    wait.

    Parameters
    ----------
    blocks_asked
        Different blocks that hold a match, where known; otherwise what `expected_blocks` says.

    Examples
    --------
    A thousand tuples ask for nearly as many of the 35 000 blocks, at 8 ms each.

    >>> profile, factors = JoinProfile.declared(relation_rows=3_500_000), CostFactors.of_papers()
    >>> round(index_cost(waiting_tuples=1000, profile=profile, factors=factors, block_rows=100).seconds, 1)
    7.9
    """
    blocks = profile.blocks(block_rows)
    visited = expected_blocks(waiting_tuples, blocks) if blocks_asked is None else blocks_asked
    seeks = visited * (1.0 - visited / blocks)
    block_bytes = profile.relation_rows / blocks * profile.relation_row_bytes
    matches = waiting_tuples * profile.matches_per_tuple
    return LoopCost(
        terms={
            "read": visited * factors.read_seconds(block_bytes, sequential=True) + seeks * factors.seek_s,
            "index": waiting_tuples * factors.lookup_s,
            "gather": matches * factors.gather_s,
            "expire": waiting_tuples * factors.expire_s.at(waiting_tuples),
            "output": matches * factors.output_s,
            "step": factors.step_s,
        },
        stream_tuples=waiting_tuples,
    )


@dataclass(frozen=True)
class CachedIndexModel:
    """A cache as in SSBJ, and behind it a window that is filled, then served by the index.

    Blocks are taken as equally likely: what made some of them hot is in the cache.

    Examples
    --------
    >>> profile = JoinProfile.declared(relation_rows=100_000, hit_curve=lambda rows: min(1.0, rows / 1e5) ** 0.5)
    >>> model = CachedIndexModel(profile, CostFactors.of_papers())
    >>> cost = model.loop(block_rows=1000, cached_rows=25_000, window_tuples=200)
    >>> cost.stream_tuples, round(cost.seconds, 2)
    (400.0, 0.27)
    """

    profile: JoinProfile
    factors: CostFactors

    def memory(self, block_rows: int, cached_rows: float, window_tuples: float) -> dict[str, float]:
        """Bytes by component."""
        return {
            "block_buffer": block_rows * self.profile.relation_row_bytes,
            "cache": cached_rows * self.profile.cache_entry_bytes,
            "window": window_tuples * self.profile.window_entry_bytes,
        }

    def loop(self, block_rows: int, cached_rows: float, window_tuples: float) -> LoopCost:
        """Cost of filling the window once and serving it."""
        profile, factors = self.profile, self.factors
        hit_ratio = min(profile.hit_ratio(cached_rows), 1.0 - 1e-12)
        stream_tuples = window_tuples / (1.0 - hit_ratio)
        served = index_cost(waiting_tuples=window_tuples, profile=profile, factors=factors, block_rows=block_rows)
        hits = stream_tuples - window_tuples
        terms = dict(served.terms)
        terms["output"] += hits * profile.matches_per_tuple * factors.output_s
        terms["cache_probe"] = stream_tuples * factors.cache_probe_s.at(cached_rows)
        terms["stream"] = stream_tuples * factors.stream_read_s
        terms["append"] = window_tuples * factors.append_s.at(window_tuples)
        return LoopCost(terms=terms, stream_tuples=stream_tuples)
