"""HYBRIDJOIN's cost model (Naeem et al., 2011, section 4.4), with a derivation of its measured constant.

The paper's equation (2) says that a step serves w = k h_S d / R_t stream tuples, with a constant k "obtained from
measurements", 1.36 in its setup. `tuples_per_step` derives w instead. All waiting tuples of a block leave together,
when the oldest of them reaches the front of the queue. Let T be the number of arrivals that a tuple takes from the back
of the queue to its front. A block that gets the fraction p of the stream is read every T + 1/p arrivals, then serves
1 + p T tuples, and has (p T + p^2 T^2 / 2) / (1 + p T) tuples waiting on average over arrivals. While the w_i tuples
that a step removed are replaced, the window is w_i / 2 short on average, which subtracts p (1 + p T) / 2 per block
from its mean. The sum of both over the blocks is the window size h_S, which determines T. For uniform blocks and a
window of many tuples per block this gives k = 2, the best that a single queue can achieve.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.core.errors import PlanError
from dovetail.costs.costs import CostFactors, LoopCost
from dovetail.costs.mesh import solve_chunk
from dovetail.costs.profile import JoinProfile
from dovetail.costs.search import first_reaching

__all__ = [
    "PAPER_STREAM_INPUT_CONSTANT",
    "HybridModel",
    "best_ratio_to_mesh",
    "hash_table_tuples",
    "loop_cost",
    "memory_components",
    "ratio_to_mesh_bound",
    "slowdown_constant",
    "stream_input",
    "tuples_per_step",
    "window_for_step",
]

PAPER_STREAM_INPUT_CONSTANT = 1.36


def memory_components(*, budget_bytes: float, block_bytes: float, hash_weight: float) -> dict[str, float]:
    """Equation (1): M = v_P + alpha (M - v_P) + (1 - alpha) (M - v_P), by component."""
    rest = budget_bytes - block_bytes
    return {"block_buffer": block_bytes, "hash_table": hash_weight * rest, "queue": (1 - hash_weight) * rest}


def hash_table_tuples(
    *, budget_bytes: float, block_bytes: float, hash_weight: float, stream_tuple_bytes: float
) -> float:
    """h_S: the number of tuples that fit in the hash table's part of the memory."""
    return hash_weight * (budget_bytes - block_bytes) / stream_tuple_bytes


def stream_input(
    *,
    hash_table_tuples: float,
    block_rows: float,
    relation_rows: float,
    constant: float = PAPER_STREAM_INPUT_CONSTANT,
) -> float:
    """Equation (2): w = k h_S d / R_t, the stream tuples that a step takes in, as in the paper."""
    return constant * hash_table_tuples * block_rows / relation_rows


def loop_cost(
    *,
    stream_tuples: float,
    block_bytes: float,
    relation_row_bytes: float,
    window_tuples: float,
    factors: CostFactors,
    matches_per_tuple: float = 1.0,
) -> LoopCost:
    """Equation (3): c_loop = c_I/O(v_P) + (v_P / v_R) c_H + w (c_O + c_E + c_S + c_A).

    The read is random. `lookup` (finding the block by the index) and `step` are ours; the paper does not have them.
    """
    return LoopCost(
        terms={
            "read": factors.read_seconds(block_bytes, sequential=False),
            "probe": block_bytes / relation_row_bytes * factors.probe_s.at(window_tuples),
            "output": stream_tuples * matches_per_tuple * factors.output_s,
            "expire": stream_tuples * factors.remove_s.at(window_tuples),
            "stream": stream_tuples * factors.stream_read_s,
            "append": stream_tuples * factors.append_s.at(window_tuples),
            "lookup": factors.lookup_s,
            "step": factors.index_step_s,
        },
        stream_tuples=stream_tuples,
    )


