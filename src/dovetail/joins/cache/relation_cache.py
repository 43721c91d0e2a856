"""The cache: relation rows in memory by join value (SSBJ's hash table H_R).

A join value is in the cache with all its rows or not at all, or as *negative*: known to have no row. The rows of a
value are contiguous in one of a few Arrow batches, the *pages*; a `ValueTable` has one slot per value with their start,
number and frequency. So a batch of stream tuples takes one probe and one `take` per page.

All bytes of pages and table are counted; rows of evicted values count until their page is rewritten by `tidy`, which
never needs more than a given number of bytes for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.core.errors import InternalError
from dovetail.joins.window.tuple_store import Positions
from dovetail.kernels.sorted_codes import expand_ranges
from dovetail.kernels.value_table import MAX_COUNT, MAX_ROW, Values, ValueTable
from dovetail.relation.widths import fixed_row_bytes, row_widths, widest_row

__all__ = ["LASTING_ROWS_POOL", "CacheProbe", "RelationCache", "bytes_of_rows"]

# Cached rows have their own memory pool, apart from short-lived output: Arrow's allocator returns only whole pages of
# some megabytes, and would keep one for every few cached rows in it.
LASTING_ROWS_POOL = pa.system_memory_pool()
_PADDING_BYTES = 64  # the most that Arrow adds to a buffer
_GARBAGE_SHARE = 10  # a page is rewritten when a tenth of it is garbage
_GROWTH = 32  # the table grows by this part, so that single negative entries do not rebuild it


@dataclass(frozen=True)
class CacheProbe:
    """The result of probing a batch of codes; valid until the cache changes."""

    found: Int64Array  # slots of the codes; -1: not in the cache
    first_rows: Int64Array
    counts: Int64Array  # 0 if the code is not in the cache or has no row
    revision: int = 0  # of the cache

    @property
    def is_miss(self) -> BoolArray:
        """Which codes are not in the cache."""
        return np.asarray(self.found < 0, np.bool_)

    def __len__(self) -> int:
        return int(self.found.size)

    def part(self, start: int, stop: int) -> "CacheProbe":
        found, first_rows, counts = self.found[start:stop], self.first_rows[start:stop], self.counts[start:stop]
        return CacheProbe(found, first_rows, counts, self.revision)


@dataclass
class _Page:
    first_row: int
    rows: pa.RecordBatch
    live: int
    nbytes: int
    widest: int

    @classmethod
    def of(cls, first_row: int, rows: pa.RecordBatch) -> "_Page":
        return cls(first_row, rows, rows.num_rows, bytes_of_rows(rows), widest_row(rows))

    @property
    def stop_row(self) -> int:
        return self.first_row + int(self.rows.num_rows)


class RelationCache:
    """Relation rows by join value; without columns in `schema`, only the numbers of rows."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._table: ValueTable | None = None
        self._pages: list[_Page] = []
        self._revision = 0

    @property
    def revision(self) -> int:
        """A number that changes with every change of the cache."""
        return self._revision

    def __len__(self) -> int:
        return 0 if self._table is None else len(self._table)

    @property
    def keeps_rows(self) -> bool:
        """Whether it keeps rows, not only their number."""
        return len(self.schema) > 0

    @property
    def num_rows(self) -> int:
        """Rows of the cached values."""
        return sum(page.live for page in self._pages)

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    @property
    def nbytes(self) -> int:
        """Bytes of the table and the rows, including those of evicted values until their page is rewritten."""
        return sum(page.nbytes for page in self._pages) + self.table_bytes

    @property
    def table_bytes(self) -> int:
        return 0 if self._table is None else self._table.nbytes

    @property
    def free_entries(self) -> int:
        """How many more values fit the current table."""
        return 0 if self._table is None else self._table.capacity - len(self._table)

    # ---------------------------------------------------------------- answering

    def probe(self, codes: Int64Array) -> CacheProbe:
        """Look up a batch of codes."""
        if self._table is None:
            nothing = np.zeros(codes.size, np.int64)
            return CacheProbe(np.full(codes.size, -1, np.int64), nothing, nothing, revision=self._revision)
        found = self._table.find(codes)
        # A slot of -1 reads another value's numbers, which are then cleared.
        is_there = found >= 0
        counts = np.where(is_there, self._table.counts_at(found), 0)
        return CacheProbe(found, self._table.rows_at(found), counts, revision=self._revision)

    def observe(self, probe: CacheProbe, which: Int64Array) -> None:
        """Count requests for some of the codes of a probe."""
        self.require_unchanged(probe)
        if self._table is not None:
            self._table.observe(probe.found[which])

    def require_unchanged(self, probe: CacheProbe) -> None:
        """Refuse a probe from before a change: its rows may belong to other values now."""
        if probe.revision != self._revision:
            raise InternalError("The cache has changed since it was probed.")

    def gather(
        self, rows: Positions, memory_pool: pa.MemoryPool | None = None
    ) -> tuple[Int64Array | None, pa.RecordBatch]:
        """Rows in the cheapest order: row i of the batch is the one requested at ``order[i]``.

        An order of None means the requested order.
        """
        if len(self._pages) == 1:
            page = self._pages[0]
            return None, pc.take(page.rows, pa.array(rows - page.first_row), memory_pool=memory_pool)
        starts = np.array([page.first_row for page in self._pages], np.int64)
        numbers = np.searchsorted(starts, rows, side="right") - 1
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], np.arange(len(self._pages) + 1))
        parts = [
            pc.take(page.rows, pa.array(rows[order[low:high]] - page.first_row), memory_pool=memory_pool)
            for page, low, high in zip(self._pages, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
            if low < high
        ]
        if len(parts) == 1:
            return order, parts[0]
        if not parts:
            return order, pa.RecordBatch.from_pylist([], schema=self.schema)
        return order, pa.concat_batches(parts, memory_pool=memory_pool)

    def gather_in_order(self, rows: Positions) -> pa.RecordBatch:
        """Rows in the requested order."""
        order, taken = self.gather(rows)
        if order is None:
            return taken
        back = np.empty(order.size, np.int64)
        back[order] = np.arange(order.size)
        return taken.take(pa.array(back))

    @property
    def widest(self) -> int:
        """Upper bound of the bytes of a row."""
        return max((page.widest for page in self._pages), default=0)

    @property
    def row_limit(self) -> int:
        """One more than the highest row number."""
        return max((page.stop_row for page in self._pages), default=0)

    def find_rows(self, codes: Int64Array) -> tuple[BoolArray, Int64Array, Int64Array]:
        """Whether each code is known, and the first row and number of rows of the known ones."""
        probe = self.probe(codes)
        return ~probe.is_miss, probe.first_rows, probe.counts

    def rows_at(self, rows: Int64Array) -> pa.RecordBatch:
        return self.gather_in_order(rows)

    def row_widths(self, rows: Int64Array) -> Int64Array | int:
        """Bytes of the rows with these ascending numbers, or one number if all rows are equally wide."""
        fixed = fixed_row_bytes(self.schema)
        if fixed is not None:
            return fixed
        bounds = np.searchsorted(rows, [page.first_row for page in self._pages] + [MAX_ROW + 1]).tolist()
        widths = [
            row_widths(page.rows, rows[low:high] - page.first_row)
            for page, low, high in zip(self._pages, bounds[:-1], bounds[1:], strict=True)
        ]
        return np.concatenate(widths) if widths else np.empty(0, np.int64)

    def note_asked(self, codes: Int64Array, times: Int64Array) -> None:
        """Count requests for distinct codes, each this many times."""
        if self._table is not None:
            found = self._table.find(codes)
            known = np.flatnonzero(found >= 0)
            self._table.observe(np.repeat(found[known], times[known]))

    # ---------------------------------------------------------------- what is in it

    def values(self) -> Values:
        """Every value: its code, first row, number of rows and frequency."""
        if self._table is None:
            nothing = np.empty(0, np.int64)
            return Values(nothing, nothing, nothing, nothing)
        return self._table.items()

    def reset_frequencies(self) -> None:
        """Restart counting."""
        if self._table is not None:
            self._table.reset_frequencies()

    # ---------------------------------------------------------------- changing

    def table_growth_bytes(self, values: int) -> int:
        """How much the table would grow if this many values were added; while it is resized, both exist."""
        if self._table is not None and len(self) + values <= self._table.capacity:
            return 0
        return ValueTable.nbytes_of(self._capacity_for(values)) - self.table_bytes

    def entries_within(self, size_bytes: int) -> int:
        """How many more values without rows fit if the table may take this many bytes."""
        capacity = ValueTable.capacity_within(size_bytes)
        return max(self.free_entries, capacity * _GROWTH // (_GROWTH + 1) - len(self))

    def insert(self, row_codes: Int64Array, batches: list[pa.RecordBatch], frequencies: Int64Array) -> None:
        """Add values with all their rows; rows of a value are contiguous and in one batch.

        The batches must be copies: each becomes a page, and the list is emptied. `frequencies` are initial counts, per
        value in order of appearance.
        """
        self._revision += 1
        is_first = np.ones(row_codes.size, np.bool_)
        np.not_equal(row_codes[1:], row_codes[:-1], out=is_first[1:])
        starts = np.flatnonzero(is_first)
        counts = np.diff(np.append(starts, row_codes.size))
        if counts.size and int(counts.max()) > MAX_COUNT:
            raise InternalError(f"A join value with {int(counts.max())} rows was to be cached; {MAX_COUNT} can be.")
        first = self._place_for(row_codes.size) if self.keeps_rows else 0
        self._reserve(counts.size)
        assert self._table is not None
        rows = starts + first if self.keeps_rows else np.zeros(starts.size, np.int64)
        self._table.put(row_codes[starts], rows, counts, frequencies)
        while batches and self.keeps_rows:
            batch = batches.pop(0)
            if batch.num_rows:
                self._pages.append(_Page.of(first, batch))
                first += batch.num_rows
        self._pages.sort(key=lambda page: page.first_row)

    def insert_counts(self, codes: Int64Array, counts: Int64Array, frequencies: Int64Array | int = 0) -> None:
        """Add values of which only the number of rows is kept."""
        if codes.size:
            self._revision += 1
            self._reserve(codes.size)
            assert self._table is not None
            self._table.put(codes, 0, counts, frequencies)

    def insert_negative(self, codes: Int64Array, frequencies: Int64Array | int = 0) -> None:
        """Add distinct values that have no row."""
        self.insert_counts(codes, np.zeros(codes.size, np.int64), frequencies)

    def evict(self, codes: Int64Array) -> int:
        """Remove values with all their rows; returns how many were cached."""
        if self._table is None or codes.size == 0:
            return 0
        self._revision += 1
        probe = self.probe(codes)
        if self.keeps_rows:
            starts = np.array([page.first_row for page in self._pages], np.int64)
            with_rows = probe.counts > 0
            numbers = np.searchsorted(starts, probe.first_rows[with_rows], side="right") - 1
            gone = np.bincount(numbers, weights=probe.counts[with_rows], minlength=len(self._pages))
            for page, rows in zip(self._pages, gone.astype(np.int64).tolist(), strict=True):
                page.live -= rows
            self._pages = [page for page in self._pages if page.live]
        evicted = int(np.count_nonzero(self._table.remove(codes)))
        if len(self._table) == 0:
            self.clear()
        return evicted

    def clear(self) -> None:
        self._revision += 1
        self._table, self._pages = None, []

    # ---------------------------------------------------------------- care

    def tidy(self, free_bytes: int) -> None:
        """Rewrite pages with garbage, merge small ones and shrink the table, using at most `free_bytes` for it."""
        for page in list(self._pages):
            rows = page.rows.num_rows
            if rows - page.live > rows // _GARBAGE_SHARE and page.nbytes * page.live // rows <= free_bytes:
                self._rewrite([page])
        while len(smallest := self._to_join(free_bytes)) > 1:
            self._rewrite(smallest)
        table = self._table
        smaller = self._capacity_for(0)
        if table is not None and table.capacity > 2 * smaller and ValueTable.nbytes_of(smaller) <= free_bytes:
            self._revision += 1
            self._table = table.resized(smaller)

    def _to_join(self, free_bytes: int) -> list[_Page]:
        """Pages to merge: the smallest ones, unless the largest of them exceeds the others together."""
        by_size = sorted(self._pages, key=lambda page: page.nbytes)
        for last in range(len(by_size) - 1, 0, -1):
            smaller_bytes = sum(page.nbytes for page in by_size[:last])
            if by_size[last].nbytes < 2 * smaller_bytes and smaller_bytes + by_size[last].nbytes <= free_bytes:
                return by_size[: last + 1]
        return []

    def _rewrite(self, pages: Sequence[_Page]) -> None:
        """Merge the live rows of some pages into one."""
        assert self._table is not None
        self._revision += 1
        chosen = {id(page) for page in pages}
        codes, rows, counts, frequencies = self._table.items()
        starts = np.array([page.first_row for page in self._pages], np.int64)
        numbers = np.searchsorted(starts, rows, side="right") - 1
        is_chosen = np.array([id(page) in chosen for page in self._pages])
        moving = np.flatnonzero((counts > 0) & is_chosen[np.maximum(numbers, 0)])
        moving = moving[np.argsort(rows[moving], kind="stable")]
        _, taken = expand_ranges(rows[moving], counts[moving].astype(np.int32))
        _, batch = self.gather(taken, LASTING_ROWS_POOL)
        offsets = np.cumsum(counts[moving]) - counts[moving]
        self._pages = [page for page in self._pages if id(page) not in chosen]
        first = self._place_for(batch.num_rows)
        self._table.put(codes[moving], offsets + first, counts[moving], frequencies[moving])
        self._pages.append(_Page.of(first, batch))
        self._pages.sort(key=lambda page: page.first_row)

    # ---------------------------------------------------------------- helpers

    def _capacity_for(self, more: int) -> int:
        wanted = len(self) + more
        return max(4, wanted + wanted // _GROWTH)

    def _reserve(self, values: int) -> None:
        """Make sure that this many more values fit the table."""
        if self._table is None:
            self._table = ValueTable(self._capacity_for(values))
        elif len(self._table) + values > self._table.capacity:
            self._table = self._table.resized(self._capacity_for(values))

    def _place_for(self, rows: int) -> int:
        """The first of this many free row numbers."""
        place = 0
        for page in self._pages:
            if page.first_row - place >= rows:
                return place
            place = page.stop_row
        if place + rows > MAX_ROW:
            raise InternalError(f"A cache numbers at most {MAX_ROW} rows.")
        return place


def bytes_of_rows(rows: pa.RecordBatch) -> int:
    """The size of a batch with its own buffers, including padding."""
    buffers = [buffer for column in rows.columns for buffer in column.buffers() if buffer is not None]
    in_buffers = sum(int(buffer.size) for buffer in buffers)
    return max(in_buffers, int(rows.nbytes)) + _PADDING_BYTES * len(buffers)
