"""MESHJOIN's cost model (Polyzotis et al., ICDE 2007, section 3.2).

The functions are the paper's equations, in its units: b and N_R are in pages. `MeshModel` applies them to our blocks,
which are counted in rows: a page is one row, and v_P = v_R.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from dovetail.costs.costs import CostFactors, LoopCost
from dovetail.costs.profile import JoinProfile

__all__ = [
    "MeshModel",
    "loop_cost",
    "memory_components",
    "reads_per_second",
    "reads_per_tuple",
    "required_chunk",
    "solve_chunk",
]


def memory_components(
    *,
    chunk_tuples: float,
    block_pages: float,
    relation_pages: float,
    page_bytes: float,
    stream_tuple_bytes: float,
    pointer_bytes: float,
    fudge: float = 1.0,
) -> dict[str, float]:
    """Equation (1): M = b v_P + w v_S + w (N_R / b) sizeof(ptr) + w f (N_R / b) v_S, by component.

    The window is the last two terms: queue Q and hash table H.
    """
    window_tuples = chunk_tuples * relation_pages / block_pages
    return {
        "block_buffer": block_pages * page_bytes,
        "stream_buffer": chunk_tuples * stream_tuple_bytes,
        "window": window_tuples * (pointer_bytes + fudge * stream_tuple_bytes),
    }


def loop_cost(
    *,
    chunk_tuples: float,
    block_pages: float,
    relation_pages: float,
    page_bytes: float,
    relation_row_bytes: float,
    selectivity: float,
    factors: CostFactors,
) -> LoopCost:
    """Equation (2): c_loop = c_I/O(b) + w (c_E + c_S + c_A) + b (v_P / v_R) (c_H + sigma c_O).

    ``selectivity`` is sigma: result tuples per relation row read. In a steady state every stream tuple meets all of R,
    so sigma b v_P / v_R = w m if a stream tuple has m matches.
    """
    window_tuples = chunk_tuples * relation_pages / block_pages
    rows = block_pages * page_bytes / relation_row_bytes
    return LoopCost(
        terms={
            "read": factors.read_seconds(block_pages * page_bytes, sequential=True),
            "expire": chunk_tuples * factors.expire_s.at(window_tuples),
            "stream": chunk_tuples * factors.stream_read_s,
            "append": chunk_tuples * factors.append_s.at(window_tuples),
            "probe": rows * factors.probe_s.at(window_tuples),
            "output": selectivity * rows * factors.output_s,
            "step": factors.step_s,
        },
        stream_tuples=chunk_tuples,
    )


def reads_per_tuple(*, block_pages: float, chunk_tuples: float) -> float:
    """Equation (4), left: b / w page reads per stream tuple.

    The paper calls it IO_s in the equation and IO_t in its table 1. It is per stream tuple.
    """
    return block_pages / chunk_tuples


def reads_per_second(*, block_pages: float, loop_seconds: float) -> float:
    """Equation (4), right: b / c_loop page reads per second."""
    return block_pages / loop_seconds


def required_chunk(*, rate: float, fixed_seconds: float, seconds_per_tuple: float) -> float:
    """Equation (6), w = lambda c_loop, solved for w where c_loop = fixed + w * per tuple.

    Infinity if the CPU needs more than a second for one second's tuples: no w is enough.
    """
    idle_share = 1.0 - rate * seconds_per_tuple
    return rate * fixed_seconds / idle_share if idle_share > 0.0 else math.inf


def solve_chunk(rate: float, loop: Callable[[float], LoopCost]) -> float:
    """Equation (6) for a loop whose costs also depend on w through the sizes of its tables.

    ``loop`` returns the cost of an iteration by the number of stream tuples it takes in. Returns the number at which
    the loop serves exactly `rate` tuples per second; infinity if it never does.
    """
    chunk = 1.0
    # Table costs change slowly with size, so a few rounds are enough. The limit only guards against a cycle between
    # two sizes; either is within the precision of the curve.
    for _ in range(50):
        cost = loop(chunk)
        needed = required_chunk(rate=rate, fixed_seconds=cost.fixed_seconds, seconds_per_tuple=cost.seconds_per_tuple)
        if math.isinf(needed) or abs(needed - chunk) <= 1e-9 * needed:
            return needed
        chunk = needed
    return chunk


@dataclass(frozen=True)
class MeshModel:
    """Equations (1) to (6) for blocks of b rows and chunks of w tuples.

    For memory, R counts as an integer number of blocks (a window holds w tuples per step of a cycle, including the
    last, shorter step); for time, as its actual size.

    >>> model = MeshModel(JoinProfile.declared(relation_rows=1000), CostFactors.of_papers())
    >>> model.memory(block_rows=100, chunk_tuples=5)
    {'block_buffer': 12000.0, 'stream_buffer': 100.0, 'window': 1000.0}
    >>> round(model.loop(block_rows=100, chunk_tuples=5).service_rate)
    25000
    """

    profile: JoinProfile
    factors: CostFactors

    def memory(self, block_rows: int, chunk_tuples: float) -> dict[str, float]:
        """Bytes per component."""
        profile = self.profile
        return memory_components(
            chunk_tuples=chunk_tuples,
            block_pages=block_rows,
            relation_pages=profile.blocks(block_rows) * block_rows,
            page_bytes=profile.relation_row_bytes,
            stream_tuple_bytes=profile.stream_tuple_bytes,
            pointer_bytes=profile.window_entry_bytes - profile.stream_tuple_bytes,
        )

    def loop(self, block_rows: int, chunk_tuples: float) -> LoopCost:
        """Cost of one iteration, averaged over a cycle."""
        profile = self.profile
        rows_per_step = profile.relation_rows / profile.blocks(block_rows)
        return loop_cost(
            chunk_tuples=chunk_tuples,
            block_pages=rows_per_step,
            relation_pages=profile.relation_rows,
            page_bytes=profile.relation_row_bytes,
            relation_row_bytes=profile.relation_row_bytes,
            selectivity=chunk_tuples * profile.matches_per_tuple / rows_per_step,
            factors=self.factors,
        )

    def chunk_for_budget(self, block_rows: int, budget_bytes: float) -> float:
        """The largest w within the budget for blocks of b rows; 0 if there is none."""
        fixed = sum(self.memory(block_rows, 0).values())
        return max(0.0, (budget_bytes - fixed) / (sum(self.memory(block_rows, 1).values()) - fixed))

    def chunk_for_rate(self, block_rows: int, rate: float) -> float:
        """The smallest w that serves `rate` tuples per second; infinite if none does."""
        return solve_chunk(rate, lambda chunk_tuples: self.loop(block_rows, chunk_tuples))
