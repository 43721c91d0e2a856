"""SSBJ's cost model (Naeem, Weber, Lutteroth, 2018, sections 3 and 3.2), and the best split of memory.

The functions are the paper's equations. `BalancedModel` applies them in a steady state, with two corrections for a
running operator: a stream tuple that misses the cache has been looked up there too (the paper charges only the w_N
hits), and no rows are being switched into the cache (the paper charges c_B for every row of every block). Equation (6)
is left out: it has memory in bytes where equation (5) has stream tuples.
"""

import math
from dataclasses import dataclass

from dovetail.costs.costs import CostFactors, LoopCost
from dovetail.costs.mesh import solve_chunk
from dovetail.costs.profile import HitCurve, JoinProfile
from dovetail.costs.search import maximise

__all__ = [
    "BalancedModel",
    "is_better_cached",
    "loop_cost",
    "memory_components",
    "optimal_cache_share",
]


def is_better_cached(
    *, relation_rows: float, row_bytes: float, stream_tuples_per_cycle: float, tuple_bytes: float
) -> bool:
    """Theorem 2, the cache inequality: m v_R < n v_S."""
    return relation_rows * row_bytes < stream_tuples_per_cycle * tuple_bytes


def memory_components(
    *,
    disk_tuples: float,
    block_rows: float,
    cached_rows: float,
    relation_rows: float,
    relation_row_bytes: float,
    stream_tuple_bytes: float,
    pointer_bytes: float,
    fudge: float = 1.0,
) -> dict[str, float]:
    """Equation (1): M = (b + h_R f) v_R + w_S (R_t / b) (v_P + f v_S), by component.

    ``disk_tuples`` is w_S: stream tuples per iteration that go to the disk phase.
    """
    window_tuples = disk_tuples * relation_rows / block_rows
    return {
        "block_buffer": block_rows * relation_row_bytes,
        "cache": cached_rows * fudge * relation_row_bytes,
        "window": window_tuples * (pointer_bytes + fudge * stream_tuple_bytes),
    }


def loop_cost(
    *,
    cache_tuples: float,
    disk_tuples: float,
    block_rows: float,
    relation_row_bytes: float,
    window_tuples: float,
    cached_rows: float,
    factors: CostFactors,
    matches_per_tuple: float = 1.0,
    switched_share: float = 1.0,
    charges_misses: bool = False,
) -> LoopCost:
    """Equation (2): c_loop = c_I/O(b) + b (c_H + c_B) + w_N (c_S + c_H + c_O) + w_S (c_E + c_S + c_A + c_O).

    ``cache_tuples`` and ``disk_tuples`` are w_N and w_S: stream tuples served by the cache and by the disk phase.
    ``switched_share`` is the fraction of the block's rows switched into the cache; all of them in the paper. With
    ``charges_misses`` tuples of the disk phase are charged for their lookup in the cache; in the paper they are not.
    """
    looked_up = cache_tuples + (disk_tuples if charges_misses else 0.0)
    stream_tuples = cache_tuples + disk_tuples
    return LoopCost(
        terms={
            "read": factors.read_seconds(block_rows * relation_row_bytes, sequential=True),
            "probe": block_rows * factors.probe_s.at(window_tuples),
            "switch": block_rows * switched_share * factors.switch_s,
            "cache_probe": looked_up * factors.cache_probe_s.at(cached_rows),
            "stream": stream_tuples * factors.stream_read_s,
            "append": disk_tuples * factors.append_s.at(window_tuples),
            "expire": disk_tuples * factors.expire_s.at(window_tuples),
            "output": stream_tuples * matches_per_tuple * factors.output_s,
            "step": factors.step_s,
        },
        stream_tuples=stream_tuples,
    )


def optimal_cache_share(*, budget_bytes: float, cache_entry_bytes: float, hit_curve: HitCurve) -> tuple[float, float]:
    """The optimal fraction a of the memory for the cache, and the gain over MESHJOIN: (1 - a) / (1 - h(a)).

    If the disk is the bottleneck, MESHJOIN's rate is proportional to its window. A cache takes the fraction a of the
    memory from the window, and the fraction h(a) of the tuples off the disk. No split can gain more, whatever the
    algorithm. (1.0, infinity) if the cache can hold everything that the stream requests.
    """

    def gain(share: float) -> float:
        misses = 1.0 - hit_curve(share * budget_bytes / cache_entry_bytes)
        return (1.0 - share) / misses if misses > 0.0 else math.inf

    share = maximise(gain, 0.0, 1.0)
    return (share, gain(share)) if math.isfinite(gain(share)) else (1.0, math.inf)


