"""The hash that spreads join codes over the slots of the open-addressing tables.

Codes are often consecutive integers, and a shard has only codes that agree in another hash (Spark's xxhash64). The
tables therefore need their own mixer, in which every input bit affects every output bit.

Setting ``DOVETAIL_FORCE_BUCKETS=n`` before the import maps all codes to n hash values. This must not change any
result, only the time taken. The test suites use it to force collisions in every probe, insertion and deletion.
"""

import os
from typing import Any

import numba
import numpy as np

from dovetail.kernels._cache import FORCE_BUCKETS_VARIABLE

FORCE_BUCKETS: int = int(os.environ.get(FORCE_BUCKETS_VARIABLE) or 0)
if FORCE_BUCKETS < 0:
    raise ValueError(f"{FORCE_BUCKETS_VARIABLE} must be a positive number of hash values, not {FORCE_BUCKETS}.")

_MASK64 = (1 << 64) - 1
_FACTOR_1 = 0xFF51AFD7ED558CCD
_FACTOR_2 = 0xC4CEB9FE1A85EC53


def _mix64_in_python(code: int) -> int:
    """Compute the mixer on Python integers, which do not overflow: used when the JIT is off."""
    bits = int(code) & _MASK64
    bits ^= bits >> 33
    bits = (bits * _FACTOR_1) & _MASK64
    bits ^= bits >> 33
    bits = (bits * _FACTOR_2) & _MASK64
    return bits ^ (bits >> 33)


if numba.config.DISABLE_JIT:
    # Shifts, products and comparisons of numpy's unsigned scalars with Python integers overflow with a
    # warning, so without the compiler the same arithmetic runs on Python integers.

    def mix64(code: Any) -> Any:
        """Spread a code over 64 bits: the finaliser of MurmurHash3."""
        bits = _mix64_in_python(code)
        if FORCE_BUCKETS:
            return _mix64_in_python(bits % FORCE_BUCKETS)
        return bits

    def home_slot(code: Any, slot_count: Any) -> Any:
        """Return the slot at which the search for a code starts: a number in [0, slot_count)."""
        return ((mix64(code) >> 32) * int(slot_count)) >> 32

else:
    _SHIFT_32 = np.uint64(32)
    _SHIFT_33 = np.uint64(33)
    _UINT_FACTOR_1 = np.uint64(_FACTOR_1)
    _UINT_FACTOR_2 = np.uint64(_FACTOR_2)
    _UINT_BUCKETS = np.uint64(FORCE_BUCKETS)

    @numba.njit(inline="always")
    def _finalise(bits: Any) -> Any:
        bits ^= bits >> _SHIFT_33
        bits *= _UINT_FACTOR_1
        bits ^= bits >> _SHIFT_33
        bits *= _UINT_FACTOR_2
        return bits ^ (bits >> _SHIFT_33)

    @numba.njit(inline="always")
    def mix64(code: Any) -> Any:
        """Spread a code over 64 bits: the finaliser of MurmurHash3."""
        bits = _finalise(np.uint64(code))
        if FORCE_BUCKETS:
            return _finalise(bits % _UINT_BUCKETS)
        return bits

    @numba.njit(inline="always")
    def home_slot(code: Any, slot_count: Any) -> Any:
        """Return the slot at which the search for a code starts: a number in [0, slot_count).

        The upper half of the hash is scaled to the range by a multiplication, so the number of slots may be any number
        below 2**32, not only a power of two.
        """
        # Both factors have 32 bits, which vector units multiply faster than 64.
        return np.int64(((mix64(code) >> _SHIFT_32) * np.uint64(np.uint32(slot_count))) >> _SHIFT_32)
