"""Columns of numbers, moments and dates as integers."""

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int64Array

__all__ = ["integers_of"]


def integers_of(column: pa.Array) -> tuple[Int64Array, BoolArray]:
    """The integers behind a column (zero where NULL), and a mask of the values that are not NULL.

    Examples
    --------
    >>> [part.tolist() for part in integers_of(pa.array([3, None], pa.int16()))]
    [[3, 0], [True, False]]
    """
    width = column.type.bit_width
    storage = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[width]
    valid: BoolArray = np.ones(len(column), np.bool_)
    if column.null_count:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
    numbers = column.view(storage).fill_null(0).to_numpy(zero_copy_only=False)
    return numbers.astype(np.int64, copy=False), valid
