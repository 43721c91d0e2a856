"""HYBRIDJOIN's cost model (Naeem et al., 2011, section 4.4), and what it leaves to measurement.

The paper's equation (2) says that a step serves w = k h_S d / R_t stream tuples, with a constant k "obtained
from measurements", 1.36 in its setup. `tuples_per_step` derives w instead. A block's waiting tuples leave
together, when the oldest of them has come to the front of the queue. So with T the number of arrivals that a
tuple takes from the back of the queue to its front, a block on which the share p of the stream falls is read
every T + 1/p arrivals, serves 1 + p T tuples then, and has (p T + p^2 T^2 / 2) / (1 + p T) tuples waiting on
average over arrivals. While the w_i tuples that a step removed are replaced, the window is w_i / 2 short on
average, which takes p (1 + p T) / 2 per block off its mean. The sum of both over the blocks is the window's
size h_S, which gives T. For uniform blocks and a window of many tuples per block this is k = 2, the best that
a single queue can do.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dovetail.errors import PlanError
from dovetail.model.costs import CostFactors, LoopCost
from dovetail.model.mesh import solve_chunk
from dovetail.model.profile import JoinProfile

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
    """Equation (1): M = v_P + alpha (M - v_P) + (1 - alpha) (M - v_P), by component.

    Examples
    --------
    >>> memory_components(budget_bytes=1000, block_bytes=200, hash_weight=0.75)
    {'block_buffer': 200, 'hash_table': 600.0, 'queue': 200.0}
    """
    rest = budget_bytes - block_bytes
    return {"block_buffer": block_bytes, "hash_table": hash_weight * rest, "queue": (1 - hash_weight) * rest}


def hash_table_tuples(
    *, budget_bytes: float, block_bytes: float, hash_weight: float, stream_tuple_bytes: float
) -> float:
    """h_S, the tuples that the hash table's part of the memory holds.

    Examples
    --------
    Stream tuples of 20 bytes and queue nodes of 12 (table 2): 20/32 of the memory beside the disk buffer is
    the hash table's, and 50 MB with a disk buffer of 0.5 MB hold 1.5 million tuples.

    >>> round(hash_table_tuples(budget_bytes=50e6, block_bytes=0.5e6, hash_weight=20 / 32,
    ...                         stream_tuple_bytes=20))
    1546875
    """
    return hash_weight * (budget_bytes - block_bytes) / stream_tuple_bytes


def stream_input(
    *,
    hash_table_tuples: float,
    block_rows: float,
    relation_rows: float,
    constant: float = PAPER_STREAM_INPUT_CONSTANT,
) -> float:
    """Equation (2): w = k h_S d / R_t, the stream tuples that a step takes in, as the paper has it.

    Examples
    --------
    >>> round(stream_input(hash_table_tuples=1_546_875, block_rows=4167, relation_rows=2_000_000))
    4383
    """
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

    The read is a random one. `lookup` (finding the block by the index) and `step` are ours, nothing in the
    paper.

    Examples
    --------
    >>> factors = CostFactors.of_papers(probe_s=1e-7, output_s=1e-7, expire_s=1e-7, stream_read_s=1e-7,
    ...                                 append_s=1e-7)
    >>> cost = loop_cost(stream_tuples=4383, block_bytes=500_000, relation_row_bytes=120, window_tuples=1_546_875,
    ...                  factors=factors)
    >>> round(cost.seconds, 5), round(cost.service_rate)
    (0.0185, 236878)
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
    """The wait at which so many tuples wait."""
    if shares.size > 1:
        return _bisect(lambda wait: _window_and_step(wait, shares, counts)[0], window)
    # With equal shares the window is a quotient of polynomials of p T; this is the positive root.
    blocks = float(counts[0])
    linear = blocks + 1.0 - window
    root = math.sqrt(max(0.0, linear * linear + 2.0 * (blocks + 1.0) * (window - 0.5)))
    return max(0.0, (root - linear) / (blocks + 1.0)) / float(shares[0])


def _wait_for_step(stream_tuples: float, shares: NDArray[np.float64], counts: NDArray[np.float64]) -> float:
    """The wait at which a step serves so many tuples."""
    if shares.size > 1:
        return _bisect(lambda wait: _window_and_step(wait, shares, counts)[1], stream_tuples)
    return max(0.0, stream_tuples - 1.0) / float(shares[0])


def _bisect(function: Callable[[float], float], target: float) -> float:
    """Where an increasing function reaches the target; infinity if that is beyond all bounds."""
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


def _normalised(
    shares: NDArray[np.float64], counts: NDArray[np.float64] | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Shares that sum to 1: stream tuples that fall on no block do not wait for one."""
    shares = np.asarray(shares, dtype=np.float64)
    counts = np.ones(shares.size) if counts is None else np.asarray(counts, dtype=np.float64)
    total = float((shares * counts).sum())
    if shares.size == 0 or total <= 0.0:
        raise PlanError("HYBRIDJOIN's model needs at least one block that the stream asks for.")
    return shares / total, counts


