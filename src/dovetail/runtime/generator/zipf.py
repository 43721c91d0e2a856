"""Zipf's law over a finite domain, by exact inversion.

Rank r of n has probability r^-e / (1^-e + ... + n^-e). A uniform number is mapped to a rank by inverting the cumulative
sums, in constant expected time and constant memory:

- the first `HEAD_RANKS` ranks have their cumulative sums in a table, searched from a guide (one entry per equal slice
  of the table's probability, so a search starts at most a few entries from its end);
- beyond them the cumulative sum is its integral plus the Euler-Maclaurin correction of the midpoint rule, whose error
  there is below 1e-19, far below double precision. The integral has a closed inverse; a number so near a boundary that
  rounding could decide is compared with the two sums around it.

There is no rejection: one uniform number gives one rank, and larger numbers give larger ranks.
"""

# mypy: allow-untyped-decorators

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import numba
import numpy as np
from numpy.typing import ArrayLike, NDArray

import dovetail.kernels  # noqa: F401 -- chooses where compiled code is kept; must come first
from dovetail.core.errors import PlanError

__all__ = ["HEAD_RANKS", "KeyOrder", "Zipf"]

KeyOrder = Literal["ranked", "shuffled"]

HEAD_RANKS = 1 << 16
_LARGEST_DOMAIN = 1 << 52
_EPSILON = float(np.finfo(np.float64).eps)
# The inverse omits a term of at most 2 / (24 * HEAD_RANKS) of a rank: nearer to a boundary, check.
_BOUNDARY_RANKS = 2e-6


class Zipf:
    """A stream of join codes 1..n whose frequencies follow Zipf's law.

    Parameters
    ----------
    exponent
        0 (uniform) to 2. The papers use 0 to 1.
    order
        ``"ranked"``: code r is the r-th most frequent, so hot codes are neighbours in a sorted relation, as in the
        HYBRIDJOIN paper. ``"shuffled"``: ranks are mapped to codes by a seeded permutation.
    seed
        Determines the permutation and the numbers drawn. Equal arguments give equal streams.

    Examples
    --------
    >>> stream = Zipf(1_000_000, exponent=1.0, order="shuffled", seed=7)
    >>> codes = stream.sample(5)
    >>> codes.dtype, bool(((codes >= 1) & (codes <= 1_000_000)).all())
    (dtype('int64'), True)
    >>> round(stream.hit_ratio(10_000), 3)        # 1 % of the codes
    0.68
    >>> bool((Zipf(1_000_000, 1.0, order="shuffled", seed=7).sample(5) == codes).all())
    True
    """

    def __init__(self, n: int, exponent: float, *, order: KeyOrder = "ranked", seed: int = 0) -> None:
        if not 1 <= n <= _LARGEST_DOMAIN:
            raise PlanError(f"n={n}: a domain has between 1 and 2**52 codes.")
        if not 0.0 <= exponent <= 2.0:
            raise PlanError(f"exponent={exponent}: Zipf's law is supported for exponents 0 to 2.")
        if order not in get_args(KeyOrder):
            raise PlanError(f"order={order!r} is not an order of keys.", hint="Use 'ranked' or 'shuffled'.")
        self.n = int(n)
        self.exponent = float(exponent)
        self.order: KeyOrder = order
        self.seed = seed
        head = min(self.n, HEAD_RANKS)
        weights = np.arange(1, head + 1, dtype=np.float64) ** -self.exponent
        self._head_sums = np.cumsum(weights)
        self._total = float(_sums_at(np.array([self.n], dtype=np.int64), self.exponent, self._head_sums)[0])
        self._guide = _build_guide(self._head_sums)
        self._mixer = _Mixer(self.n, seed)
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def __repr__(self) -> str:
        return f"Zipf(n={self.n}, exponent={self.exponent:g}, order={self.order!r}, seed={self.seed})"

    def sample(self, size: int) -> NDArray[np.int64]:
        """Draw the next `size` codes of the stream."""
        ranks = self.ranks_at(self._generator.random(size))
        return self.codes_of(ranks)

    def ranks_at(self, uniforms: ArrayLike) -> NDArray[np.int64]:
        """Invert the distribution: the least rank whose cumulative probability exceeds each number in [0, 1)."""
        numbers = np.ascontiguousarray(uniforms, dtype=np.float64)
        ranks: NDArray[np.int64] = _invert(numbers, self.n, self.exponent, self._total, self._head_sums, self._guide)
        return ranks

    def codes_of(self, ranks: ArrayLike) -> NDArray[np.int64]:
        """Map ranks (1 is the most frequent) to codes."""
        ranks = np.ascontiguousarray(ranks, dtype=np.int64)
        return ranks if self.order == "ranked" else self._mixer.permute(ranks)

    def probabilities(self, ranks: ArrayLike) -> NDArray[np.float64]:
        """The probability of each rank."""
        return np.asarray(ranks, dtype=np.float64) ** -self.exponent / self._total

    def hit_ratio(self, top_k: float) -> float:
        """The share of the stream on the `top_k` most frequent codes: the papers' h.

        `top_k` may be fractional (the last code then counts in part) and is limited to 0..n.
        """
        kept = min(max(float(top_k), 0.0), float(self.n))
        whole = int(kept)
        sums = _sums_at(np.array([whole, min(whole + 1, self.n)], dtype=np.int64), self.exponent, self._head_sums)
        return float((sums[0] + (kept - whole) * (sums[1] - sums[0])) / self._total)

    def hit_curve(self, rows_per_code: float = 1.0) -> Callable[[float], float]:
        """The hit ratio as a function of cached relation rows, as the tuner takes it.

        All `rows_per_code` relation rows of a code must be cached for the code to be served.
        """
        return lambda cached_rows: self.hit_ratio(cached_rows / rows_per_code)

    def storage_cumulative(self) -> NDArray[np.float64]:
        """Cumulative probability by code, 8 bytes each: entry i is the share of the stream on codes 1..i+1.

        The HYBRIDJOIN model needs it for the order of a relation sorted by code.
        """
        ranks = np.arange(1, self.n + 1, dtype=np.int64)
        by_code = np.empty(self.n, dtype=np.float64)
        by_code[self.codes_of(ranks) - 1] = self.probabilities(ranks)
        return np.cumsum(by_code)


