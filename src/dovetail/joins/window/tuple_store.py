"""Stream tuples at the positions of a ring, in the form in which scattered ones are gathered fastest.

Every step of a join gathers tuples from all over the window. Columns of fixed width are therefore plain arrays indexed
by ring position: a gather is one pass per column, whatever the number of batches in which the tuples came. Columns of
other types (strings, binaries, nested ones) stay Arrow arrays, in few *pages*: each page is at least twice as long as
the next newer one, so there are never more than the logarithm of the window's length, and a page goes as soon as no
tuple of it is left.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.errors import InternalError

__all__ = ["TupleStore", "copy_of", "spread"]

Positions = npt.NDArray[np.int64] | npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
_PAGED_ENTRY_BYTES = 8
_GUESSED_PAGED_BYTES = 24


class TupleStore:
    """The columns of stream tuples, addressed by ring position.

    Parameters
    ----------
    schema
        The columns.
    ring_size
        How many positions there are.

    Examples
    --------
    >>> store = TupleStore(pa.schema({"a": pa.int64(), "b": pa.string()}), ring_size=4)
    >>> store.write(np.array([3, 0]), pa.record_batch({"a": [7, None], "b": ["x", "y"]}))
    >>> [column.to_pylist() for column in store.gather(np.array([0, 3]), [0, 1])]
    [[None, 7], ['y', 'x']]
    """

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
        # One bit per fixed column and tuple, eight columns to a plane.
        self._null_planes = np.zeros((_plane_count(len(self._fixed)), ring_size), np.uint8)
        self._has_nulls = False  # as long as there never was one, nothing needs to be looked up

    @staticmethod
    def fixed_bytes_per_position(schema: pa.Schema) -> int:
        """Bytes per ring position that are held whether or not a tuple is there."""
        fixed = [c.type for c in schema if is_fixed_width(c.type)]
        widths = sum(_storage_dtype(kind).itemsize for kind in fixed)
        return widths + _plane_count(len(fixed)) + _PAGED_ENTRY_BYTES * (len(schema) - len(fixed))

    @staticmethod
    def guess_paged_bytes(schema: pa.Schema) -> int:
        """Bytes per tuple to expect of the other columns before the first tuple was seen."""
        return sum(_GUESSED_PAGED_BYTES for c in schema if not is_fixed_width(c.type))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        fixed = sum(column.data.nbytes for column in self._fixed.values())
        return fixed + self._null_planes.nbytes + sum(column.nbytes for column in self._paged.values())

    @property
    def reclaimable_bytes(self) -> int:
        """About how many bytes of the pages belong to tuples that have left."""
        return sum(column.reclaimable_bytes for column in self._paged.values())

    def paged_bytes_of(self, batch: pa.RecordBatch) -> int:
        """Bytes that writing this batch would add to what is held."""
        return sum(int(batch.column(index).nbytes) for index in self._paged)

    def merge_bytes(self) -> int:
        """Bytes that the next `tidy` needs for a moment, while old and new pages both exist."""
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
        """The columns with these numbers of the tuples at the positions, in the order asked for."""
        planes: dict[int, npt.NDArray[np.uint8] | None] = {}
        columns = []
        for index in indices:
            fixed = self._fixed.get(index)
            if fixed is None:
                columns.append(self._paged[index].gather(positions))
                continue
            gathered = fixed.data.take(positions, mode="clip")
            if fixed.is_plain and not self._has_nulls:
                # At small windows a step gathers so few tuples that every call counts.
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
        """Go over to another ring, in which the tuple at ``positions[i]`` is at i; one column after the other."""
        for column in self._fixed.values():
            # The old column is let go before the new one is made.
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
        """Copy the pages without the tuples that have left; needs room for what is live, for a moment."""
        for paged in self._paged.values():
            paged.compact(live_positions)


def is_fixed_width(kind: pa.DataType) -> bool:
    """Whether values of the type are so many bits each, so that they can live in a plain array."""
    t = pa.types
    if t.is_nested(kind) or t.is_dictionary(kind) or t.is_null(kind) or isinstance(kind, pa.BaseExtensionType):
        return False
    try:
        return bool(kind.bit_width > 0)
    except ValueError:
        return False


def fixed_values(column: pa.Array) -> npt.NDArray[np.generic]:
    """The values behind a column of fixed width; whatever is in memory where it is NULL."""
    buffer, dtype = column.buffers()[1], _storage_dtype(column.type)
    if buffer is None or len(column) == 0:
        return np.zeros(len(column), dtype)
    if pa.types.is_boolean(column.type):
        # Only the bytes that the column has a part in: it may be a short slice of a long batch.
        first, skipped = divmod(column.offset, 8)
        needed = np.frombuffer(buffer, np.uint8, -(-(skipped + len(column)) // 8), first)
        return np.unpackbits(needed, bitorder="little")[skipped : skipped + len(column)]
    return np.frombuffer(buffer, dtype, len(column), column.offset * dtype.itemsize)


def fixed_array(kind: pa.DataType, values: npt.NDArray[np.generic], is_null: npt.NDArray[np.uint8] | None) -> pa.Array:
    """An Arrow array over values of fixed width, without a copy."""
    validity = None
    if is_null is not None and is_null.any():
        validity = pa.py_buffer(np.packbits(is_null == 0, bitorder="little"))
    data = np.packbits(values.view(np.uint8), bitorder="little") if pa.types.is_boolean(kind) else values
    # numpy does not export raw-byte dtypes as a buffer that Arrow takes, so they are handed over as bytes.
    return pa.Array.from_buffers(kind, len(values), [validity, pa.py_buffer(data.view(np.uint8))])


def copy_of(column: pa.Array) -> pa.Array:
    """The column in memory of its own: a slice would keep the whole batch that it came with alive."""
    return column.take(pa.array(np.arange(len(column))))


@dataclass(slots=True)
class _FixedColumn:
    """One column of fixed width: its values by position, and where its bit for NULL is.

    Attributes
    ----------
    kind
        Its type.
    data
        The values.
    plane, bit
        Which plane of NULLs, and which bit of it.
    is_plain
        Whether its values are numbers to numpy as they are to Arrow.
    """

    kind: pa.DataType
    data: npt.NDArray[np.generic]
    plane: int
    bit: int
    is_plain: bool


@dataclass
class _Page:
    first_row: int
    rows: pa.Array
    live: int

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes)


class _PagedColumn:
    """One column in pages. Rows are numbered as they come; ``_row_at`` has the number of the row at a position."""

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
        parts, taken = [], []
        for number in used.tolist():
            mine = np.flatnonzero(pages == number)
            page = self._pages[number]
            parts.append(page.rows.take(pa.array(rows[mine] - page.first_row)))
            taken.append(mine)
        back = np.empty(rows.size, np.int64)
        back[np.concatenate(taken)] = np.arange(rows.size)
        return pa.concat_arrays(parts).take(pa.array(back))

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
        # Rows between two pages may be missing where a page has gone; numbering goes on from the first page.
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
        """The first of the newest pages that are to become one."""
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
    """An array of this length that begins with the given values; zeros follow."""
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


def _null_bytes(column: pa.Array) -> npt.NDArray[np.uint8]:
    nulls: npt.NDArray[np.uint8] = column.is_null().to_numpy(zero_copy_only=False).astype(np.uint8)
    return nulls