@dataclass(frozen=True)
class BalancedModel:
    """Equations (1) to (3) in a steady state: blocks of b rows, a cache of h_R rows, w_S tuples per iteration to disk.

    A cache that holds all of R leaves nothing to the disk phase, and no block buffer is needed (theorem 3).

    >>> profile = JoinProfile.declared(relation_rows=1000, hit_curve=lambda rows: min(1.0, (rows / 1000) ** 0.5))
    >>> model = BalancedModel(profile, CostFactors.of_papers())
    >>> model.memory(block_rows=100, cached_rows=250, disk_tuples=4)
    {'block_buffer': 12000.0, 'cache': 30000.0, 'window': 800.0}
    >>> model.loop(block_rows=100, cached_rows=250, disk_tuples=4).stream_tuples
    8.0
    """

    profile: JoinProfile
    factors: CostFactors

    def memory(self, block_rows: int, cached_rows: float, disk_tuples: float) -> dict[str, float]:
        """Bytes per component."""
        profile = self.profile
        if cached_rows >= profile.relation_rows:
            return {
                "block_buffer": 0.0,
                "cache": profile.relation_rows * profile.cache_entry_bytes,
                "window": 0.0,
            }
        parts = memory_components(
            disk_tuples=disk_tuples,
            block_rows=block_rows,
            cached_rows=cached_rows,
            relation_rows=profile.blocks(block_rows) * block_rows,
            relation_row_bytes=profile.relation_row_bytes,
            stream_tuple_bytes=profile.stream_tuple_bytes,
            pointer_bytes=profile.window_entry_bytes - profile.stream_tuple_bytes,
        )
        return parts | {"cache": cached_rows * profile.cache_entry_bytes}

    def loop(self, block_rows: int, cached_rows: float, disk_tuples: float) -> LoopCost:
        """Cost of one iteration, averaged over a cycle."""
        profile, factors = self.profile, self.factors
        hit_ratio = profile.hit_ratio(cached_rows)
        if hit_ratio >= 1.0:
            return LoopCost(
                terms={
                    "stream": factors.stream_read_s,
                    "cache_probe": factors.cache_probe_s.at(cached_rows),
                    "output": profile.matches_per_tuple * factors.output_s,
                },
                stream_tuples=1.0,
            )
        blocks = profile.blocks(block_rows)
        return loop_cost(
            cache_tuples=disk_tuples * hit_ratio / (1.0 - hit_ratio),
            disk_tuples=disk_tuples,
            block_rows=profile.relation_rows / blocks,
            relation_row_bytes=profile.relation_row_bytes,
            window_tuples=disk_tuples * blocks,
            cached_rows=cached_rows,
            factors=factors,
            matches_per_tuple=profile.matches_per_tuple,
            switched_share=0.0,
            charges_misses=True,
        )

    def disk_tuples_for_budget(self, block_rows: int, cached_rows: float, budget_bytes: float) -> float:
        """The largest w_S within the budget, next to block buffer and cache; 0 if there is none."""
        fixed = sum(self.memory(block_rows, cached_rows, 0.0).values())
        per_tuple = self.profile.blocks(block_rows) * self.profile.window_entry_bytes
        return max(0.0, (budget_bytes - fixed) / per_tuple)

    def disk_tuples_for_rate(self, block_rows: int, cached_rows: float, rate: float) -> float:
        """The smallest w_S that serves `rate` tuples per second; infinite if there is none."""
        misses = 1.0 - self.profile.hit_ratio(cached_rows)
        if misses <= 0.0:
            return 0.0 if self.loop(block_rows, cached_rows, 0.0).service_rate >= rate else math.inf
        return misses * solve_chunk(rate, lambda tuples: self.loop(block_rows, cached_rows, tuples * misses))
