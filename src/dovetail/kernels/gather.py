"""Copying column values by row number: from plain columns, from ring columns, and from an arena of bytes.

Operators keep the columns of waiting stream tuples in arrays as long as a `MultiMap`'s ring, and the tuple with
sequence number ``seq`` at ``seq % ring_size``. Values are copied as bits, so any dtype of 1, 2, 4, 8 or 16 bytes will
do: integers, floats, dates, decimals as ``V16``.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from dovetail.kernels._arrays import Int32Array, Int64Array

AnyArray = npt.NDArray[Any]
Uint8Array = npt.NDArray[np.uint8]

# One type per width keeps the number of compiled variants small. Copying a complex number keeps all 128 bits.
_UNIT_OF_WIDTH = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


@njit(cache=True)
def _gather(source: Any, indexes: Any, out: Any) -> Any:
    """Copy source[indexes] and give -1, or stop at the first index outside the source and give where it is."""
    for i in range(indexes.size):
        index = indexes[i]
        if index < 0 or index >= source.size:
            return i
        out[i] = source[index]
    return -1


@njit(cache=True)
def _read_ring(column: Any, seqs: Any, out: Any) -> None:
    for i in range(seqs.size):
        out[i] = column[seqs[i] % column.size]


@njit(cache=True)
def _write_ring(column: Any, seqs: Any, values: Any) -> None:
    for i in range(seqs.size):
        column[seqs[i] % column.size] = values[i]


@njit(cache=True)
def _gather_bytes(arena: Any, starts: Any, offsets: Any, out: Any) -> None:
    for i in range(starts.size):
        start = starts[i]
        first = offsets[i]
        for j in range(offsets[i + 1] - first):
            out[first + j] = arena[start + j]


def gather_fixed(source: AnyArray, indexes: Int32Array | Int64Array, out: AnyArray | None = None) -> AnyArray:
    """Give ``source[indexes]``, written to `out` if there is one.

    Raises
    ------
    IndexError
        If an index lies outside the source; `out` may then have been written in part.

    Examples
    --------
    >>> import numpy as np
    >>> gather_fixed(np.array([1.5, 2.5, 3.5]), np.array([2, 0])).tolist()
    [3.5, 1.5]
    """
    out = _output_like(source, indexes.size, out)
    bad = int(_gather(_as_units(source), indexes, _as_units(out)))
    if bad >= 0:
        raise IndexError(f"Row {int(indexes[bad])} lies outside a column of {source.size:,} rows.")
    return out


def read_ring(column: AnyArray, seqs: Int64Array, out: AnyArray | None = None) -> AnyArray:
    """Give the values of a ring column at sequence numbers, which are taken modulo its length.

    Examples
    --------
    >>> import numpy as np
    >>> read_ring(np.array([10, 11, 12]), np.array([3, 5])).tolist()
    [10, 12]
    """
    out = _output_like(column, seqs.size, out)
    _read_ring(_as_units(column), _require_natural(seqs), _as_units(out))
    return out


def write_ring(column: AnyArray, seqs: Int64Array, values: AnyArray) -> None:
    """Write values into a ring column at sequence numbers, which are taken modulo its length.

    Examples
    --------
    >>> import numpy as np
    >>> column = np.zeros(3, dtype=np.int64)
    >>> write_ring(column, np.array([2, 3]), np.array([7, 8]))
    >>> column.tolist()
    [8, 0, 7]
    """
    if values.dtype != column.dtype or values.shape != seqs.shape:
        raise ValueError(
            f"{seqs.size:,} values of type {column.dtype} are needed, not {values.size:,} of type {values.dtype}."
        )
    _write_ring(_as_units(column), _require_natural(seqs), _as_units(values))


def gather_bytes(arena: Uint8Array, starts: Int64Array, lengths: Int32Array) -> tuple[Uint8Array, Int32Array]:
    """Copy values of any length out of an arena and pack them as Arrow does.

    Parameters
    ----------
    arena
        The bytes.
    starts, lengths
        Where each value begins in the arena, and its bytes.

    Returns
    -------
    data, offsets
        The values end to end; value i is ``data[offsets[i] : offsets[i + 1]]``.

    Raises
    ------
    IndexError
        If a value lies outside the arena.
    OverflowError
        If the values have more than 2**31 - 1 bytes together, which int32 offsets cannot say; take fewer at once.

    Examples
    --------
    >>> import numpy as np
    >>> arena = np.frombuffer(b"onetwothree", dtype=np.uint8)
    >>> data, offsets = gather_bytes(arena, np.array([6, 0]), np.array([5, 3], dtype=np.int32))
    >>> data.tobytes(), offsets.tolist()
    (b'threeone', [0, 5, 8])
    """
    if starts.shape != lengths.shape:
        raise ValueError(f"{starts.size:,} starts and {lengths.size:,} lengths do not belong together.")
    if starts.size and (starts.min() < 0 or lengths.min() < 0 or int((starts + lengths).max()) > arena.size):
        raise IndexError(f"A value lies outside an arena of {arena.size:,} bytes.")
    wide_offsets = np.zeros(lengths.size + 1, dtype=np.int64)
    np.cumsum(lengths, out=wide_offsets[1:], dtype=np.int64)
    if wide_offsets[-1] > np.iinfo(np.int32).max:
        raise OverflowError(f"{int(wide_offsets[-1]):,} bytes are too many for one array; take fewer values at once.")
    offsets = wide_offsets.astype(np.int32)
    data = np.empty(int(wide_offsets[-1]), dtype=np.uint8)
    _gather_bytes(arena, starts, offsets, data)
    return data, offsets


def _as_units(array: AnyArray) -> AnyArray:
    unit = _UNIT_OF_WIDTH.get(array.dtype.itemsize)
    if unit is None or array.ndim != 1 or not array.flags.c_contiguous or array.dtype.hasobject:
        raise TypeError(
            f"A column must be a contiguous array of one dimension with values of 1, 2, 4, 8 or 16 bytes, "
            f"not {array.ndim}-dimensional {array.dtype}."
        )
    return array.view(unit)


def _output_like(source: AnyArray, size: int, out: AnyArray | None) -> AnyArray:
    if out is None:
        return np.empty(size, dtype=source.dtype)
    if out.dtype != source.dtype or out.shape != (size,):
        raise ValueError(f"The output must be {size:,} values of type {source.dtype}, not {out.shape} {out.dtype}.")
    return out


def _require_natural(seqs: Int64Array) -> Int64Array:
    if seqs.size and seqs.min() < 0:
        raise IndexError(f"Sequence numbers are not negative, as {int(seqs.min())} is.")
    return seqs
