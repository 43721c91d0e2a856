"""Reading a range of rows of a record batch in a file, touching only the bytes of those rows.

A record batch stores each column separately, so a range of rows is one piece per buffer. The mapped batch gives the
address of each buffer; the pieces are read with ``pread`` and reassembled.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

ReadAt = Callable[[int, int], pa.Buffer]
"""Bytes at (address in the mapping, length)."""


def read_rows(mapped: pa.Array, start: int, stop: int, read_at: ReadAt) -> pa.Array:
    """Return rows ``[start, stop)`` of ``mapped``, read with ``read_at`` instead of through the mapping."""
    # Bitmaps can only be sliced at whole bytes, so the slice starts at the multiple of eight before `start`.
    cut = start & ~7
    return _read(mapped, cut, stop, read_at).slice(start - cut)


def _read(mapped: pa.Array, start: int, stop: int, read_at: ReadAt) -> pa.Array:
    kind, rows = mapped.type, stop - start
    if pa.types.is_null(kind):
        return pa.nulls(rows)
    buffers = mapped.buffers()
    bitmap = None
    if mapped.null_count:
        bitmap = read_at(buffers[0].address + start // 8, (rows + 7) // 8)
    if pa.types.is_struct(kind):
        children = [_read(mapped.field(i), start, stop, read_at) for i in range(kind.num_fields)]
        if not children:
            return pa.Array.from_buffers(kind, rows, [bitmap])
        return pa.StructArray.from_buffers(kind, rows, [bitmap], children=children)
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        offsets = _offsets(buffers[1], start, rows, read_at)
        first, last = int(offsets[0]), int(offsets[-1])
        cut = first & ~7
        child = _read(mapped.values, cut, last, read_at)
        return pa.Array.from_buffers(kind, rows, [bitmap, pa.py_buffer(offsets - np.int32(cut))], children=[child])
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        offsets = _offsets(buffers[1], start, rows, read_at)
        first, last = int(offsets[0]), int(offsets[-1])
        data = read_at(buffers[2].address + first, last - first) if last > first else pa.py_buffer(b"")
        return pa.Array.from_buffers(kind, rows, [bitmap, pa.py_buffer(offsets - offsets[0]), data])
    if pa.types.is_boolean(kind):
        return pa.Array.from_buffers(kind, rows, [bitmap, read_at(buffers[1].address + start // 8, (rows + 7) // 8)])
    width = kind.bit_width // 8
    return pa.Array.from_buffers(kind, rows, [bitmap, read_at(buffers[1].address + start * width, rows * width)])


def _offsets(buffer: pa.Buffer, start: int, rows: int, read_at: ReadAt) -> npt.NDArray[np.int32]:
    return np.frombuffer(read_at(buffer.address + start * 4, (rows + 1) * 4), np.int32)
