"""What to drop when the input exceeds the budget.

A policy, if given, is consulted only while the window is full. Tuples that have already produced results are never
dropped, so the output is exactly the join of the tuples that were kept. Dropped tuples are counted per policy in
``metrics.shed``.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.core.errors import PlanError

__all__ = ["SHEDDING", "LeastJoinedFirst", "OldestFirst", "Random", "SheddingPolicy", "SheddingState"]

_COUNTERS = 4096
_MIX = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(52)  # 64 - log2(_COUNTERS)


class SheddingState(Protocol):
    """A policy at work in one operator."""

    nbytes: int
    drops_arriving: bool

    def drop_arriving(self, count: int) -> BoolArray:
        """Which of ``count`` arriving tuples that have no room are dropped."""

    def rank_waiting(self, codes: Int64Array) -> Int64Array | None:
        """The waiting tuples (given oldest first) in the order in which to drop them; None: drop none."""

    def observe(self, codes: Int64Array) -> None:
        """Learn the codes of joined pairs."""

    def save(self) -> dict[str, Any]:
        """The state for a snapshot, JSON-able."""

    def load(self, saved: dict[str, Any]) -> None:
        """The inverse of `save`."""


class SheddingPolicy(Protocol):
    """The policy in a spec; it creates a `SheddingState` for each operator."""

    @property
    def name(self) -> str: ...
    def start(self) -> SheddingState: ...


class _Stateless:
    """Drops nothing; the policies below override parts of it."""

    nbytes = 0
    drops_arriving = False

    def drop_arriving(self, count: int) -> BoolArray:
        return np.zeros(count, np.bool_)

    def rank_waiting(self, codes: Int64Array) -> Int64Array | None:
        return None

    def observe(self, codes: Int64Array) -> None:
        pass

    def save(self) -> dict[str, Any]:
        return {}

    def load(self, saved: dict[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class Random:
    """Drop each arriving tuple that has no room with a probability; disk steps make room for the others.

    Parameters
    ----------
    rate
        The probability, above 0 and at most 1.
    seed
        Of the generator; the same seed and input drop the same tuples.

    Examples
    --------
    >>> Random(rate=1.0, seed=1).start().drop_arriving(2).tolist()
    [True, True]
    """

    rate: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise PlanError(f"rate={self.rate!r}: shedding at random needs a rate above 0 and at most 1.")

    @property
    def name(self) -> str:
        """Its name in ``metrics.shed``."""
        return "random"

    def start(self) -> SheddingState:
        """Create the policy's state for one operator."""
        return _RandomState(self)


class _RandomState(_Stateless):
    drops_arriving = True

    def __init__(self, policy: Random) -> None:
        self._rate = policy.rate
        self._generator = np.random.default_rng(policy.seed)

    def drop_arriving(self, count: int) -> BoolArray:
        return self._generator.random(count) < self._rate

    def save(self) -> dict[str, Any]:
        return {"generator": self._generator.bit_generator.state}

    def load(self, saved: dict[str, Any]) -> None:
        self._generator.bit_generator.state = saved["generator"]


@dataclass(frozen=True)
class OldestFirst:
    """Drop the tuples that have waited longest and have no result yet; the newest are kept.

    Examples
    --------
    >>> OldestFirst().start().rank_waiting(np.array([7, 7, 8])).tolist()
    [0, 1, 2]
    """

    @property
    def name(self) -> str:
        """Its name in ``metrics.shed``."""
        return "oldest_first"

    def start(self) -> SheddingState:
        """Create the policy's state for one operator."""
        return _OldestState()


class _OldestState(_Stateless):
    def rank_waiting(self, codes: Int64Array) -> Int64Array | None:
        return np.arange(codes.size)


@dataclass(frozen=True)
class LeastJoinedFirst:
    """Drop the waiting tuples whose join value has produced the fewest results, oldest first among equals.

    Results are counted per hash of the code in a small fixed table, so values may share a counter.

    Examples
    --------
    >>> state = LeastJoinedFirst().start()
    >>> state.observe(np.array([7, 7, 8]))
    >>> state.rank_waiting(np.array([7, 8, 9])).tolist()
    [2, 1, 0]
    """

    @property
    def name(self) -> str:
        """Its name in ``metrics.shed``."""
        return "least_joined_first"

    def start(self) -> SheddingState:
        """Create the policy's state for one operator."""
        return _LeastJoinedState()


class _LeastJoinedState(_Stateless):
    def __init__(self) -> None:
        self._joined = np.zeros(_COUNTERS, np.int64)
        self.nbytes = self._joined.nbytes

    def rank_waiting(self, codes: Int64Array) -> Int64Array | None:
        return np.argsort(self._joined[_counter_of(codes)], kind="stable")

    def observe(self, codes: Int64Array) -> None:
        np.add.at(self._joined, _counter_of(codes), 1)

    def save(self) -> dict[str, Any]:
        return {"joined": self._joined.tolist()}

    def load(self, saved: dict[str, Any]) -> None:
        self._joined[:] = saved["joined"]


def _counter_of(codes: Int64Array) -> Int64Array:
    return ((codes.view(np.uint64) * _MIX) >> _SHIFT).astype(np.int64)


SHEDDING: dict[str, SheddingPolicy] = {
    "random": Random(rate=0.5),
    "oldest": OldestFirst(),
    "least_joined": LeastJoinedFirst(),
}
"""The policies by their names in flows and pipeline files."""
