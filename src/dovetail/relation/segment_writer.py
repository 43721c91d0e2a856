"""Writing one segment: rows that come sorted by code, in any batches, become three durable files.

Memory held is one record batch (about 8 MiB) whatever the size of the segment.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.errors import InternalError
from dovetail.faultpoints import fault_point
from dovetail.relation.files import sync_directory, write_durably
from dovetail.relation.format import FENCE_STRIDE, Segment, digest_of

MAX_BATCH_ROWS = 65_536
MAX_BATCH_BYTES = 8 * 2**20

INDEX_SCHEMA = pa.schema(
    [
        ("fences", pa.list_(pa.int64())),
        ("batch_rows", pa.list_(pa.int64())),
        ("batch_offsets", pa.list_(pa.int64())),
        ("batch_digests", pa.list_(pa.string())),
        ("codes_digests", pa.list_(pa.string())),
    ]
)

_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class SegmentWriter:
    """Writes the files of one segment into ``directory``; nothing refers to them until a manifest does."""

    def __init__(self, directory: Path, name: str, schema: pa.Schema, is_keyed: bool) -> None:
        if not directory.exists():
            directory.mkdir(parents=True, exist_ok=True)
            sync_directory(directory.parent)
        self._directory, self.name, self._schema, self._is_keyed = directory, name, schema, is_keyed
        self._rows_file: IO[bytes] = open(directory / f"{name}.rows", "xb")  # noqa: SIM115
        self._codes_file: IO[bytes] | None = open(directory / f"{name}.codes", "xb") if is_keyed else None  # noqa: SIM115
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

    def write(self, batch: pa.RecordBatch, codes: npt.NDArray[np.int64]) -> None:
        """Add rows whose codes ascend and are not below those already written."""
        if batch.num_rows == 0:
            return
        mean_row_bytes = max(1, int(batch.nbytes) // int(batch.num_rows))
        start = 0
        while start < batch.num_rows:
            # Cut where the record batch is full, not where the input's batches end: a scan in blocks of the same
            # size then reads whole record batches.
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
        if self._codes_file is not None:
            self._write_codes(codes)
        self._batch_rows.append(batch.num_rows)
        self._rows += batch.num_rows
        fault_point("relation.segment.batch")

    def _write_codes(self, codes: npt.NDArray[np.int64]) -> None:
        assert self._codes_file is not None
        if (self._rows and codes[0] < self._last_code) or np.any(codes[1:] < codes[:-1]):
            raise InternalError(f"rows of segment {self.name} did not come in the order of their codes.")
        if self._rows == 0:
            self._first_code = int(codes[0])
        self._last_code = int(codes[-1])
        self._fences.append(codes[-self._rows % FENCE_STRIDE :: FENCE_STRIDE])
        self._codes_digests.append(digest_of(codes))
        self._codes_file.write(codes.data)

    def close(self) -> Segment | None:
        """Make the files durable and describe them; None, and no files, if there were no rows."""
        self._flush()
        if self._rows == 0:
            self.abandon()
            return None
        self._rows_bytes += self._rows_file.write(_END_OF_STREAM)
        for file in self._open_files():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        fault_point("relation.segment.rows_durable")
        index = self._index_bytes()
        write_durably(self._directory / f"{self.name}.index", index)
        sync_directory(self._directory)
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
        """Close and remove what was written so far, or all of it after :meth:`close`."""
        for file in self._open_files():
            # What still waits to be written is not wanted any more: it does not matter that it may not fit.
            with suppress(OSError):
                file.close()
            Path(file.name).unlink(missing_ok=True)
        (self._directory / f"{self.name}.index").unlink(missing_ok=True)

    def _open_files(self) -> Iterable[IO[bytes]]:
        return [self._rows_file] if self._codes_file is None else [self._rows_file, self._codes_file]

    def _index_bytes(self) -> bytes:
        fences = np.concatenate(self._fences) if self._fences else np.empty(0, np.int64)
        columns = [
            pa.array([fences], pa.list_(pa.int64())),
            pa.array([self._batch_rows], pa.list_(pa.int64())),
            pa.array([self._batch_offsets], pa.list_(pa.int64())),
            pa.array([self._batch_digests], pa.list_(pa.string())),
            pa.array([self._codes_digests], pa.list_(pa.string())),
        ]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, INDEX_SCHEMA) as stream:
            stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=INDEX_SCHEMA))
        return bytes(sink.getvalue())