def _window_and_step(wait: float, shares: NDArray[np.float64], counts: NDArray[np.float64]) -> tuple[float, float]:
    """Window size and tuples per step when a tuple reaches the queue's front after `wait` arrivals."""
    waiting = shares * wait
    at_reading = 1.0 + waiting
    mean = (waiting + 0.5 * waiting * waiting) / at_reading
    refill = 0.5 * shares * at_reading
    window = float((counts * (mean + refill)).sum())
    return window, 1.0 / float((counts * shares / at_reading).sum())


def _wait_for_window(window: float, shares: NDArray[np.float64], counts: NDArray[np.float64]) -> float:
    """The wait that results in a window of this size."""
    if shares.size > 1:
        return first_reaching(lambda wait: _window_and_step(wait, shares, counts)[0], window)
    # With equal shares the window is a quotient of polynomials of p T; this is the positive root.
    blocks = float(counts[0])
    linear = blocks + 1.0 - window
    root = math.sqrt(max(0.0, linear * linear + 2.0 * (blocks + 1.0) * (window - 0.5)))
    return max(0.0, (root - linear) / (blocks + 1.0)) / float(shares[0])


def _wait_for_step(stream_tuples: float, shares: NDArray[np.float64], counts: NDArray[np.float64]) -> float:
    """The wait at which a step serves this many tuples."""
    if shares.size > 1:
        return first_reaching(lambda wait: _window_and_step(wait, shares, counts)[1], stream_tuples)
    return max(0.0, stream_tuples - 1.0) / float(shares[0])


