"""The sizes and frequencies of a join on which a plan depends."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dovetail.core.errors import PlanError

__all__ = ["HitCurve", "JoinProfile", "as_hit_curve", "kernel_bytes_per_entry"]

HitCurve = Callable[[float], float]
"""Fraction of the stream, 0 to 1, that the given number of relation rows serves, best (or first) rows first."""


def as_hit_curve(curve: HitCurve | ArrayLike | None, relation_rows: int) -> HitCurve:
    """Convert a hit curve from any form: a function, cumulative fractions, or None for a uniform stream.

    In an array, entry i is the fraction that the first i + 1 rows serve; the curve is linear between entries.
    ``relation_rows`` is only needed for None.
    """
    if curve is None:
        return lambda rows: min(max(rows / relation_rows, 0.0), 1.0)
    if callable(curve):
        return curve
    shares = np.concatenate([[0.0], np.asarray(curve, dtype=np.float64)])
    grows = shares.size > 1 and bool(np.isfinite(shares).all() and (np.diff(shares) >= 0).all())
    if not grows or shares[-1] > 1.0 + 1e-9:
        raise PlanError("A hit curve must hold cumulative shares that never decrease and end at 1 or below.")
    return _CumulativeCurve(np.minimum(shares, 1.0))


class _CumulativeCurve:
    """A hit curve given by its values at whole numbers of rows, linear in between."""

    def __init__(self, shares: NDArray[np.float64]) -> None:
        self._shares = shares

    def __call__(self, rows: float) -> float:
        last = self._shares.size - 1
        kept = min(max(rows, 0.0), float(last))
        whole = min(int(kept), last - 1)
        low, high = self._shares[whole], self._shares[whole + 1]
        return float(low + (kept - whole) * (high - low))

    def at_rows(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        return self._shares[np.clip(rows, 0, self._shares.size - 1)]


def kernel_bytes_per_entry() -> float:
    """Bytes of the window's hash table per tuple, without the tuple itself."""
    from dovetail.kernels.multimap import DENSE_LOAD, MultiMap

    # A large table makes its fixed bytes negligible.
    entries = 1 << 20
    return MultiMap.nbytes_of(entries, DENSE_LOAD) / entries


@dataclass(frozen=True, kw_only=True)
class JoinProfile:
    """One shard of a relation and the stream joined with it."""

    relation_rows: int  # R_t
    relation_row_bytes: float  # v_R, on disk
    stream_tuple_bytes: float  # v_S
    window_entry_bytes: float  # total per waiting stream tuple: f v_S plus its pointer in the queue
    cache_entry_bytes: float  # total per cached relation row: f v_R
    matches_per_tuple: float = 1.0  # mean number of results per stream tuple
    hit_curve: HitCurve | None = None  # fraction of the stream served by a cache of the best n rows; None: uniform
    # Fraction of the stream on the first n rows of R in storage order, for HYBRIDJOIN; None: blocks are equally likely.
    storage_curve: HitCurve | None = None

    def __post_init__(self) -> None:
        if self.relation_rows < 1:
            raise PlanError(f"relation_rows={self.relation_rows}: a model needs at least one row.")
        for name in ("relation_row_bytes", "stream_tuple_bytes", "window_entry_bytes", "cache_entry_bytes"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise PlanError(f"{name}={getattr(self, name)}: a row takes a positive number of bytes.")
        if not (math.isfinite(self.matches_per_tuple) and self.matches_per_tuple >= 0):
            raise PlanError(f"matches_per_tuple={self.matches_per_tuple}: it must be 0 or more.")

    @classmethod
    def declared(
        cls,
        *,
        relation_rows: int,
        relation_row_bytes: float = 120,
        stream_tuple_bytes: float = 20,
        matches_per_tuple: float = 1.0,
        hit_curve: HitCurve | ArrayLike | None = None,
        storage_curve: HitCurve | ArrayLike | None = None,
    ) -> Self:
        """A profile in which tables have no overhead (the papers' f = 1, no pointers)."""
        return cls.with_overhead(
            relation_rows=relation_rows,
            relation_row_bytes=relation_row_bytes,
            stream_tuple_bytes=stream_tuple_bytes,
            window_overhead_bytes=0.0,
            cache_overhead_bytes=0.0,
            matches_per_tuple=matches_per_tuple,
            hit_curve=hit_curve,
            storage_curve=storage_curve,
        )

    @classmethod
    def with_overhead(
        cls,
        *,
        relation_rows: int,
        relation_row_bytes: float = 120,
        stream_tuple_bytes: float = 20,
        window_overhead_bytes: float | None = None,
        cache_overhead_bytes: float | None = None,
        matches_per_tuple: float = 1.0,
        hit_curve: HitCurve | ArrayLike | None = None,
        storage_curve: HitCurve | ArrayLike | None = None,
    ) -> Self:
        """A profile with the tables' overhead per entry, by default that of the kernels.

        >>> profile = JoinProfile.with_overhead(relation_rows=10, window_overhead_bytes=12, cache_overhead_bytes=8)
        >>> profile.window_entry_bytes, profile.cache_entry_bytes
        (32.0, 128.0)
        """
        if window_overhead_bytes is None:
            window_overhead_bytes = kernel_bytes_per_entry()
        if cache_overhead_bytes is None:
            cache_overhead_bytes = kernel_bytes_per_entry()
        return cls(
            relation_rows=relation_rows,
            relation_row_bytes=float(relation_row_bytes),
            stream_tuple_bytes=float(stream_tuple_bytes),
            window_entry_bytes=float(stream_tuple_bytes + window_overhead_bytes),
            cache_entry_bytes=float(relation_row_bytes + cache_overhead_bytes),
            matches_per_tuple=matches_per_tuple,
            hit_curve=None if hit_curve is None else as_hit_curve(hit_curve, relation_rows),
            storage_curve=None if storage_curve is None else as_hit_curve(storage_curve, relation_rows),
        )

    @property
    def relation_bytes(self) -> int:
        """Bytes of R on disk."""
        return round(self.relation_rows * self.relation_row_bytes)

    def blocks(self, block_rows: int) -> int:
        """k: the number of blocks of R, including a shorter last one."""
        return -(-self.relation_rows // block_rows)

    def hit_ratio(self, cached_rows: float) -> float:
        """h: the fraction of the stream that a cache of this many rows serves."""
        if cached_rows >= self.relation_rows:
            return 1.0
        return as_hit_curve(self.hit_curve, self.relation_rows)(cached_rows)

    def block_shares(self, block_rows: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The fractions of the stream per block of R, and how many blocks have each fraction."""
        blocks = self.blocks(block_rows)
        if self.storage_curve is None:
            return np.array([1.0 / blocks]), np.array([float(blocks)])
        edges = np.minimum(np.arange(blocks + 1, dtype=np.int64) * block_rows, self.relation_rows)
        if isinstance(self.storage_curve, _CumulativeCurve):
            shares = np.diff(self.storage_curve.at_rows(edges))
        else:
            shares = np.diff([self.storage_curve(float(edge)) for edge in edges])
        # Blocks without requests are never read.
        shares = shares[shares > 0.0]
        return shares, np.ones(shares.size)
