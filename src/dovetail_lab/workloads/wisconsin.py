"""The relations of the Wisconsin benchmark, with the additional columns that the multi-way paper joins on.

``unique1`` is a permutation of 0..n-1, ``unique2`` is a sequence; ``two``, ``four``, ``ten``, ``twenty`` and the
percentages are remainders of ``unique1``; with three strings of 52 characters a tuple has 264 bytes. The multi-way
paper (Viglas, Naughton, Burger 2003, section 3) joins on more columns of the same kinds: ``unique3`` and up are further
permutations; ``thousand``, ``tenk``, ``tenk1`` and up are columns with that many equally frequent values, independent
of each other.
"""

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dovetail.core.errors import PlanError

__all__ = ["WISCONSIN_COLUMNS", "wisconsin_relation"]

_REMAINDERS = {
    "two": 2,
    "four": 4,
    "ten": 10,
    "twenty": 20,
    "onePercent": 100,
    "tenPercent": 10,
    "twentyPercent": 5,
    "fiftyPercent": 2,
}
_STRINGS = ("stringu1", "stringu2", "string4")
_STRING_BYTES = 52
WISCONSIN_COLUMNS = ("unique1", "unique2", *_REMAINDERS, "evenOnePercent", "oddOnePercent", *_STRINGS)
_VALUES = {"thousand": 1_000, "tenk": 10_000}


def wisconsin_relation(
    rows: int, columns: Sequence[str] = WISCONSIN_COLUMNS, *, seed: int = 0, values: int | None = None
) -> pa.Table:
    """Generate a relation.

    Parameters
    ----------
    rows
        The number of tuples.
    columns
        The columns, by the benchmark's names; also ``unique<i>``, ``thousand<i>`` and ``tenk<i>``.
    seed
        The seed of the permutations. Relations with different seeds are independent.
    values
        The number of values of ``thousand`` and ``tenk`` columns instead of 1,000 and 10,000: for smaller relations.

    Examples
    --------
    >>> table = wisconsin_relation(1000, ["unique1", "ten", "tenk6", "stringu1"], seed=1)
    >>> sorted(table["unique1"].to_pylist()) == list(range(1000)), table["ten"][0].as_py() < 10
    (True, True)
    >>> len(table["stringu1"][0].as_py())
    52
    """
    if rows < 0:
        raise PlanError(f"rows={rows}: the number of rows cannot be negative.")
    unique1 = _permutation(rows, seed, 1)
    return pa.table({name: _column(name, rows, unique1, seed, values) for name in columns})


def _column(name: str, rows: int, unique1: NDArray[np.int64], seed: int, values: int | None) -> pa.Array:
    if name in _REMAINDERS:
        return pa.array(unique1 % _REMAINDERS[name])
    if name in ("evenOnePercent", "oddOnePercent"):
        return pa.array(unique1 % 100 * 2 + (name == "oddOnePercent"))
    if name in _STRINGS:
        return _strings(name, rows, unique1)
    found = re.fullmatch(r"(unique|thousand|tenk)(\d*)", name)
    if found is None or name == "unique":
        raise PlanError(
            f"{name!r} is not a column of the Wisconsin relations.",
            hint=f"They have {', '.join(WISCONSIN_COLUMNS)}, and unique<i>, thousand<i>, tenk<i>.",
        )
    kind, number = found[1], int(found[2] or 0)
    if name == "unique1":
        return pa.array(unique1)
    if name == "unique2":
        return pa.array(np.arange(rows, dtype=np.int64))
    if kind == "unique":
        return pa.array(_permutation(rows, seed, number))
    kind_number = 1_000 if kind == "thousand" else 2_000
    return pa.array(_permutation(rows, seed, kind_number + number) % (values or _VALUES[kind]))


def _permutation(rows: int, seed: int, number: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, 0x3157, number]).permutation(rows)


def _strings(name: str, rows: int, unique1: NDArray[np.int64]) -> pa.Array:
    """Seven letters that depend on the row and 45 that do not; string4 repeats four values."""
    numbers = unique1 if name == "stringu1" else np.arange(rows, dtype=np.int64)
    letters = np.full((rows, _STRING_BYTES), ord("x"), dtype=np.uint8)
    if name == "string4":
        letters[:, :4] = (ord("A") + np.array([0, 7, 14, 21]))[numbers % 4][:, None]
    else:
        for place in range(7):
            letters[:, 6 - place] = ord("A") + numbers // 26**place % 26
    offsets = np.arange(rows + 1, dtype=np.int32) * np.int32(_STRING_BYTES)
    return pa.StringArray.from_buffers(rows, pa.py_buffer(offsets), pa.py_buffer(letters.reshape(-1)))