def tuples_per_step(
    window_tuples: float, shares: NDArray[np.float64], counts: NDArray[np.float64] | None = None
) -> float:
    """Stream tuples that a step serves when the window is kept full: w, derived instead of equation (2).

    Parameters
    ----------
    window_tuples
        h_S.
    shares, counts
        The share of the stream that falls on each block; `counts` blocks have each share (1 if left out).

    Examples
    --------
    A hundred blocks, equally likely: a step serves nearly twice what a scan with the same window would.

    >>> round(tuples_per_step(100_000, np.array([0.01]), np.array([100.0])))
    1980
    """
    shares, counts = _normalised(shares, counts)
    wait = _wait_for_window(window_tuples, shares, counts)
    return min(_window_and_step(wait, shares, counts)[1], window_tuples)


def window_for_step(
    stream_tuples: float, shares: NDArray[np.float64], counts: NDArray[np.float64] | None = None
) -> float:
    """The window with which a step serves so many stream tuples: the inverse of `tuples_per_step`.

    Examples
    --------
    >>> round(window_for_step(1981, np.array([0.01]), np.array([100.0])), -2)
    100000.0
    """
    shares, counts = _normalised(shares, counts)
    wait = _wait_for_step(stream_tuples, shares, counts)
    return math.inf if math.isinf(wait) else _window_and_step(wait, shares, counts)[0]


def ratio_to_mesh_bound(
    *, block_bytes: float, budget_bytes: float, seek_s: float, bandwidth_bytes_per_s: float
) -> float:
    """The most that HYBRIDJOIN can serve over what MESHJOIN serves, disk-bound: 2 (1 - B/M) / (1 + s bw / B).

    Twice MESHJOIN's tuples per block at best, of a window smaller by the block buffer, with reads that take
    longer by a seek. It holds where every block has tuples waiting; blocks that the stream hardly asks for
    are read less often than the bound supposes.

    Examples
    --------
    0.5 % of the papers' relation (3.5 million rows of 120 bytes), a block that takes as long to read as to
    seek.

    >>> round(ratio_to_mesh_bound(block_bytes=480e3, budget_bytes=2.1e6, seek_s=8e-3, bandwidth_bytes_per_s=60e6), 2)
    0.77
    """
    longer = slowdown_constant(block_bytes=block_bytes, seek_s=seek_s, bandwidth_bytes_per_s=bandwidth_bytes_per_s)
    return 2.0 * (1.0 - block_bytes / budget_bytes) / longer


def best_ratio_to_mesh(*, budget_bytes: float, seek_s: float, bandwidth_bytes_per_s: float) -> tuple[float, float]:
    """The block size that maximises `ratio_to_mesh_bound`, and that maximum.

    With K = s bw the maximum is at B = sqrt(K^2 + K M) - K.

    Examples
    --------
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
        # Without a seek time the smallest block is best and nothing is lost.
        return 0.0, 2.0
    ratio = ratio_to_mesh_bound(
        block_bytes=block_bytes,
        budget_bytes=budget_bytes,
        seek_s=seek_s,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
    )
    return block_bytes, ratio


def slowdown_constant(*, block_bytes: float, seek_s: float, bandwidth_bytes_per_s: float) -> float:
    """The constant of theorem 1: a random read of a block over a sequential one, 1 + s bw / B.

    With windows of equal size HYBRIDJOIN is never slower than MESHJOIN by more than this. The paper's
    "smaller than 2" holds for blocks that take longer to read than to seek.

    Examples
    --------
    >>> slowdown_constant(block_bytes=480e3, seek_s=8e-3, bandwidth_bytes_per_s=60e6)
    2.0
    """
    return 1.0 + seek_s * bandwidth_bytes_per_s / block_bytes


@dataclass(frozen=True)
class HybridModel:
    """Equations (1), (3) and (4) with the derived w, for blocks of b rows and a window of h_S tuples.

    Examples
    --------
    >>> model = HybridModel(JoinProfile.declared(relation_rows=100_000), CostFactors.of_papers())
    >>> model.memory(block_rows=1000, window_tuples=50_000)
    {'block_buffer': 120000.0, 'window': 1000000.0}
    >>> round(model.loop(block_rows=1000, window_tuples=50_000).stream_tuples)
    990
    """

    profile: JoinProfile
    factors: CostFactors

    def memory(self, block_rows: int, window_tuples: float) -> dict[str, float]:
        """Bytes by component; the window is hash table and queue together."""
        return {
            "block_buffer": block_rows * self.profile.relation_row_bytes,
            "window": window_tuples * self.profile.window_entry_bytes,
        }

    def loop(self, block_rows: int, window_tuples: float) -> LoopCost:
        """Cost of one step with the window kept full."""
        step_tuples = tuples_per_step(window_tuples, *self.profile.block_shares(block_rows))
        return self._loop_serving(block_rows, window_tuples, step_tuples)

    def window_for_budget(self, block_rows: int, budget_bytes: float) -> float:
        """The largest window that fits beside the block buffer; 0 if there is none."""
        rest = budget_bytes - block_rows * self.profile.relation_row_bytes
        return max(0.0, rest / self.profile.window_entry_bytes)

    def window_for_rate(self, block_rows: int, rate: float) -> float:
        """The least window that serves `rate` tuples per second; infinite if none does."""
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
