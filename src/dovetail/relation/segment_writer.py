"""Writing one segment: rows sorted by code, in batches of any size, become three durable files.

Holds at most one record batch (about 8 MiB) in memory.
"""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.core.errors import InternalError
from dovetail.core.faultpoints import fault_point
from dovetail.kernels.pages import PAGE_BYTES, page_sums
from dovetail.relation.format import FENCE_STRIDE, Segment
from dovetail.relation.widths import widest_values
from dovetail.storage.digests import digest_of
from dovetail.storage.interface import Storage
from dovetail.storage.local import LOCAL

MAX_BATCH_ROWS = 65_536
MAX_BATCH_BYTES = 8 * 2**20

INDEX_SCHEMA = pa.schema(
    [
        ("fences", pa.list_(pa.int64())),
        ("batch_rows", pa.list_(pa.int64())),
        ("batch_offsets", pa.list_(pa.int64())),
        ("batch_digests", pa.list_(pa.string())),
        ("codes_digests", pa.list_(pa.string())),
        # Earlier releases do not look for these: they verify by record batch.
        ("row_sums", pa.list_(pa.uint32())),
        ("code_sums", pa.list_(pa.uint32())),
        ("widest_values", pa.list_(pa.int64())),
    ]
)

_PAGE_WORDS = PAGE_BYTES // 8
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class SegmentWriter:
    """Writes the files of one segment into ``directory``. They are unused until a manifest lists them."""

    def __init__(self, directory: Path, name: str, schema: pa.Schema, is_keyed: bool, storage: Storage = LOCAL) -> None:
        if not storage.exists(directory):
            storage.make_directory(directory)
        self._storage = storage
        self._directory, self.name, self._schema, self._is_keyed = directory, name, schema, is_keyed
        self._rows_file: IO[bytes] = storage.open_new(directory / f"{name}.rows")
        self._codes_file: IO[bytes] | None = storage.open_new(directory / f"{name}.codes") if is_keyed else None
        self._rows_bytes = self._rows_file.write(schema.serialize())
        self._waiting: list[tuple[pa.RecordBatch, npt.NDArray[np.int64]]] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._rows = 0
        self._first_code = self._last_code = 0
        self._fences: list[npt.NDArray[np.int64]] = []
        self._batch_rows: list[int] = []
        self._batch_offsets: list[int] = []
        self._batch_digests: list[str] = []
        self._codes_digests: list[str] = []
        # The schema in front of the batches counts as zeros, like the mark behind them: no row depends on it.
        self._row_sums, self._code_sums = PageSums(self._rows_bytes), PageSums(0)
        self._widest_values: list[int] = []

    def write(self, batch: pa.RecordBatch, codes: npt.NDArray[np.int64]) -> None:
        """Add rows whose codes are ascending and not below those already written."""
        if batch.num_rows == 0:
            return
        mean_row_bytes = max(1, int(batch.nbytes) // int(batch.num_rows))
        start = 0
        while start < batch.num_rows:
            # Cut where the record batch is full, not where the input's batches end, so that a scan in blocks of this
            # size reads whole record batches.
            room = min(MAX_BATCH_ROWS - self._waiting_rows, (MAX_BATCH_BYTES - self._waiting_bytes) // mean_row_bytes)
            piece = batch.slice(start, max(1, room))
            self._waiting.append((piece, codes[start : start + piece.num_rows]))
            self._waiting_rows += piece.num_rows
            self._waiting_bytes += piece.num_rows * mean_row_bytes
            start += piece.num_rows
            if self._waiting_rows >= MAX_BATCH_ROWS or self._waiting_bytes + mean_row_bytes > MAX_BATCH_BYTES:
                self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        batch = pa.concat_batches([piece for piece, _ in self._waiting])
        codes = np.ascontiguousarray(np.concatenate([codes for _, codes in self._waiting]), "<i8")
        self._waiting.clear()
        self._waiting_rows = self._waiting_bytes = 0
        message = batch.serialize()
        self._batch_offsets.append(self._rows_bytes)
        self._batch_digests.append(digest_of(message))
        self._rows_bytes += self._rows_file.write(message)
        self._row_sums.add(message)
        self._widest_values += widest_values(batch)
        if self._codes_file is not None:
            self._write_codes(codes)
        self._batch_rows.append(batch.num_rows)
        self._rows += batch.num_rows
        fault_point("relation.segment.batch")

    def _write_codes(self, codes: npt.NDArray[np.int64]) -> None:
        assert self._codes_file is not None
        if (self._rows and codes[0] < self._last_code) or np.any(codes[1:] < codes[:-1]):
            raise InternalError(f"Rows of segment {self.name} are not in code order.")
        if self._rows == 0:
            self._first_code = int(codes[0])
        self._last_code = int(codes[-1])
        self._fences.append(codes[-self._rows % FENCE_STRIDE :: FENCE_STRIDE])
        self._codes_digests.append(digest_of(codes))
        self._codes_file.write(codes.data)
        self._code_sums.add(codes)

    def close(self) -> Segment | None:
        """Make the files durable and describe them. Without rows, remove the files and return None."""
        self._flush()
        if self._rows == 0:
            self.abandon()
            return None
        self._rows_bytes += self._rows_file.write(_END_OF_STREAM)
        for file in self._open_files():
            file.close()
        self._storage.sync(self._paths())
        fault_point("relation.segment.rows_durable")
        index = self._index_bytes()
        index_path = self._directory / f"{self.name}.index"
        with self._storage.open_new(index_path) as file:
            file.write(index)
        self._storage.sync([index_path, self._directory])
        fault_point("relation.segment.durable")
        return Segment(
            name=self.name,
            rows=self._rows,
            rows_bytes=self._rows_bytes,
            codes_bytes=self._rows * 8 if self._is_keyed else 0,
            index_bytes=len(index),
            index_digest=digest_of(index),
            min_code=self._first_code,
            max_code=self._last_code,
            is_keyed=self._is_keyed,
        )

    def abandon(self) -> None:
        """Close and remove everything written, also after :meth:`close`."""
        for file in self._open_files():
            # Closing flushes buffered rows, which may fail on a full disk. They are not needed any more.
            with suppress(OSError):
                file.close()
        for path in (*self._paths(), self._directory / f"{self.name}.index"):
            self._storage.delete(path)

    def _open_files(self) -> Iterable[IO[bytes]]:
        return [self._rows_file] if self._codes_file is None else [self._rows_file, self._codes_file]

    def _paths(self) -> list[Path]:
        kinds = ("rows", "codes") if self._is_keyed else ("rows",)
        return [self._directory / f"{self.name}.{kind}" for kind in kinds]

    def _index_bytes(self) -> bytes:
        fences = np.concatenate(self._fences) if self._fences else np.empty(0, np.int64)
        columns = [
            pa.array([fences], pa.list_(pa.int64())),
            pa.array([self._batch_rows], pa.list_(pa.int64())),
            pa.array([self._batch_offsets], pa.list_(pa.int64())),
            pa.array([self._batch_digests], pa.list_(pa.string())),
            pa.array([self._codes_digests], pa.list_(pa.string())),
            pa.array([self._row_sums.finish(self._rows_bytes)], pa.list_(pa.uint32())),
            pa.array([self._code_sums.finish(self._rows * 8 if self._is_keyed else 0)], pa.list_(pa.uint32())),
            pa.array([self._widest_values], pa.list_(pa.int64())),
        ]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, INDEX_SCHEMA) as stream:
            stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=INDEX_SCHEMA))
        return bytes(sink.getvalue())


