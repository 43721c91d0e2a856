"""Reading one segment: row ranges, positions and codes, each verified before its first use.

The unit of verification is a page, which is also the unit of a read; segments of earlier releases have no checksums of
pages, and are verified by record batch. Files that are not mapped are fetched and verified by record batch.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.arrays import UInt32Array
from dovetail.core.errors import RelationCorrupt
from dovetail.kernels.pages import PAGE_BYTES, find_code_pages
from dovetail.kernels.sorted_codes import group_by_block, lookup_sorted
from dovetail.relation.deletions import load_deletions, missing_file
from dovetail.relation.format import FENCE_STRIDE, Segment
from dovetail.relation.io import Arena, IoMode, PreadFile
from dovetail.relation.reads.drop_behind import DropBehind
from dovetail.relation.reads.paged_file import Asked, PagedFile, chunks, count_read_ahead, pages_of_bytes
from dovetail.relation.reads.pages_ahead import PagesAhead, ScanAhead, read_parts
from dovetail.relation.reads.read_costs import ReadCosts
from dovetail.relation.reads.row_pages import RowPages
from dovetail.relation.reads.row_ranges import read_rows
from dovetail.relation.reads.whole_batches import WholeBatches
from dovetail.relation.widths import row_widths, widest_row
from dovetail.storage.digests import digest_of
from dovetail.storage.files import RelationFiles
from dovetail.storage.verified import verification_marks

Int64Array = npt.NDArray[np.int64]

_ROWS_CHECKED, _CODES_CHECKED = 1, 2
_MOST_PAGES_AHEAD = 8_192  # under way at once: more could leave a small memory before they are used
_FEWEST_ROWS_AHEAD = 1_024  # in a block of a scan: asking for less costs more than reading around faults
_BATCHES_AT_ONCE = 4  # verified whole by a lookup whose pages are in memory
_PREFIX_BYTES = 8  # of a message: a mark, and the length of the rest of its head
_USUAL_HEAD_BYTES = 1024  # of a record batch, in front of its columns


class SegmentReader:
    """One segment of one shard, as of one version. Returns ``columns``, in this order."""

    def __init__(
        self,
        files: RelationFiles,
        shard: int,
        segment: Segment,
        schema: pa.Schema,
        columns: Sequence[str],
        io: IoMode,
        arena: Arena,  # the block buffer of "buffered" and "direct" reads, shared by the segments of a shard
        drops: DropBehind = DropBehind(),  # noqa: B008 -- immutable
    ) -> None:
        self._files, self._segment, self._schema, self._drops = files, segment, schema, drops
        self._column_numbers = [schema.get_field_index(name) for name in columns]
        self.projected = pa.schema([schema.field(i) for i in self._column_numbers])
        self._base = f"data/{shard}/{segment.name}"
        self.rows = segment.rows
        self.is_keyed = segment.is_keyed
        self.max_code = segment.max_code
        self.file_name = self._path("rows")
        self._check_sizes()
        self._load_index()
        self.deleted = None if segment.deletions is None else load_deletions(files, shard, segment.deletions)
        self._batches: list[pa.RecordBatch | None] = [None] * len(self._batch_rows)
        # Mapped now, verified on first use: a vacuum may remove the files of an open reader.
        self._rows_file: PagedFile | None = None
        self._codes_file: PagedFile | None = None
        self._whole: WholeBatches | None = None
        self._used_codes: Asked | None = None  # of the last block of a scan
        self._marks = np.empty(0, np.uint8)
        if files.local is not None:
            self._map_files()
        self._codes: Int64Array | None = None
        self._pread = self._open_pread("rows", io, arena)
        self._pread_codes = self._open_pread("codes", io, arena) if self.is_keyed else None

    def _map_files(self) -> None:
        kinds = ("rows", "codes") if self.is_keyed else ("rows",)
        mapped = {kind: self._files.map(f"{self._base}.{kind}") for kind in kinds}
        paths = [Path(self._path(kind)) for kind in kinds]
        sums = self._page_sums
        if sums is None:
            self._marks = verification_marks(paths, self._segment.index_digest, len(self._batch_rows))
        else:
            pages = [len(sums[kind]) for kind in kinds]
            self._marks = verification_marks(paths, self._segment.index_digest, sum(pages), unit="pages")
        content = {"rows": (int(self._batch_offsets[0]), int(self._batch_offsets[-1])), "codes": (0, self.rows * 8)}
        opened, at = {}, 0
        for kind in kinds:
            own_sums = own_marks = None
            if sums is not None:
                own_sums, own_marks = sums[kind], self._marks[at : at + len(sums[kind])]
                at += len(own_sums)
            opened[kind] = PagedFile(self._path(kind), mapped[kind], content[kind], own_sums, own_marks)
        self._rows_file, self._codes_file = opened["rows"], opened.get("codes")
        self._row_pages = RowPages(mapped["rows"], len(self._batch_rows))
        self._scan = ScanAhead(self._rows_file, self._drops)
        if sums is not None and self._column_numbers:
            places = self._batch_offsets, self._segment.rows_bytes
            self._whole = WholeBatches(self._rows_file, *places, self._schema, self._column_numbers)
        self._is_batch_verified = np.zeros(len(self._batch_rows), np.bool_)

    # ---------------------------------------------------------------- rows

    def read(self, start: int, stop: int) -> list[pa.RecordBatch]:
        """Read rows ``[start, stop)`` of the projected columns, including deleted ones, one piece per record batch."""
        pieces = []
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            batch_start, batch_stop = int(self._starts[first]), int(self._starts[first + 1])
            upto = min(stop, batch_stop)
            pieces.append(self._read_piece(first, start - batch_start, upto - batch_start))
            start, first = upto, first + 1
        return pieces

    @property
    def is_mapped(self) -> bool:
        """Whether the rows are memory-mapped."""
        return self._rows_file is not None

    def rows_in_batch(self, start: int) -> int:
        """Return how many rows its record batch has, from this one."""
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        return int(self._starts[number + 1]) - start

    def _read_piece(self, number: int, start: int, stop: int) -> pa.RecordBatch:
        mapped = self._batch(number)
        self._need_range(number, start, stop)
        if self._pread is None or not self._column_numbers:
            return mapped.slice(start, stop - start)
        assert self._rows_file is not None
        if stop - start == mapped.num_rows and len(self._column_numbers) == len(self._schema):
            # The whole batch: one read instead of one or two per column.
            offset, length = self._place(number)
            message = pa.ipc.read_message(self._pread.read(offset, length))
            return pa.ipc.read_record_batch(message, self._schema).select(self._column_numbers)
        pread, base = self._pread, self._rows_file.data.address
        columns = [
            read_rows(column, start, stop, lambda address, length: pread.read(address - base, length))
            for column in mapped.columns
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.projected)

    def _need_range(self, number: int, start: int, stop: int) -> None:
        """Verify rows of a record batch that are about to be read in one piece."""
        file = self._rows_file
        if file is None:
            return
        rows = stop - start
        if self._pread is None and file.has_sums and rows >= _FEWEST_ROWS_AHEAD and self._column_numbers:
            file.require_whole()
            file.ahead.begin(self._pages_of_rows(rows))
            if file.ahead.is_on:
                self._scan.read((number, start, stop), self._following(number, stop, rows), self._pages_of_block)
                return
        file.begin_scan()
        if not file.has_sums or self._is_verified(file, number):
            return
        if stop - start == self._batch_rows[number] and len(self._column_numbers) == len(self._schema):
            self._verify_batch(file, number)
        else:
            file.verify(self._row_pages.of_row_range(number, start, stop))
            file.verify(self._row_pages.of_value_range(number, start, stop))

    def _pages_of_rows(self, rows: int) -> int:
        return 1 + int(rows * self._segment.rows_bytes / max(1, self.rows)) // PAGE_BYTES

    def _following(self, number: int, start: int, rows: int) -> tuple[int, int, int] | None:
        """The block that a scan in blocks of so many rows reads next."""
        if start == self._batch_rows[number]:
            number, start = number + 1, 0
        if number == len(self._batch_rows):
            return None
        return number, start, min(start + rows, int(self._batch_rows[number]))

    def _pages_of_block(self, block: tuple[int, int, int]) -> PagesAhead:
        self._batch(block[0])
        return PagesAhead(self._row_pages.of_row_range(*block), lambda: self._row_pages.of_value_range(*block))

    def _is_verified(self, file: PagedFile, number: int) -> bool:
        """Whether all pages of a record batch are verified."""
        if not self._is_batch_verified[number]:
            offset, length = self._place(number)
            self._is_batch_verified[number] = file.is_verified(offset, offset + length)
        return bool(self._is_batch_verified[number])

    def _verify_batch(self, file: PagedFile, number: int) -> None:
        offset, length = self._place(number)
        file.verify(pages_of_bytes(offset, offset + length))
        self._is_batch_verified[number] = True

    def gather(self, positions: Int64Array, *, in_pass: bool = False) -> Iterator[pa.RecordBatch]:
        """The rows at ascending positions, one piece per record batch.

        With `in_pass`, whole record batches are read past the page cache where that is cheaper; see `pass_bytes`.
        """
        numbers, offsets = group_by_block(positions, self._starts[:-1])
        groups = list(zip(numbers.tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))
        if in_pass and self._whole is not None and self._whole.pays(numbers, positions.size):
            count_read_ahead(positions.size)  # each row would have been a page
            for (number, low, high), batch in zip(groups, self._whole.read(numbers), strict=True):
                yield pc.take(batch, pa.array(positions[low:high] - self._starts[number]), boundscheck=False)
            return
        for first, stop in self._prepared(positions, numbers, offsets):
            for number, low, high in groups[first:stop]:
                inside = positions[low:high] - self._starts[number]
                yield pc.take(self._batch(number), pa.array(inside), boundscheck=False)

    @property
    def pass_bytes(self) -> int:
        """What reading whole record batches holds at a time."""
        return 0 if self._whole is None else self._whole.held_bytes

    def prepared(self, positions: Int64Array) -> Iterator[tuple[int, int]]:
        """Read and verify the rows at ascending positions, part by part: ranges of positions that are ready."""
        numbers, offsets = group_by_block(positions, self._starts[:-1])
        for first, stop in self._prepared(positions, numbers, offsets):
            yield int(offsets[first]), int(offsets[stop])

    def _prepared(
        self, positions: Int64Array, numbers: Int64Array, offsets: Int64Array, *, with_values: bool = True
    ) -> Iterator[tuple[int, int]]:
        """Read and verify rows before they are touched: yields ranges of groups that are ready."""
        file = self._rows_file
        if file is None or not self._column_numbers:
            yield 0, numbers.size
            return
        self._open_batches(numbers)
        file.require_whole()
        file.ahead.begin(positions.size * self._row_pages.pages_per_row)
        if not file.ahead.is_on and self._are_verified(file, numbers):
            yield 0, numbers.size
            return
        # One part is used while the next is read.
        most_rows = max(1, _MOST_PAGES_AHEAD // 2 // self._row_pages.pages_per_row)

        def pages_of(part: tuple[int, int]) -> PagesAhead:
            first, stop = part
            groups = numbers[first:stop], offsets[first : stop + 1] - offsets[first]
            rows = positions[offsets[first] : offsets[stop]] - np.repeat(self._starts[groups[0]], np.diff(groups[1]))
            values = (lambda: self._row_pages.of_values(groups, rows)) if with_values else None
            return PagesAhead(self._row_pages.of_rows(groups, rows), values)

        yield from read_parts(file, list(chunks(offsets, most_rows)), pages_of, self._drops)

    def _are_verified(self, file: PagedFile, numbers: Int64Array) -> bool:
        """Whether these record batches are verified, after verifying a few of them; for pages that are in memory.

        Finding and checking the pages of every row costs a fifth of a lookup in memory; a verified batch costs nothing.
        """
        if not file.has_sums:
            return True
        unknown = numbers[~self._is_batch_verified[numbers]].tolist()
        new = [number for number in unknown if not self._is_verified(file, number)]
        for number in new[:_BATCHES_AT_ONCE]:
            self._verify_batch(file, number)
        return len(new) <= _BATCHES_AT_ONCE

    def _open_batches(self, numbers: Int64Array) -> None:
        """Open record batches; their heads are read together."""
        file = self._rows_file
        new = np.array([number for number in numbers.tolist() if self._batches[number] is None], np.int64)
        if file is not None and file.has_sums and new.size:
            starts, ends = self._batch_offsets[new], self._batch_offsets[new + 1]
            heads = np.minimum(starts + _USUAL_HEAD_BYTES, ends)
            file.require_whole()
            file.need((starts // PAGE_BYTES, (heads - 1) // PAGE_BYTES))
        for number in new.tolist():
            self._batch(number)

    def widest(self, start: int, stop: int) -> int:
        """Bytes of the widest row at most, of the record batches that have rows ``[start, stop)``."""
        first, last = (int(np.searchsorted(self._starts, at, side="right")) - 1 for at in (start, stop - 1))
        return self._widest_of(np.arange(first, last + 1))

    def widest_at(self, positions: Int64Array) -> int:
        """Bytes of the widest row at most, of the record batches that have rows at ascending positions."""
        return self._widest_of(group_by_block(positions, self._starts[:-1])[0]) if positions.size else 0

    def _widest_of(self, numbers: Int64Array) -> int:
        # Segments of earlier releases: found once per record batch and kept; its offsets are read, not its values.
        for number in numbers[self._widest[numbers] < 0].tolist():
            self._widest[number] = widest_row(self._batch(number))
        return int(self._widest[numbers].max())

    def widths(self, positions: Int64Array) -> Int64Array:
        """Bytes of the rows at ascending positions, from their offsets alone."""
        numbers, offsets = group_by_block(positions, self._starts[:-1])
        widths = np.empty(positions.size, np.int64)
        for first, stop in self._prepared(positions, numbers, offsets, with_values=False):
            for group in range(first, stop):
                number, low, high = int(numbers[group]), int(offsets[group]), int(offsets[group + 1])
                widths[low:high] = row_widths(self._batch(number), positions[low:high] - self._starts[number])
        return widths

    def _batch(self, number: int) -> pa.RecordBatch:
        """A record batch; of a file with checksums of pages, only its head is verified."""
        batch = self._batches[number]
        if batch is None:
            message = self._verified_message(number)
            whole = pa.ipc.read_record_batch(pa.ipc.read_message(message), self._schema)
            batch = whole.select(self._column_numbers)
            if self._rows_file is not None:
                self._batches[number] = batch
                self._row_pages.enter(number, batch)
        return batch

    def _verified_message(self, number: int) -> pa.Buffer:
        offset, length = self._place(number)
        file = self._rows_file
        if file is None:
            # Data that is not mapped is fetched every time and may have changed since it was verified.
            with self._files.filesystem.open_input_file(self._path("rows")) as remote:
                message = pa.py_buffer(remote.read_at(length, offset))
            self._check(message, self._batch_digests[number], "rows", number)
            return message
        message = file.data.slice(offset, length)
        file.require_whole()
        if file.has_sums:
            file.need(pages_of_bytes(offset, offset + _PREFIX_BYTES))
            head_bytes = _PREFIX_BYTES + int(np.frombuffer(message, np.dtype("<i4"), 2)[1])
            file.need(pages_of_bytes(offset, offset + min(length, head_bytes)))
        elif not self._marks[number] & _ROWS_CHECKED:
            self._check(message, self._batch_digests[number], "rows", number)
            self._marks[number] |= _ROWS_CHECKED
        return message

    def _place(self, number: int) -> tuple[int, int]:
        """Return offset and length of a record batch's message in the rows file."""
        offset = int(self._batch_offsets[number])
        return offset, int(self._batch_offsets[number + 1]) - offset

    def is_deleted(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        """Return which of these rows are deleted in this version."""
        if self.deleted is None:
            return np.zeros(len(rows), np.bool_)
        bits: npt.NDArray[np.uint8] = self.deleted[rows >> 3] >> (rows & 7).astype(np.uint8)
        return (bits & np.uint8(1)).astype(np.bool_)

    # ---------------------------------------------------------------- codes

    def codes(self, start: int, stop: int) -> Int64Array:
        """Return the codes of rows ``[start, stop)``, including deleted ones."""
        file = self._codes_file
        if file is None or not file.has_sums:
            checked = self.all_codes()
        else:
            checked = self._mapped_codes(file)
            if start < stop:
                self._need_codes(file, start, stop)
        if self._pread_codes is None:
            return checked[start:stop]
        return np.frombuffer(self._pread_codes.read(start * 8, (stop - start) * 8), np.int64)

    def _need_codes(self, file: PagedFile, start: int, stop: int) -> None:
        """Read and verify the codes of rows ``[start, stop)``."""
        pages = pages_of_bytes(start * 8, stop * 8)
        if self._pread_codes is None and stop - start >= _FEWEST_ROWS_AHEAD:
            file.require_whole()
            file.ahead.begin(int(pages[1][0] - pages[0][0]) + 1)
            if file.ahead.is_on:
                asked = file.ask(pages, drops_behind=self._drops.codes)
                file.wait(asked)
                file.drop(self._used_codes)
                self._used_codes = asked
                return
        file.begin_scan()
        if not file.is_verified(start * 8, stop * 8):
            file.verify(pages)

    def codes_at(self, rows: Int64Array) -> Int64Array:
        """Return the codes of some rows, in the given order."""
        file = self._codes_file
        if file is None or not file.has_sums:
            return self.all_codes()[rows]
        pages = np.unique(rows * 8 // PAGE_BYTES)
        file.require_whole()
        file.need((pages, pages))
        return self._mapped_codes(file)[rows]

    def lookup(self, queries: Int64Array) -> tuple[Int64Array, npt.NDArray[np.int32]]:
        """Return the equal range of each query: first position and count, including deleted rows."""
        file = self._codes_file
        if file is None:
            return lookup_sorted(self.fences, FENCE_STRIDE, self.all_codes(), queries)
        if not file.has_sums:
            self.all_codes()
        file.require_whole()
        if file.must_prepare(queries.size):
            firsts, lasts = find_code_pages(self.fences, FENCE_STRIDE, self.rows, queries)
            if np.any(firsts[1:] < firsts[:-1]):
                order = np.argsort(firsts, kind="stable")
                firsts, lasts = firsts[order], lasts[order]
            asked = file.ask((firsts, lasts), drops_behind=self._drops.codes)
            file.wait(asked)
            found = lookup_sorted(self.fences, FENCE_STRIDE, self._mapped_codes(file), queries)
            file.drop(asked)
            return found
        return lookup_sorted(self.fences, FENCE_STRIDE, self._mapped_codes(file), queries)

    def all_codes(self) -> Int64Array:
        """Return the verified codes of all rows."""
        file = self._codes_file
        if file is not None and file.has_sums:
            file.begin_scan()
            file.verify(pages_of_bytes(0, self.rows * 8))
            return self._mapped_codes(file)
        if self._codes is None:
            data = pa.py_buffer(self._files.read(f"{self._base}.codes")) if file is None else file.data
            codes = np.frombuffer(data, np.dtype("<i8"))
            marks = np.zeros(len(self._codes_digests), np.uint8) if file is None else self._marks
            for number, digest in enumerate(self._codes_digests):
                if not marks[number] & _CODES_CHECKED:
                    stretch = codes[self._starts[number] : self._starts[number + 1]]
                    self._check(stretch, digest, "codes", number)
                    marks[number] |= _CODES_CHECKED
            self._codes = codes
        return self._codes

    def _mapped_codes(self, file: PagedFile) -> Int64Array:
        return np.frombuffer(file.data, np.dtype("<i8"))

    # ---------------------------------------------------------------- opening

    def absent_share(self) -> float:
        """The share of the rows that is not in memory, from a sample; 0 if they are not mapped."""
        return 0.0 if self._rows_file is None else self._rows_file.absent_share()

    @property
    def read_costs(self) -> ReadCosts | None:
        """The costs of reads of the device; None if the rows are not mapped."""
        return None if self._rows_file is None else self._rows_file.costs

    @property
    def resident_bytes(self) -> int:
        """Bytes in memory while the segment is open: fences, batch table, deletions."""
        tables = self._resident_index_bytes + self._starts.nbytes + self._batch_offsets.nbytes + self._marks.nbytes
        return tables + (self.deleted.nbytes if self.deleted is not None else 0)

    def _open_pread(self, kind: str, io: IoMode, arena: Arena) -> PreadFile | None:
        if io == "map" or self._files.local is None:
            return None
        return PreadFile(self._path(kind), arena, direct=io == "direct")

    def _path(self, kind: str) -> str:
        return self._files.path(f"{self._base}.{kind}")

    def _check_sizes(self) -> None:
        segment = self._segment
        expected = {"rows": segment.rows_bytes, "index": segment.index_bytes}
        if self.is_keyed:
            expected["codes"] = segment.codes_bytes
        for kind, size in expected.items():
            found = self._files.size(f"{self._base}.{kind}")
            if found is None:
                raise missing_file(self._path(kind))
            if found != size:
                raise RelationCorrupt(
                    f"{self._path(kind)} has {found} bytes, but its version says {size}: it is truncated or "
                    "overwritten. Restore the file from a copy, or build the relation again."
                )

    def _load_index(self) -> None:
        name = f"{self._base}.index"
        data = self._files.read(name) if self._files.local is None else self._files.map(name)
        self._check(data, self._segment.index_digest, "index", None)
        with pa.ipc.open_stream(data) as stream:
            index = stream.read_next_batch()
        values = {name: index.column(name)[0].values for name in index.schema.names}
        # Copies, so that page checksums, which are most of an index, are pages of a file and not memory.
        self.fences: Int64Array = values["fences"].to_numpy().copy()
        self._batch_rows = values["batch_rows"].to_numpy().copy()
        self._starts: Int64Array = np.concatenate([[0], np.cumsum(self._batch_rows)]).astype(np.int64)
        end = self._segment.rows_bytes - 8  # the end-of-stream mark
        self._batch_offsets = np.append(values["batch_offsets"].to_numpy(), end)
        self._batch_digests: list[str] = values["batch_digests"].to_pylist()
        self._codes_digests: list[str] = values["codes_digests"].to_pylist()
        self._page_sums: dict[str, UInt32Array] | None = None
        self._widest = np.full(len(self._batch_rows), -1, np.int64)
        self._resident_index_bytes = self._segment.index_bytes
        if "row_sums" in values:
            sums = {"rows": values["row_sums"].to_numpy(), "codes": values["code_sums"].to_numpy()}
            widest = values["widest_values"].to_numpy().reshape(len(self._batch_rows), len(self._schema))
            self._widest = widest[:, self._column_numbers].sum(axis=1)
            self._resident_index_bytes -= sum(array.nbytes for array in (*sums.values(), widest))
            # Without a mapping nothing is verified by page.
            self._page_sums = None if self._files.local is None else sums

    def _check(self, data: object, digest: str, kind: str, batch: int | None) -> None:
        if digest_of(data) != digest:
            place = "" if batch is None else f" in record batch {batch}"
            raise RelationCorrupt(
                f"{self._path(kind)} does not match its digest{place}: the file was damaged after it was written. "
                "Restore the file from a copy, or build the relation again."
            )
