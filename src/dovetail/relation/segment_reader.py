"""Reading one segment: row ranges, positions and codes, each record batch checked before its first row is returned."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.errors import RelationCorrupt
from dovetail.kernels.sorted_codes import group_by_block, lookup_sorted
from dovetail.relation.files import RelationFiles
from dovetail.relation.format import FENCE_STRIDE, Deletions, Segment, digest_of
from dovetail.relation.io import Arena, IoMode, PreadFile
from dovetail.relation.row_ranges import read_rows
from dovetail.relation.verified import verification_marks

Int64Array = npt.NDArray[np.int64]

_ROWS_CHECKED, _CODES_CHECKED = 1, 2


class SegmentReader:
    """One segment of one shard, as one version sees it.

    Parameters
    ----------
    files, shard, segment
        Where it is.
    schema
        The relation's Arrow schema.
    columns
        The columns to return, in this order.
    io
        How bytes are read.
    arena
        The block buffer that ``buffered`` and ``direct`` reads fill; shared by the segments of a shard.
    """

    def __init__(
        self,
        files: RelationFiles,
        shard: int,
        segment: Segment,
        schema: pa.Schema,
        columns: Sequence[str],
        io: IoMode,
        arena: Arena,
    ) -> None:
        self._files, self._segment, self._schema = files, segment, schema
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
        local = files.local is not None
        self._mapped_rows = files.map(f"{self._base}.rows") if local else None
        self._batches: list[pa.RecordBatch | None] = [None] * len(self._batch_rows)
        kinds = ("rows", "codes") if self.is_keyed else ("rows",)
        data_files = [Path(self._path(kind)) for kind in kinds] if local else []
        self._marks = verification_marks(data_files, segment.index_digest, len(self._batch_rows))
        # Mapped now, checked when first used: a vacuum may remove the files under an open reader.
        self._mapped_codes = files.map(f"{self._base}.codes") if local and self.is_keyed else None
        self._codes: Int64Array | None = None
        self._pread = self._open_pread("rows", io, arena)
        self._pread_codes = self._open_pread("codes", io, arena) if self.is_keyed else None

    # ---------------------------------------------------------------- rows

    def read(self, start: int, stop: int) -> list[pa.RecordBatch]:
        """Rows ``[start, stop)`` of the projected columns, deleted ones included, a piece per record batch."""
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
        """Whether the rows lie in mapped pages."""
        return self._mapped_rows is not None

    def rows_in_batch(self, start: int) -> int:
        """How many rows from this one on its record batch has."""
        number = int(np.searchsorted(self._starts, start, side="right")) - 1
        return int(self._starts[number + 1]) - start

    def _read_piece(self, number: int, start: int, stop: int) -> pa.RecordBatch:
        mapped = self._batch(number)
        if self._pread is None or not self._column_numbers:
            return mapped.slice(start, stop - start)
        assert self._mapped_rows is not None
        if stop - start == mapped.num_rows and len(self._column_numbers) == len(self._schema):
            # All of it: one read instead of one or two for each column.
            offset, length = self._place(number)
            message = pa.ipc.read_message(self._pread.read(offset, length))
            return pa.ipc.read_record_batch(message, self._schema).select(self._column_numbers)
        pread, base = self._pread, self._mapped_rows.address
        columns = [
            read_rows(column, start, stop, lambda address, length: pread.read(address - base, length))
            for column in mapped.columns
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self.projected)

    def gather(self, positions: Int64Array) -> list[pa.RecordBatch]:
        """The rows at ascending positions, a piece per record batch."""
        numbers, offsets = group_by_block(positions, self._starts[:-1])
        pieces = []
        for number, low, high in zip(numbers.tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            inside = positions[low:high] - self._starts[number]
            pieces.append(pc.take(self._batch(number), pa.array(inside), boundscheck=False))
        return pieces

    def _batch(self, number: int) -> pa.RecordBatch:
        batch = self._batches[number]
        if batch is None:
            message = self._message(number)
            # What is not mapped is fetched anew every time, and may have changed since it was checked.
            if self._mapped_rows is None or not self._marks[number] & _ROWS_CHECKED:
                self._check(message, self._batch_digests[number], "rows", number)
                self._marks[number] |= _ROWS_CHECKED
            whole = pa.ipc.read_record_batch(pa.ipc.read_message(message), self._schema)
            batch = whole.select(self._column_numbers)
            if self._mapped_rows is not None:
                self._batches[number] = batch
        return batch

    def _message(self, number: int) -> pa.Buffer:
        offset, length = self._place(number)
        if self._mapped_rows is not None:
            return self._mapped_rows.slice(offset, length)
        with self._files.filesystem.open_input_file(self._path("rows")) as file:
            return pa.py_buffer(file.read_at(length, offset))

    def _place(self, number: int) -> tuple[int, int]:
        """Where a record batch's message lies in the file of rows: offset and length."""
        offset = int(self._batch_offsets[number])
        return offset, int(self._batch_offsets[number + 1]) - offset

    def is_deleted(self, rows: Int64Array) -> npt.NDArray[np.bool_]:
        """Which of these rows this version has deleted."""
        if self.deleted is None:
            return np.zeros(len(rows), np.bool_)
        bits: npt.NDArray[np.uint8] = self.deleted[rows >> 3] >> (rows & 7).astype(np.uint8)
        return (bits & np.uint8(1)).astype(np.bool_)

    # ---------------------------------------------------------------- codes

    def codes(self, start: int, stop: int) -> Int64Array:
        """The codes of rows ``[start, stop)``, deleted ones included."""
        checked = self.all_codes()
        if self._pread_codes is None:
            return checked[start:stop]
        return np.frombuffer(self._pread_codes.read(start * 8, (stop - start) * 8), np.int64)

    def lookup(self, queries: Int64Array) -> tuple[Int64Array, npt.NDArray[np.int32]]:
        """The equal range of each query: first position and count, deleted rows included."""
        return lookup_sorted(self.fences, FENCE_STRIDE, self.all_codes(), queries)

    def all_codes(self) -> Int64Array:
        """The mapped codes of all rows, checked."""
        if self._codes is None:
            data = self._mapped_codes
            if data is None:
                data = pa.py_buffer(self._files.read(f"{self._base}.codes"))
            codes = np.frombuffer(data, np.dtype("<i8"))
            for number, digest in enumerate(self._codes_digests):
                if not self._marks[number] & _CODES_CHECKED:
                    stretch = codes[self._starts[number] : self._starts[number + 1]]
                    self._check(stretch, digest, "codes", number)
                    self._marks[number] |= _CODES_CHECKED
            self._codes = codes
        return self._codes

    # ---------------------------------------------------------------- opening

    @property
    def resident_bytes(self) -> int:
        """What stays in memory for as long as the segment is open: fences, batch table, deletions."""
        tables = self._segment.index_bytes + self._starts.nbytes + self._batch_offsets.nbytes + self._marks.nbytes
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
                raise _missing(self._path(kind))
            if found != size:
                raise RelationCorrupt(
                    f"{self._path(kind)} has {found} bytes, its version says {size}: it was cut short or overwritten. "
                    "Restore the file from a copy, or build the relation again."
                )

    def _load_index(self) -> None:
        data = self._files.read(f"{self._base}.index")
        self._check(data, self._segment.index_digest, "index", None)
        with pa.ipc.open_stream(data) as stream:
            index = stream.read_next_batch()
        values = {name: index.column(name)[0].values for name in index.schema.names}
        self.fences: Int64Array = values["fences"].to_numpy()
        self._batch_rows = values["batch_rows"].to_numpy()
        self._starts: Int64Array = np.concatenate([[0], np.cumsum(self._batch_rows)]).astype(np.int64)
        end = self._segment.rows_bytes - 8  # the end-of-stream mark
        self._batch_offsets = np.append(values["batch_offsets"].to_numpy(), end)
        self._batch_digests: list[str] = values["batch_digests"].to_pylist()
        self._codes_digests: list[str] = values["codes_digests"].to_pylist()

    def _check(self, data: object, digest: str, kind: str, batch: int | None) -> None:
        if digest_of(data) != digest:
            place = "" if batch is None else f" in record batch {batch}"
            raise RelationCorrupt(
                f"{self._path(kind)} does not match its digest{place}: the file was damaged after it was written. "
                "Restore the file from a copy, or build the relation again."
            )


def _missing(path: str) -> RelationCorrupt:
    return RelationCorrupt(
        f"{path} is missing: it was vacuumed or deleted while in use. Open the newest version, or restore the file."
    )


def load_deletions(files: RelationFiles, shard: int, deletions: Deletions) -> npt.NDArray[np.uint8]:
    """The bitmap of a segment's deleted rows, checked."""
    name = f"data/{shard}/{deletions.name}"
    if files.size(name) is None:
        raise _missing(files.path(name))
    data = files.read(name)
    if digest_of(data) != deletions.digest:
        raise RelationCorrupt(
            f"{files.path(name)} does not match its digest: it was damaged. Restore the file from a copy, or build the "
            "relation again."
        )
    return np.frombuffer(data, np.uint8)
