"""Random numbers by position: the n-th number of a stream is computed without the ones before it."""

# mypy: allow-untyped-decorators

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

import dovetail.kernels  # noqa: F401 -- chooses where compiled code is kept; must come first

__all__ = ["GOLDEN", "splitmix", "stream_key", "uniform_at", "uniforms_at"]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TO_UNIT = 2.0**-53


@numba.njit(cache=True)
def splitmix(value: Any) -> Any:
    """Mix 64 bits (splitmix64's output function)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@numba.njit(cache=True)
def uniform_at(key: Any, position: Any) -> Any:
    """The number in [0, 1) at one position of the stream of a key."""
    bits = splitmix(key + np.uint64(position) * GOLDEN)
    return np.float64(bits >> np.uint64(11)) * _TO_UNIT


@numba.njit(cache=True)
def _uniforms(key: Any, first: Any, count: Any) -> Any:
    numbers = np.empty(count, dtype=np.float64)
    for i in range(count):
        numbers[i] = uniform_at(key, first + i)
    return numbers


def stream_key(*parts: int) -> np.uint64:
    """The key of an independent stream of numbers for every combination of parts, one of them a seed."""
    words = np.random.SeedSequence([part & 0xFFFF_FFFF_FFFF_FFFF for part in parts]).generate_state(1, np.uint64)
    return np.uint64(words[0])


def uniforms_at(key: np.uint64, first: int, count: int) -> NDArray[np.float64]:
    """The numbers at `count` positions starting at `first`."""
    # Wrap-around is intended; numpy warns of it if the functions are not compiled.
    with np.errstate(over="ignore"):
        numbers: NDArray[np.float64] = _uniforms(key, first, count)
    return numbers
