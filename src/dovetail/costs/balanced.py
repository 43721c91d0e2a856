"""SSBJ's cost model (Naeem, Weber, Lutteroth, 2018, sections 3 and 3.2), and the best split that it allows.

The functions are the paper's equations. `BalancedModel` applies them in a steady state, with two differences
that make them true of a running operator: a stream tuple that the cache does not serve has been looked up
there too (the paper charges only the w_N that it serves), and no row is being switched into the cache (the
paper charges c_B for every row of every block). Its equation (6) puts the memory, in bytes, where equation
(5) has stream tuples; it is left out.
"""

import math
from dataclasses import dataclass

from dovetail.model.costs import CostFactors, LoopCost
from dovetail.model.mesh import solve_chunk
from dovetail.model.profile import HitCurve, JoinProfile
from dovetail.model.search import maximise

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
    """Theorem 2, the cache inequality: m v_R < n v_S.

    Examples
    --------
    Three waiting requests for a part: worth caching two suppliers, not four (the paper's figure 3).

    >>> is_better_cached(relation_rows=2, row_bytes=20, stream_tuples_per_cycle=3, tuple_bytes=20)
    True
    >>> is_better_cached(relation_rows=4, row_bytes=20, stream_tuples_per_cycle=3, tuple_bytes=20)
    False
    """
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

    Parameters
    ----------
    disk_tuples
        w_S: stream tuples that an iteration passes on to the disk phase.

    Examples
    --------
    >>> memory_components(disk_tuples=10, block_rows=100, cached_rows=50, relation_rows=1000,
    ...                   relation_row_bytes=120, stream_tuple_bytes=20, pointer_bytes=4, fudge=1.5)
    {'block_buffer': 12000, 'cache': 9000.0, 'window': 3400.0}
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

    Parameters
    ----------
    cache_tuples, disk_tuples
        w_N and w_S: stream tuples served by the cache and by the disk phase.
    switched_share
        Share of the block's rows that is switched into the cache; the paper has all of them.
    charges_misses
        Whether the disk phase's tuples are charged their lookup in the cache; the paper does not.

    Examples
    --------
    >>> factors = CostFactors.of_papers(probe_s=1e-7, output_s=1e-7, expire_s=1e-7, stream_read_s=1e-7,
    ...                                 append_s=1e-7, switch_s=1e-7)
    >>> cost = loop_cost(cache_tuples=3000, disk_tuples=1000, block_rows=10_000, relation_row_bytes=120,
    ...                  window_tuples=350_000, cached_rows=35_000, factors=factors)
    >>> round(cost.disk_seconds, 4), round(cost.cpu_seconds, 4), round(cost.service_rate)
    (0.02, 0.0033, 171674)
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
    """The share a of the memory that the cache should have, and the gain over MESHJOIN: (1 - a) / (1 - h(a)).

    With the disk as the limit, MESHJOIN serves in proportion to its window; a cache takes the share a of the
    memory from the window and the share h(a) of the tuples off the disk. No split can gain more, whatever the
    algorithm that finds it.

    Returns
    -------
    tuple of float
        a, and the gain; (1.0, infinity) where a cache can hold everything that the stream asks for.

    Examples
    --------
    1 %, 5 % and 10 % of the papers' relation at exponent 1.

    >>> from dovetail.workloads import Zipf
    >>> curve = Zipf(3_500_000, exponent=1.0).hit_curve()
    >>> for budget in (4.2e6, 21e6, 42e6):
    ...     share, gain = optimal_cache_share(budget_bytes=budget, cache_entry_bytes=120, hit_curve=curve)
    ...     print(f"{share:.2f} {gain:.2f}")
    0.13 2.05
    0.17 2.72
    0.20 3.20
    """

    def gain(share: float) -> float:
        misses = 1.0 - hit_curve(share * budget_bytes / cache_entry_bytes)
        return (1.0 - share) / misses if misses > 0.0 else math.inf

    share = maximise(gain, 0.0, 1.0)
    return (share, gain(share)) if math.isfinite(gain(share)) else (1.0, math.inf)


@dataclass(frozen=True)
class BalancedModel:
    """Equations (1) to (3) in a steady state, for blocks of b rows, a cache of h_R rows, and w_S tuples to
    disk.

    A cache that holds all of R leaves nothing to the disk phase, and no block buffer is needed (theorem 3).

    Examples
    --------
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
        """Bytes by component."""
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
        """The largest w_S within the budget beside block buffer and cache; 0 if there is none."""
        fixed = sum(self.memory(block_rows, cached_rows, 0.0).values())
        per_tuple = self.profile.blocks(block_rows) * self.profile.window_entry_bytes
        return max(0.0, (budget_bytes - fixed) / per_tuple)

    def disk_tuples_for_rate(self, block_rows: int, cached_rows: float, rate: float) -> float:
        """The least w_S with which `rate` tuples per second are served; infinite if there is none."""
        misses = 1.0 - self.profile.hit_ratio(cached_rows)
        if misses <= 0.0:
            return 0.0 if self.loop(block_rows, cached_rows, 0.0).service_rate >= rate else math.inf
        return misses * solve_chunk(rate, lambda tuples: self.loop(block_rows, cached_rows, tuples * misses))
