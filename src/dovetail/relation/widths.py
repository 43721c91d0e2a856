"""How many bytes single rows have, from offsets alone: no value is read.

Batches are cut by bytes before they are made. A hot row of a megabyte, taken a thousand times, must not be found out by
an overflow.
"""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["fixed_row_bytes", "row_widths", "widest_row", "widest_values"]

Int64Array = npt.NDArray[np.int64]


def fixed_row_bytes(schema: pa.Schema) -> int | None:
    """Bytes of a row if all rows have the same; None if a column has values of different lengths."""
    widths = [_fixed_bytes(column.type) for column in schema]
    return None if None in widths else sum(width for width in widths if width is not None)


def row_widths(batch: pa.RecordBatch, rows: Int64Array) -> Int64Array:
    """Bytes of some rows of a batch.

    Examples
    --------
    >>> batch = pa.record_batch({"k": [1, 2], "text": ["a", "bcd"], "tags": [["x"], []]})
    >>> row_widths(batch, np.array([0, 1])).tolist()
    [22, 19]
    """
    widths = np.zeros(rows.size, np.int64)
    for column in batch.columns:
        widths += _bytes_between(column, rows, rows + 1)
    return widths


def widest_row(batch: pa.RecordBatch) -> int:
    """Bytes of the widest row of a batch, at most: the widest values of its columns need not be in one row."""
    fixed = fixed_row_bytes(batch.schema)
    if fixed is not None or batch.num_rows == 0:
        return fixed or 0
    return sum(widest_values(batch))


def widest_values(batch: pa.RecordBatch) -> list[int]:
    """Bytes of the widest value of each column of a batch that has rows.

    Examples
    --------
    >>> widest_values(pa.record_batch({"k": [1, 2], "text": ["a", "bcd"]}))
    [8, 7]
    """
    rows = np.arange(batch.num_rows)
    fixed = [_fixed_bytes(column.type) for column in batch.columns]
    return [
        int(_bytes_between(column, rows, rows + 1).max()) if width is None else width
        for column, width in zip(batch.columns, fixed, strict=True)
    ]


@cache
def _fixed_bytes(kind: pa.DataType) -> int | None:
    """Bytes of a value; None where values have different lengths."""
    t = pa.types
    if t.is_null(kind):
        return 0
    if t.is_dictionary(kind):
        return _fixed_bytes(kind.index_type)
    if t.is_fixed_size_list(kind):
        inner = _fixed_bytes(kind.value_type)
        return None if inner is None else inner * kind.list_size
    if t.is_struct(kind):
        inner_widths = [_fixed_bytes(kind.field(number).type) for number in range(kind.num_fields)]
        return None if None in inner_widths else sum(width for width in inner_widths if width is not None)
    try:
        return max(1, int(kind.bit_width) // 8)
    except ValueError:
        return None


def _bytes_between(column: pa.Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
    """Bytes of the elements ``[starts[i], stops[i])`` of a column."""
    t, kind = pa.types, column.type
    fixed = _fixed_bytes(kind)
    if fixed is not None:
        return np.asarray((stops - starts) * fixed, np.int64)
    if t.is_string(kind) or t.is_binary(kind) or t.is_large_string(kind) or t.is_large_binary(kind):
        offset_type = np.int64 if t.is_large_string(kind) or t.is_large_binary(kind) else np.int32
        offsets: npt.NDArray[Any] = np.frombuffer(column.buffers()[1], offset_type)[column.offset :]
        ends = offsets[stops].astype(np.int64) - offsets[starts]
        return np.asarray(ends + (stops - starts) * offsets.itemsize, np.int64)
    if t.is_map(kind) or t.is_list(kind) or t.is_large_list(kind):
        offsets = column.offsets.to_numpy()
        first, last = offsets[starts].astype(np.int64), offsets[stops].astype(np.int64)
        children = (column.keys, column.items) if t.is_map(kind) else (column.values,)
        inner = sum((_bytes_between(child, first, last) for child in children), start=np.zeros(starts.size, np.int64))
        return np.asarray(inner + (stops - starts) * offsets.itemsize, np.int64)
    if t.is_struct(kind):
        fields = [column.field(number) for number in range(kind.num_fields)]
        return sum((_bytes_between(field, starts, stops) for field in fields), start=np.zeros(starts.size, np.int64))
    if t.is_fixed_size_list(kind):
        return _bytes_between(column.values, starts * kind.list_size, stops * kind.list_size)
    # A layout without offsets of its own, such as views: the mean, rounded up.
    return np.asarray((stops - starts) * (int(column.nbytes) // max(1, len(column)) + 1), np.int64)
