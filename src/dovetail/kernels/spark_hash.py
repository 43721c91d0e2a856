"""Spark's ``xxhash64``, column by column, bit-identical to the JVM.

Spark chains its hash over columns: the hash of one column is the seed of the next, the first seed is 42, and a NULL
leaves the seed unchanged. Each function takes the running seeds of all rows (``uint64``) and updates them in place.
The widths follow Spark: bytes, shorts, ints, dates, booleans and floats hash as 32-bit integers; longs, timestamps,
doubles and decimals of at most 18 digits as 64-bit integers; strings, binaries and wider decimals as bytes.
"""

from typing import Any

import numba as nb
import numpy as np
import numpy.typing as npt

SEED = 42

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)

_11, _12, _18, _7, _1 = np.uint64(11), np.uint64(12), np.uint64(18), np.uint64(7), np.uint64(1)
_23, _27, _29, _31, _32, _33 = (np.uint64(n) for n in (23, 27, 29, 31, 32, 33))
_64 = np.uint64(64)

Seeds = npt.NDArray[np.uint64]
Valid = npt.NDArray[np.bool_]


@nb.njit(cache=True, inline="always")
def _rotl(x: Any, r: Any) -> Any:
    return (x << r) | (x >> (_64 - r))


@nb.njit(cache=True, inline="always")
def _avalanche(h: Any) -> Any:
    h ^= h >> _33
    h *= _P2
    h ^= h >> _29
    h *= _P3
    return h ^ (h >> _32)


@nb.njit(cache=True, inline="always")
def _round(acc: Any, word: Any) -> Any:
    return _rotl(acc + word * _P2, _31) * _P1


@nb.njit(cache=True, inline="always")
def _hash_word32(word: Any, seed: Any) -> Any:
    h = seed + _P5 + np.uint64(4)
    h ^= word * _P1
    return _avalanche(_rotl(h, _23) * _P2 + _P3)


@nb.njit(cache=True, inline="always")
def _hash_word64(word: Any, seed: Any) -> Any:
    h = seed + _P5 + np.uint64(8)
    h ^= _rotl(word * _P2, _31) * _P1
    return _avalanche(_rotl(h, _27) * _P1 + _P4)


@nb.njit(cache=True, inline="always")
def _read_le(data: Any, at: Any, width: Any) -> Any:
    word = np.uint64(0)
    for i in range(width):
        word |= np.uint64(data[at + i]) << np.uint64(8 * i)
    return word


@nb.njit(cache=True)
def _hash_bytes(data: Any, start: Any, length: Any, seed: Any) -> Any:
    at, end = start, start + length
    if length >= 32:
        v1, v2, v3, v4 = seed + _P1 + _P2, seed + _P2, seed, seed - _P1
        while at + 32 <= end:
            v1 = _round(v1, _read_le(data, at, 8))
            v2 = _round(v2, _read_le(data, at + 8, 8))
            v3 = _round(v3, _read_le(data, at + 16, 8))
            v4 = _round(v4, _read_le(data, at + 24, 8))
            at += 32
        h = _rotl(v1, _1) + _rotl(v2, _7) + _rotl(v3, _12) + _rotl(v4, _18)
        for v in (v1, v2, v3, v4):
            h = (h ^ _round(np.uint64(0), v)) * _P1 + _P4
    else:
        h = seed + _P5
    h += np.uint64(length)
    while at + 8 <= end:
        h = _rotl(h ^ _round(np.uint64(0), _read_le(data, at, 8)), _27) * _P1 + _P4
        at += 8
    if at + 4 <= end:
        h = _rotl(h ^ (_read_le(data, at, 4) * _P1), _23) * _P2 + _P3
        at += 4
    while at < end:
        h = _rotl(h ^ (np.uint64(data[at]) * _P5), _11) * _P1
        at += 1
    return _avalanche(h)


@nb.njit(cache=True)
def _fold_words32(words: Any, valid: Any, seeds: Any) -> None:
    for i in range(len(words)):
        if valid[i]:
            seeds[i] = _hash_word32(np.uint64(words[i]), seeds[i])


@nb.njit(cache=True)
def _fold_words64(words: Any, valid: Any, seeds: Any) -> None:
    for i in range(len(words)):
        if valid[i]:
            seeds[i] = _hash_word64(words[i], seeds[i])


@nb.njit(cache=True)
def _fold_bytes(data: Any, offsets: Any, valid: Any, seeds: Any) -> None:
    for i in range(len(seeds)):
        if valid[i]:
            seeds[i] = _hash_bytes(data, offsets[i], offsets[i + 1] - offsets[i], seeds[i])


@nb.njit(cache=True)
def _fold_wide_decimals(values: Any, valid: Any, seeds: Any) -> None:
    # Java hashes BigInteger.toByteArray(): big-endian two's complement without redundant sign bytes.
    big_endian = np.empty(16, np.uint8)
    for i in range(len(seeds)):
        if not valid[i]:
            continue
        for j in range(16):
            big_endian[j] = values[i, 15 - j]
        start = 0
        while start < 15 and (
            (big_endian[start] == 0 and big_endian[start + 1] < 128)
            or (big_endian[start] == 255 and big_endian[start + 1] >= 128)
        ):
            start += 1
        seeds[i] = _hash_bytes(big_endian, start, 16 - start, seeds[i])


def new_seeds(rows: int) -> Seeds:
    """The initial seeds, before any column."""
    return np.full(rows, SEED, np.uint64)


def fold_int32(values: npt.NDArray[np.int32], valid: Valid, seeds: Seeds) -> None:
    """Fold a column that Spark hashes as a 32-bit integer into ``seeds``."""
    with np.errstate(over="ignore"):
        _fold_words32(np.ascontiguousarray(values, np.int32).view(np.uint32), valid, seeds)


def fold_int64(values: npt.NDArray[np.int64], valid: Valid, seeds: Seeds) -> None:
    """Fold a column that Spark hashes as a 64-bit integer into ``seeds``."""
    with np.errstate(over="ignore"):
        _fold_words64(np.ascontiguousarray(values, np.int64).view(np.uint64), valid, seeds)


def fold_bytes(data: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int32], valid: Valid, seeds: Seeds) -> None:
    """Fold a column of byte strings, given as Arrow's offsets and data, into ``seeds``."""
    with np.errstate(over="ignore"):
        _fold_bytes(data, offsets, valid, seeds)


def fold_wide_decimals(values: npt.NDArray[np.uint8], valid: Valid, seeds: Seeds) -> None:
    """Fold decimals of more than 18 digits, given as rows of 16 little-endian bytes, into ``seeds``."""
    with np.errstate(over="ignore"):
        _fold_wide_decimals(values, valid, seeds)


def shard_of_codes(codes: npt.NDArray[np.int64], shards: int) -> npt.NDArray[np.int32]:
    """``pmod(xxhash64(code), shards)``, as the Spark plan computes it."""
    hashes = new_seeds(len(codes))
    fold_int64(codes, np.ones(len(codes), np.bool_), hashes)
    return np.mod(hashes.view(np.int64), np.int64(shards)).astype(np.int32)
