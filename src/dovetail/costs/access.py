"""Reading R by index: the cost of serving all waiting tuples, and of a cache in front of it."""

import math
from dataclasses import dataclass

from dovetail.costs.costs import CostFactors, LoopCost
from dovetail.costs.profile import JoinProfile

__all__ = ["CachedIndexModel", "expected_blocks", "index_cost"]


def expected_blocks(waiting_tuples: float, blocks: int) -> float:
    """Expected number of distinct blocks that contain the matches of the tuples, if all blocks are equally likely."""
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
    """Cost of serving all waiting tuples by visiting the blocks with matches in ascending order.

    A block next to the previous one needs no seek, so the cost approaches that of a scan as more tuples wait.
    ``blocks_asked`` is the number of distinct blocks with a match; by default that of `expected_blocks`.
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
    """A cache as in SSBJ, and a window for the rest, which is filled and then served by the index.

    Blocks are assumed to be equally likely: the rows that make some of them hot are in the cache.

    >>> profile = JoinProfile.declared(relation_rows=100_000, hit_curve=lambda rows: min(1.0, rows / 1e5) ** 0.5)
    >>> model = CachedIndexModel(profile, CostFactors.of_papers())
    >>> cost = model.loop(block_rows=1000, cached_rows=25_000, window_tuples=200)
    >>> cost.stream_tuples, round(cost.seconds, 2)
    (400.0, 0.27)
    """

    profile: JoinProfile
    factors: CostFactors

    def memory(self, block_rows: int, cached_rows: float, window_tuples: float) -> dict[str, float]:
        """Bytes per component."""
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