def _normalised(
    shares: NDArray[np.float64], counts: NDArray[np.float64] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Scale the fractions to a sum of 1: stream tuples without a block do not wait for one."""
    shares = np.asarray(shares, dtype=np.float64)
    counts = np.ones(shares.size) if counts is None else np.asarray(counts, dtype=np.float64)
    total = float((shares * counts).sum())
    if shares.size == 0 or total <= 0.0:
        raise PlanError("HYBRIDJOIN's model needs at least one block that the stream requests.")
    return shares / total, counts


def tuples_per_step(
    window_tuples: float, shares: NDArray[np.float64], counts: NDArray[np.float64] | None = None
) -> float:
    """w: stream tuples that a step serves if the window is kept full, derived instead of equation (2).

    ``window_tuples`` is h_S. ``shares`` are the fractions of the stream per block; `counts` blocks have each fraction
    (default 1). For a hundred equally likely blocks a step serves nearly twice what a scan with the same window would:

    >>> round(tuples_per_step(100_000, np.array([0.01]), np.array([100.0])))
    1980
    """
    shares, counts = _normalised(shares, counts)
    wait = _wait_for_window(window_tuples, shares, counts)
    return min(_window_and_step(wait, shares, counts)[1], window_tuples)


def window_for_step(
    stream_tuples: float, shares: NDArray[np.float64], counts: NDArray[np.float64] | None = None
) -> float:
    """The window with which a step serves `stream_tuples`: the inverse of `tuples_per_step`."""
    shares, counts = _normalised(shares, counts)
    wait = _wait_for_step(stream_tuples, shares, counts)
    return math.inf if math.isinf(wait) else _window_and_step(wait, shares, counts)[0]


def ratio_to_mesh_bound(
    *, block_bytes: float, budget_bytes: float, seek_s: float, bandwidth_bytes_per_s: float
) -> float:
    """Upper bound of HYBRIDJOIN's rate relative to MESHJOIN's, disk-bound: 2 (1 - B/M) / (1 + s bw / B).

    At best twice MESHJOIN's tuples per block, with a window that is smaller by the block buffer, and reads that take a
    seek longer. It holds if every block has tuples waiting; blocks that the stream rarely requests are read less often
    than the bound assumes.
    """
    longer = slowdown_constant(block_bytes=block_bytes, seek_s=seek_s, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    return 2.0 * (1.0 - block_bytes / budget_bytes) / longer


def best_ratio_to_mesh(*, budget_bytes: float, seek_s: float, bandwidth_bytes_per_s: float) -> tuple[float, float]:
    """The block size that maximises `ratio_to_mesh_bound`, and that maximum.

    With K = s bw the maximum is at B = sqrt(K^2 + K M) - K.

    >>> for budget in (2.1e6, 4.2e6, 21e6, 42e6):
    ...     size, ratio = best_ratio_to_mesh(budget_bytes=budget, seek_s=8e-3, bandwidth_bytes_per_s=60e6)
    ...     print(f"{size / 1e6:.2f} MB {ratio:.2f}")
    0.63 MB 0.79
    1.02 MB 1.03
    2.73 MB 1.48
    4.04 MB 1.62
    """
    transfer_in_a_seek = seek_s * bandwidth_bytes_per_s
    block_bytes = math.sqrt(transfer_in_a_seek**2 + transfer_in_a_seek * budget_bytes) - transfer_in_a_seek
    if block_bytes <= 0.0:
        # Without seek time the smallest block is best, at no cost.
        return 0.0, 2.0
    ratio = ratio_to_mesh_bound(
        block_bytes=block_bytes,
        budget_bytes=budget_bytes,
        seek_s=seek_s,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
    )
    return block_bytes, ratio


def slowdown_constant(*, block_bytes: float, seek_s: float, bandwidth_bytes_per_s: float) -> float:
    """The constant of theorem 1: the time of a random read of a block over a sequential one, 1 + s bw / B.

    With windows of equal size HYBRIDJOIN is never slower than MESHJOIN by more than this factor. The paper's "smaller
    than 2" holds for blocks that take longer to read than to seek.
    """
    return 1.0 + seek_s * bandwidth_bytes_per_s / block_bytes


@dataclass(frozen=True)
class HybridModel:
    """Equations (1), (3) and (4) with the derived w, for blocks of b rows and a window of h_S tuples."""

    profile: JoinProfile
    factors: CostFactors

    def memory(self, block_rows: int, window_tuples: float) -> dict[str, float]:
        """Bytes per component; the window comprises hash table and queue."""
        return {
            "block_buffer": block_rows * self.profile.relation_row_bytes,
            "window": window_tuples * self.profile.window_entry_bytes,
        }

    def loop(self, block_rows: int, window_tuples: float) -> LoopCost:
        """Cost of one step with the window kept full."""
        step_tuples = tuples_per_step(window_tuples, *self.profile.block_shares(block_rows))
        return self._loop_serving(block_rows, window_tuples, step_tuples)

    def window_for_budget(self, block_rows: int, budget_bytes: float) -> float:
        """The largest window that fits next to the block buffer; 0 if there is none."""
        rest = budget_bytes - block_rows * self.profile.relation_row_bytes
        return max(0.0, rest / self.profile.window_entry_bytes)

    def window_for_rate(self, block_rows: int, rate: float) -> float:
        """The smallest window that serves `rate` tuples per second; infinite if none does."""
        shares, counts = self.profile.block_shares(block_rows)

        def loop(step_tuples: float) -> LoopCost:
            window_tuples = window_for_step(step_tuples, shares, counts)
            return self._loop_serving(block_rows, window_tuples, step_tuples)

        step_tuples = solve_chunk(rate, loop)
        return math.inf if math.isinf(step_tuples) else window_for_step(step_tuples, shares, counts)

    def _loop_serving(self, block_rows: int, window_tuples: float, step_tuples: float) -> LoopCost:
        profile = self.profile
        rows_per_block = profile.relation_rows / profile.blocks(block_rows)
        return loop_cost(
            stream_tuples=step_tuples,
            block_bytes=rows_per_block * profile.relation_row_bytes,
            relation_row_bytes=profile.relation_row_bytes,
            window_tuples=window_tuples,
            factors=self.factors,
            matches_per_tuple=profile.matches_per_tuple,
        )