class _Mixer:
    """A seeded permutation of 1..n in constant memory.

    Every round is invertible on numbers of b bits, 2^b being the power of two that holds n: multiply by an odd number,
    add, fold the upper half onto the lower. A result outside the domain is permuted again (cycle walking), which keeps
    it a permutation and takes less than two tries on average.
    """

    _ROUNDS = 4

    def __init__(self, n: int, seed: int) -> None:
        self._n = n
        self._bits = max(1, (n - 1).bit_length())
        # A separate stream: the permutation must not correlate with the numbers drawn from the same seed.
        constants = np.random.Generator(np.random.PCG64([seed, 0x5A1F]))
        self._multipliers = constants.integers(0, 2**63, self._ROUNDS, dtype=np.uint64) | np.uint64(1)
        self._increments = constants.integers(0, 2**63, self._ROUNDS, dtype=np.uint64)

    def permute(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        # Wrap-around is intended; numpy warns of it if the function is not compiled.
        with np.errstate(over="ignore"):
            permuted: NDArray[np.int64] = _permute(values, self._n, self._bits, self._multipliers, self._increments)
        return permuted


@numba.njit(cache=True)
def _permute(
    values: Any,
    n: Any,
    bits: Any,
    multipliers: Any,
    increments: Any,
) -> Any:
    mask = np.uint64((1 << bits) - 1)
    fold = np.uint64((bits + 1) // 2)
    limit = np.uint64(n)
    permuted = np.empty(values.size, dtype=np.int64)
    for i in range(values.size):
        mixed = np.uint64(values[i] - 1)
        while True:
            for round_ in range(multipliers.size):
                mixed = (mixed * multipliers[round_] + increments[round_]) & mask
                mixed ^= mixed >> fold
            if mixed < limit:
                break
        permuted[i] = np.int64(mixed) + 1
    return permuted


def _build_guide(head_sums: NDArray[np.float64]) -> NDArray[np.int32]:
    """The first rank (from 0) of each of as many equal slices of the head as it has ranks."""
    slices = head_sums.size
    starts = np.arange(slices, dtype=np.float64) * (head_sums[-1] / slices)
    # One rank early, because the multiplication that finds a number's slice may round up.
    first = np.searchsorted(head_sums, starts, side="right") - 1
    guide: NDArray[np.int32] = np.maximum(first, 0).astype(np.int32)
    return guide


@numba.njit(cache=True)
def _integral_from(origin: Any, end: Any, exponent: Any) -> Any:
    """Integral of x^-exponent from `origin` to `end`, precise also for exponents near 1."""
    log_ratio = math.log(end / origin)
    power = (1.0 - exponent) * log_ratio
    growth = log_ratio if abs(power) < 1e-300 else log_ratio * (math.expm1(power) / power)
    return growth * origin ** (1.0 - exponent)


@numba.njit(cache=True)
def _sum_at(rank: Any, exponent: Any, head_sums: Any) -> Any:
    """Sum of r^-exponent over the ranks 1..rank."""
    head = head_sums.size
    if rank <= 0:
        return 0.0
    if rank <= head:
        return head_sums[rank - 1]
    origin = head + 0.5
    end = rank + 0.5
    correction = exponent / 24.0 * (end ** (-exponent - 1.0) - origin ** (-exponent - 1.0))
    return head_sums[head - 1] + _integral_from(origin, end, exponent) + correction


@numba.njit(cache=True)
def _sums_at(ranks: Any, exponent: Any, head_sums: Any) -> Any:
    sums = np.empty(ranks.size, dtype=np.float64)
    for i in range(ranks.size):
        sums[i] = _sum_at(ranks[i], exponent, head_sums)
    return sums


@numba.njit(cache=True)
def _invert(
    uniforms: Any,
    n: Any,
    exponent: Any,
    total: Any,
    head_sums: Any,
    guide: Any,
) -> Any:
    head = head_sums.size
    head_total = head_sums[head - 1]
    slices_per_unit = head / head_total
    origin = head + 0.5
    origin_power = origin ** (exponent - 1.0)
    origin_correction = exponent / 24.0 * origin ** (-exponent - 1.0)
    slope = 1.0 - exponent
    ranks = np.empty(uniforms.size, dtype=np.int64)
    for i in range(uniforms.size):
        target = uniforms[i] * total
        if target < head_total or n == head:
            position = guide[min(np.int64(target * slices_per_unit), head - 1)]
            while position < head - 1 and head_sums[position] <= target:
                position += 1
            ranks[i] = position + 1
            continue
        scaled = (target - head_total + origin_correction) * origin_power
        log_ratio = scaled if abs(slope) < 1e-300 else math.log1p(slope * scaled) / slope
        end = origin * math.exp(log_ratio) - 0.5
        rank = np.int64(math.floor(end)) + 1
        if abs(end - np.rint(end)) < _BOUNDARY_RANKS + 64.0 * _EPSILON * end:
            rank = np.int64(np.rint(end))
            while rank > head + 1 and _sum_at(rank - 1, exponent, head_sums) > target:
                rank -= 1
            while rank < n and _sum_at(rank, exponent, head_sums) <= target:
                rank += 1
        ranks[i] = min(max(rank, head + 1), n)
    return ranks
