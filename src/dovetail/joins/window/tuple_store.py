"""Stream tuples at ring positions, in the form in which scattered tuples are gathered fastest.

Every step of a join gathers tuples from all over the window. Columns of fixed width are therefore plain arrays indexed
by ring position: a gather is one pass per column. Other columns (strings, binaries, nested ones) stay Arrow arrays in
few *pages*: each page is at least twice as long as the next newer one, so their number is logarithmic, and a page is
dropped with its last tuple.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.core.arrays import Int32Array, Int64Array, UInt8Array
from dovetail.core.errors import InternalError
from dovetail.relation.widths import widest_row

__all__ = ["TupleStore", "copy_of", "spread"]

Positions = Int64Array | Int32Array
_PAGED_ENTRY_BYTES = 8
_GUESSED_PAGED_BYTES = 24
_WIDE_BYTES = 4096  # values of this mean width are gathered as slices: a slice's few hundred bytes do not matter


class TupleStore:
    """The columns of stream tuples, addressed by ring position."""

    def __init__(self, schema: pa.Schema, ring_size: int) -> None:
        self.schema = schema
        self._ring_size = ring_size
        self._fixed: dict[int, _FixedColumn] = {}
        self._paged: dict[int, _PagedColumn] = {}
        for index, column in enumerate(schema):
            if is_fixed_width(column.type):
                data = np.empty(ring_size, _storage_dtype(column.type))
                plane, bit = divmod(len(self._fixed), 8)
                is_plain = data.dtype.kind == "u" and not pa.types.is_boolean(column.type)
                self._fixed[index] = _FixedColumn(column.type, data, plane, bit, is_plain)
            else:
                self._paged[index] = _PagedColumn(column.type, ring_size)
        # One bit per fixed column and tuple, eight columns per plane.
        self._null_planes = np.zeros((_plane_count(len(self._fixed)), ring_size), np.uint8)
        self._has_nulls = False  # until the first NULL, flags need not be read

    @staticmethod
    def fixed_bytes_per_position(schema: pa.Schema) -> int:
        """Bytes per ring position, whether or not a tuple is there."""
        fixed = [c.type for c in schema if is_fixed_width(c.type)]
        widths = sum(_storage_dtype(kind).itemsize for kind in fixed)
        return widths + _plane_count(len(fixed)) + _PAGED_ENTRY_BYTES * (len(schema) - len(fixed))

    @staticmethod
    def guess_paged_bytes(schema: pa.Schema) -> int:
        """The expected bytes per tuple of the other columns, before the first tuple."""
        return sum(_GUESSED_PAGED_BYTES for c in schema if not is_fixed_width(c.type))

    @property
    def nbytes(self) -> int:
        fixed = sum(column.data.nbytes for column in self._fixed.values())
        return fixed + self._null_planes.nbytes + sum(column.nbytes for column in self._paged.values())

    @property
    def reclaimable_bytes(self) -> int:
        """The approximate bytes of removed tuples in the pages."""
        return sum(column.reclaimable_bytes for column in self._paged.values())

    @property
    def widest(self) -> int:
        """Upper bound of the bytes of a tuple."""
        fixed = sum(column.data.itemsize for column in self._fixed.values())
        return fixed + sum(column.widest for column in self._paged.values())

    @property
    def widest_gathered(self) -> int:
        """Upper bound of the bytes a tuple takes while it is gathered: paged values may exist twice."""
        return self.widest + sum(column.widest for column in self._paged.values())

    def paged_bytes_of(self, batch: pa.RecordBatch) -> int:
        """How much writing this batch would add."""
        return sum(int(batch.column(index).nbytes) for index in self._paged)

    def merge_bytes(self) -> int:
        """Temporary bytes that the next `tidy` needs, while old and new pages both exist."""
        return max((column.merge_bytes() for column in self._paged.values()), default=0)

    def write(self, positions: Positions | slice, batch: pa.RecordBatch) -> None:
        """Put row i of the batch at ``positions[i]``, where no tuple is; or at the i-th position of a slice."""
        for index, fixed in self._fixed.items():
            column = batch.column(index)
            fixed.data[positions] = fixed_values(column)
            nulls = self._null_planes[fixed.plane]
            if fixed.bit == 0:
                nulls[positions] = 0
            if column.null_count:
                self._has_nulls = True
                nulls[positions] |= _null_bytes(column) << np.uint8(fixed.bit)
        for index, paged in self._paged.items():
            paged.write(positions, batch.column(index))

    def gather(self, positions: Positions, indices: Iterable[int]) -> list[pa.Array]:
        """Columns of the tuples at the positions, in that order."""
        planes: dict[int, UInt8Array | None] = {}
        columns = []
        for index in indices:
            fixed = self._fixed.get(index)
            if fixed is None:
                columns.append(self._paged[index].gather(positions))
                continue
            gathered = fixed.data.take(positions, mode="clip")
            if fixed.is_plain and not self._has_nulls:
                # In small windows a step gathers so few tuples that every call matters.
                columns.append(pa.Array.from_buffers(fixed.kind, gathered.size, [None, pa.py_buffer(gathered)]))
                continue
            if fixed.plane not in planes:
                nulls = self._null_planes[fixed.plane].take(positions, mode="clip")
                planes[fixed.plane] = nulls if nulls.any() else None
            nulls_here = planes[fixed.plane]
            is_null = None if nulls_here is None else (nulls_here >> np.uint8(fixed.bit)) & np.uint8(1)
            columns.append(fixed_array(fixed.kind, gathered, is_null))
        return columns

    def move(self, positions: Positions, ring_size: int) -> None:
        """Change the ring size; the tuple at ``positions[i]`` moves to i, one column at a time."""
        for column in self._fixed.values():
            # The old column is freed before the new one is built.
            column.data = column.data[positions]
            column.data = spread(column.data, ring_size)
        planes = self._null_planes[:, positions]
        self._null_planes = np.zeros((planes.shape[0], ring_size), np.uint8)
        self._null_planes[:, : planes.shape[1]] = planes
        for paged in self._paged.values():
            paged.move(positions, ring_size)
        self._ring_size = ring_size

    def release(self, positions: Positions) -> None:
        """The tuples at these positions are gone."""
        for paged in self._paged.values():
            paged.release(positions)

    def tidy(self) -> None:
        """Merge pages until each is twice as long as the next newer one."""
        for paged in self._paged.values():
            paged.merge()

    def reclaim(self, live_positions: Positions) -> None:
        """Copy the pages without removed tuples; temporarily needs room for the live ones."""
        for paged in self._paged.values():
            paged.compact(live_positions)


def is_fixed_width(kind: pa.DataType) -> bool:
    """Whether values of the type have a fixed number of bits, and so fit a plain array."""
    t = pa.types
    if t.is_nested(kind) or t.is_dictionary(kind) or t.is_null(kind) or isinstance(kind, pa.BaseExtensionType):
        return False
    try:
        return bool(kind.bit_width > 0)
    except ValueError:
        return False


def fixed_values(column: pa.Array) -> npt.NDArray[np.generic]:
    """The values of a fixed-width column; undefined where it is NULL."""
    buffer, dtype = column.buffers()[1], _storage_dtype(column.type)
    if buffer is None or len(column) == 0:
        return np.zeros(len(column), dtype)
    if pa.types.is_boolean(column.type):
        # Only the column's own bytes: it may be a short slice of a long batch.
        first, skipped = divmod(column.offset, 8)
        needed = np.frombuffer(buffer, np.uint8, -(-(skipped + len(column)) // 8), first)
        return np.unpackbits(needed, bitorder="little")[skipped : skipped + len(column)]
    return np.frombuffer(buffer, dtype, len(column), column.offset * dtype.itemsize)


def fixed_array(kind: pa.DataType, values: npt.NDArray[np.generic], is_null: UInt8Array | None) -> pa.Array:
    """An Arrow array over fixed-width values, without a copy."""
    validity = None
    if is_null is not None and is_null.any():
        validity = pa.py_buffer(np.packbits(is_null == 0, bitorder="little"))
    data = np.packbits(values.view(np.uint8), bitorder="little") if pa.types.is_boolean(kind) else values
    # numpy does not export raw-byte dtypes as a buffer that Arrow accepts, so they are passed as bytes.
    return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(data.view(np.uint8))])


def copy_of(column: pa.Array) -> pa.Array:
    """A copy of the column: a slice would keep its whole batch alive."""
    return column.take(pa.array(np.arange(len(column))))


@dataclass(slots=True)
class _FixedColumn:
    """One fixed-width column: its values by position, and the plane and bit of its NULL flags."""

    kind: pa.DataType
    data: npt.NDArray[np.generic]
    plane: int
    bit: int
    is_plain: bool  # whether numpy and Arrow use the same numeric type


@dataclass
class _Page:
    first_row: int
    rows: pa.Array
    live: int

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes)


class _PagedColumn:
    """One column in pages. Rows are numbered in order of arrival; ``_row_at`` has the row number per position."""

    widest = 0  # upper bound of the bytes of a value

    def __init__(self, kind: pa.DataType, ring_size: int) -> None:
        self._kind = kind
        self._row_at = np.zeros(ring_size, np.int64)
        self._pages: list[_Page] = []
        self._next_row = 0
        self._pages_nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._row_at.nbytes + self._pages_nbytes

    @property
    def reclaimable_bytes(self) -> int:
        return sum(p.nbytes * (len(p.rows) - p.live) // max(1, len(p.rows)) for p in self._pages)

    def write(self, positions: Positions | slice, column: pa.Array) -> None:
        if len(column) == 0:
            return
        if not self._pages:
            self.widest = 0
        self.widest = max(self.widest, widest_row(pa.RecordBatch.from_arrays([column], names=["value"])))
        self._row_at[positions] = np.arange(self._next_row, self._next_row + len(column))
        page = _Page(self._next_row, copy_of(column), len(column))
        self._pages.append(page)
        self._pages_nbytes += page.nbytes
        self._next_row += len(column)

    def gather(self, positions: Positions) -> pa.Array:
        rows = self._row_at[positions]
        pages = self._page_of(rows)
        used = np.unique(pages)
        if used.size <= 1:
            if rows.size == 0:
                return pa.nulls(0).cast(self._kind) if not self._pages else self._pages[0].rows.slice(0, 0)
            page = self._pages[int(used[0])]
            return page.rows.take(pa.array(rows - page.first_row))
        if self._pages_nbytes >= _WIDE_BYTES * sum(len(page.rows) for page in self._pages):
            starts = rows - np.array([page.first_row for page in self._pages], np.int64)[pages]
            numbered = zip(pages.tolist(), starts.tolist(), strict=True)
            return pa.concat_arrays([self._pages[number].rows.slice(start, 1) for number, start in numbered])
        parts, taken = [], []
        for number in used.tolist():
            mine = np.flatnonzero(pages == number)
            page = self._pages[number]
            parts.append(page.rows.take(pa.array(rows[mine] - page.first_row)))
            taken.append(mine)
        back = np.empty(rows.size, np.int64)
        back[np.concatenate(taken)] = np.arange(rows.size)
        together = pa.concat_arrays(parts)
        parts.clear()  # two copies at once, not three
        return together.take(pa.array(back))

    def release(self, positions: Positions) -> None:
        pages = self._page_of(self._row_at[positions])
        for number, gone in enumerate(np.bincount(pages, minlength=len(self._pages)).tolist()):
            self._pages[number].live -= gone
            if self._pages[number].live < 0:
                raise InternalError("More tuples left a page of the window than were in it.")
        self._pages = [page for page in self._pages if page.live]
        self._pages_nbytes = sum(page.nbytes for page in self._pages)

    def move(self, positions: Positions, ring_size: int) -> None:
        self._row_at = self._row_at[positions]
        self._row_at = spread(self._row_at, ring_size)

    def merge_bytes(self) -> int:
        return sum(page.nbytes for page in self._pages[self._first_to_merge() :])

    def merge(self) -> None:
        first = self._first_to_merge()
        if first == len(self._pages):
            return
        merged = self._pages[first:]
        # Row numbers may have gaps where a page was dropped; numbering continues from the first page.
        rows, shift = pa.concat_arrays([page.rows for page in merged]), 0
        starts = [merged[0].first_row]
        for page in merged:
            starts.append(starts[-1] + len(page.rows))
            shift = max(shift, page.first_row - starts[-2])
        if shift:
            self._renumber(merged, starts)
        self._pages[first:] = [_Page(starts[0], rows, sum(page.live for page in merged))]
        self._pages_nbytes = sum(page.nbytes for page in self._pages)

    def compact(self, live_positions: Positions) -> None:
        if not self._pages or all(page.live == len(page.rows) for page in self._pages):
            return
        rows = self._row_at[live_positions]
        order = np.argsort(rows, kind="stable")
        ascending = live_positions[order]
        kept = self.gather(ascending)
        self._row_at[ascending] = np.arange(self._next_row, self._next_row + len(ascending))
        self._pages = [_Page(self._next_row, kept, len(ascending))] if len(ascending) else []
        self._next_row += len(ascending)
        self._pages_nbytes = sum(page.nbytes for page in self._pages)

    def _renumber(self, merged: Sequence[_Page], starts: Sequence[int]) -> None:
        old = np.array([page.first_row for page in merged], np.int64)
        shifts = old - np.array(starts[:-1], np.int64)
        inside = np.flatnonzero((self._row_at >= old[0]) & (self._row_at < self._next_row))
        number = np.searchsorted(old, self._row_at[inside], side="right") - 1
        self._row_at[inside] -= shifts[number]

    def _first_to_merge(self) -> int:
        """The first of the newest pages to merge."""
        first, total = len(self._pages), 0
        for number in range(len(self._pages) - 1, -1, -1):
            length = len(self._pages[number].rows)
            if total and length >= 2 * total:
                break
            total += length
            first = number
        return first if len(self._pages) - first > 1 else len(self._pages)

    def _page_of(self, rows: Int64Array) -> npt.NDArray[np.intp]:
        starts = np.array([page.first_row for page in self._pages], np.int64)
        return np.searchsorted(starts, rows, side="right") - 1


def spread(kept: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """An array of this length that starts with the given values, followed by zeros."""
    longer = np.zeros(length, kept.dtype)
    longer[: kept.size] = kept
    return longer


def _storage_dtype(kind: pa.DataType) -> np.dtype[np.generic]:
    if pa.types.is_boolean(kind):
        return np.dtype(np.uint8)
    width = kind.bit_width // 8
    return np.dtype(f"u{width}" if width in (1, 2, 4, 8) else f"V{width}")


def _plane_count(columns: int) -> int:
    return -(-columns // 8)


def _null_bytes(column: pa.Array) -> UInt8Array:
    nulls: UInt8Array = column.is_null().to_numpy(zero_copy_only=False).astype(np.uint8)
    return nulls