class PageSums:
    """The checksums of the pages of a file, from its pieces as they are written.

    Examples
    --------
    >>> sums = PageSums(8)
    >>> sums.add(np.arange(1000))
    >>> sums.finish(8 + 8000).size
    2
    """

    def __init__(self, skipped_bytes: int) -> None:
        self._rest = np.empty(0, np.uint64)  # the last page, not whole yet
        self._sums: list[npt.NDArray[np.uint32]] = []
        self.add(np.zeros(_words(skipped_bytes), np.uint64))

    def add(self, data: Any) -> None:
        """Add the next piece of the file."""
        piece = np.frombuffer(data, np.uint8)
        _words(piece.size)
        words = piece.view(np.uint64)
        # Only the page that two pieces share is copied.
        missing = _PAGE_WORDS - self._rest.size
        if words.size < missing:
            self._rest = np.concatenate([self._rest, words])
            return
        whole = missing + (words.size - missing) // _PAGE_WORDS * _PAGE_WORDS
        self._sums.append(page_sums(np.concatenate([self._rest, words[:missing]])))
        self._sums.append(page_sums(words[missing:whole]))
        self._rest = words[whole:].copy()

    def finish(self, file_bytes: int) -> npt.NDArray[np.uint32]:
        """Return the checksums of a file of this size; what was not added counts as zeros."""
        pages = -(-file_bytes // PAGE_BYTES)
        done = sum(sums.size for sums in self._sums)
        left = np.zeros((pages - done) * _PAGE_WORDS, np.uint64)
        left[: self._rest.size] = self._rest
        return np.concatenate([*self._sums, page_sums(left)])


def _words(size_bytes: int) -> int:
    if size_bytes % 8:
        raise InternalError(f"A piece of {size_bytes} bytes of a segment is not a multiple of 8.")
    return size_bytes // 8
