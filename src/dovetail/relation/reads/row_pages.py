"""Which pages of a rows file hold some rows: a table of where each buffer of each record batch begins.

Values of variable length are found in two steps: the pages of their bounds first, which must be there and verified
before they tell the pages of the values. Lists and maps are taken whole, per record batch.
"""

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.kernels.pages import PAGE_BYTES, Pages, find_row_pages, find_value_pages

__all__ = ["RowPages"]

Groups = tuple[Int64Array, Int64Array]
_PAGE_BITS = 8 * PAGE_BYTES


class RowPages:
    """The places of the buffers of a segment's record batches, entered as they are opened."""

    def __init__(self, mapped: pa.Buffer, batches: int) -> None:
        self._base = mapped.address
        self._bounds = np.frombuffer(mapped, np.dtype("<i4"), count=mapped.size // 4)
        self._batches = batches
        self._strides = self._lengths = np.empty(0, np.int64)
        self._places = self._bound_places = self._value_places = np.empty((batches, 0), np.int64)
        self._whole: list[list[tuple[int, int]]] = [[] for _ in range(batches)]
        self._is_known = False

    def enter(self, number: int, batch: pa.RecordBatch) -> None:
        """Enter the places of a record batch that lies in the mapping."""
        places = _Places(self._base)
        for column in batch.columns:
            places.add(column)
        if not self._is_known:
            self._is_known = True
            self._strides, self._lengths = np.array(places.shapes, np.int64).reshape(-1, 2).T.copy()
            self._places = np.full((self._batches, len(places.fixed)), -1, np.int64)
            self._bound_places = np.full((self._batches, len(places.values)), -1, np.int64)
            self._value_places = np.full((self._batches, len(places.values)), -1, np.int64)
        self._places[number] = places.fixed
        self._bound_places[number] = places.bounds
        self._value_places[number] = places.values
        self._whole[number] = places.whole

    @property
    def pages_per_row(self) -> int:
        """The most pages of one row, if no value is longer than a page."""
        return max(1, self._strides.size + self._value_places.shape[1])

    def of_rows(self, groups: Groups, rows: Int64Array) -> Pages:
        """The pages to read first: all but the values of variable length; see `find_row_pages` for the arguments."""
        pages = find_row_pages(groups, rows, self._places, self._strides, self._lengths)
        whole = [place for number in groups[0].tolist() for place in self._whole[number]]
        return _with(pages, whole)

    def of_values(self, groups: Groups, rows: Int64Array) -> Pages:
        """The pages of the values of variable length; those of `of_rows` must have been verified."""
        return find_value_pages(groups, rows, self._bounds, self._bound_places, self._value_places)

    def of_row_range(self, number: int, start: int, stop: int) -> Pages:
        """The pages of rows ``[start, stop)`` of a record batch, all but the values of variable length."""
        places = self._places[number]
        begins = places * 8 + start * self._strides
        ends = places * 8 + (stop - 1) * self._strides + self._lengths - 1
        is_there = places >= 0
        return _with((begins[is_there] // _PAGE_BITS, ends[is_there] // _PAGE_BITS), self._whole[number])

    def of_value_range(self, number: int, start: int, stop: int) -> Pages:
        """The pages of their values of variable length; those of `of_row_range` must have been verified."""
        values = self._value_places[number]
        is_there = values >= 0
        values, bounds = values[is_there], self._bound_places[number][is_there] // 4
        begins = values + self._bounds[bounds + start]
        ends = values + self._bounds[bounds + stop]
        has_bytes = begins < ends
        return begins[has_bytes] // PAGE_BYTES, (ends[has_bytes] - 1) // PAGE_BYTES


class _Places:
    """Collects the places of one record batch."""

    def __init__(self, base: int) -> None:
        self._base = base
        self.shapes: list[tuple[int, int]] = []  # stride and length of an element, in bits
        self.fixed: list[int] = []
        self.bounds: list[int] = []
        self.values: list[int] = []
        self.whole: list[tuple[int, int]] = []

    def add(self, column: pa.Array) -> None:
        t, kind, buffers = pa.types, column.type, column.buffers()
        if t.is_null(kind):
            return
        self._add_fixed(buffers[0], 1, 1)
        if t.is_struct(kind):
            for number in range(kind.num_fields):
                self.add(column.field(number))
        elif t.is_list(kind) or t.is_map(kind):
            self.whole += [
                (buffer.address - self._base, buffer.size)
                for buffer in buffers[1:]
                if buffer is not None and buffer.size
            ]
        elif t.is_string(kind) or t.is_binary(kind):
            self._add_fixed(buffers[1], 32, 64)
            self.bounds.append(self._place(buffers[1]))
            self.values.append(self._place(buffers[2]))
        else:
            self._add_fixed(buffers[1], kind.bit_width, kind.bit_width)

    def _add_fixed(self, buffer: pa.Buffer | None, stride: int, length: int) -> None:
        self.shapes.append((stride, length))
        self.fixed.append(self._place(buffer))

    def _place(self, buffer: pa.Buffer | None) -> int:
        return -1 if buffer is None or buffer.size == 0 else buffer.address - self._base


def _with(pages: Pages, whole: list[tuple[int, int]]) -> Pages:
    """Add the pages of whole buffers."""
    if not whole:
        return pages
    starts, sizes = np.array(whole, np.int64).T
    firsts, lasts = starts // PAGE_BYTES, (starts + sizes - 1) // PAGE_BYTES
    return np.concatenate([pages[0], firsts]), np.concatenate([pages[1], lasts])
