"""Chunks on disk: one Arrow IPC file per flush and input, one record batch per piece of a hash partition.

A file is written under a temporary name and renamed when complete, so a flush that runs out of space leaves no file,
and all tuples in memory. Files are immutable; one is deleted when its last piece is dropped.

If a runtime also stores the operator's state, pieces are read from the stored tables by name and their spill files are
deleted. Restoring such a state costs nothing for the tuples on disk.
"""

import errno
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import Int32Array, Int64Array, UInt8Array
from dovetail.core.errors import SpillError, StateError
from dovetail.core.faultpoints import fault_point
from dovetail.joins.multiway.chunk import Chunk, Tuples, get_bits, set_bits
from dovetail.joins.multiway.spec import MJoinSpec
from dovetail.kernels.bucket_index import partitions_of
from dovetail.kernels.time_index import are_runs_in_time_order

__all__ = ["FACTS", "Fetch", "Piece", "SpillStore", "StoredTable", "chunk_table", "tuples_of"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


Fetch = Callable[[str], pa.Table]
"""Returns a stored table by name, mapped if possible."""


class StoredTable(NamedTuple):
    """The size of a stored table, including pieces no longer needed."""

    pieces: int
    rows: int


FACTS = (
    "serial", "level", "departure", "partition", "rows", "bytes", "max_arrival", "min_low", "max_low", "min_code",
    "max_code",
)  # fmt: skip
"""The metadata of a piece, without its location."""


def _named(facts: Sequence[int]) -> dict[str, Any]:
    return dict(zip(FACTS, facts, strict=True))


@dataclass(slots=True)
class Piece:
    """Tuples of one hash partition of one input on disk; only the done bits are in memory."""

    serial: int  # this and the next seven: as of the chunk that was written
    level: int
    departure: int
    partition: int
    rows: int
    bytes: int
    max_arrival: int
    min_low: int
    max_low: int
    min_code: int  # of the first attribute
    max_code: int
    number: int  # of the record batch in the file or table
    file: Path | None = None  # None if the piece lies in a stored table
    table: str = ""  # the name of the stored table
    done: UInt8Array | None = None  # one bit per row of a preserved input
    saved_done: UInt8Array | None = None  # those of them that are stored

    @classmethod
    def of(cls, chunk: Chunk, file: Path, number: int, departure: int, partition: int) -> "Piece":
        """A chunk that was written to a spill file."""
        # The rows may be a slice that shares the buffers of a larger chunk.
        size = chunk.nbytes - int(chunk.rows.get_total_buffer_size()) + int(chunk.rows.nbytes)
        codes = int(chunk.codes[0].min()), int(chunk.codes[0].max())
        facts = (chunk.serial, chunk.level, departure, partition, len(chunk), size, *chunk.extremes, *codes)
        return cls(**_named(facts), number=number, file=file).with_done(chunk.done)

    def with_done(self, done: UInt8Array | None) -> "Piece":
        """This piece with done bits, none of which is stored."""
        self.done, self.saved_done = done, None if done is None else np.zeros_like(done)
        return self

    def facts(self) -> list[int]:
        """The values of `FACTS`; the inverse of `stored`."""
        return [getattr(self, name) for name in FACTS]

    @classmethod
    def stored(cls, facts: Sequence[int], table: str, number: int) -> "Piece":
        """A piece in a stored table."""
        return cls(**_named(facts), number=number, table=table)

    @property
    def resident_bytes(self) -> int:
        """Bytes kept in memory."""
        return 0 if self.done is None else 2 * self.done.nbytes


class SpillStore:
    """The files in the spill directory."""

    def __init__(self, spec: MJoinSpec) -> None:
        self._spec = spec
        self._pieces_per_file: dict[Path, int] = {}
        self._open: dict[Path, pa.ipc.RecordBatchFileReader] = {}
        self._tables: dict[str, list[pa.RecordBatch]] = {}
        self.fetch: Fetch | None = None
        """Returns a stored table by name; None as long as nothing is stored."""
        self.bytes_read = 0

    def write(self, i: int, chunks: Iterable[Chunk], departure: int) -> tuple[list[Piece], int]:
        """Write chunks, each of one partition, to one file; returns their pieces and the bytes written."""
        directory = self._spec.spill_directory
        assert directory is not None
        pieces: list[Piece] = []
        chunks = iter(chunks)
        first = next(chunks, None)
        if first is None:
            return [], 0
        name = f"{i}-{first.serial:012d}.arrow"
        path, unfinished = directory / name, directory / (name + ".unfinished")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            schema = chunk_table(self._spec, i, first).schema
            with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_file(file, schema) as writer:
                for number, chunk in enumerate(chain([first], chunks)):
                    writer.write_batch(chunk_table(self._spec, i, chunk))
                    partition = int(partitions_of(chunk.codes[0][:1], self._spec.partitions)[0])
                    pieces.append(Piece.of(chunk, path, number, departure, partition))
                    fault_point("mjoin.spill.begun")
            written = unfinished.stat().st_size
            unfinished.rename(path)
            fault_point("mjoin.spill.written")
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            reason = "is full" if error.errno in _FULL or "file too large" in str(error).lower() else "failed"
            raise SpillError(
                f"The spill directory {str(directory)!r} {reason}: {error}. No tuple was lost: all accepted tuples are "
                "still in memory.",
                hint="Free space there or raise the budget, then continue.",
            ) from error
        self._pieces_per_file[path] = len(pieces)
        return pieces, written

    def fetch_from(self, fetch: Fetch) -> None:
        """Read stored tables with this function from now on."""
        self.fetch = fetch
        self._tables.clear()

    def refer(self, piece: Piece, table: str, number: int) -> None:
        """Read the piece from a stored table, and drop it from its spill file."""
        self.drop(piece)
        piece.file, piece.table, piece.number = None, table, number

    def mapped(self, piece: Piece) -> pa.RecordBatch:
        """The piece's record batch, mapped: only what is accessed is read, and it does not count as held memory."""
        if piece.file is None:
            batches = self._tables.get(piece.table)
            if batches is None:
                assert self.fetch is not None
                batches = self._tables[piece.table] = self.fetch(piece.table).to_batches()
            batch = batches[piece.number]
        else:
            batch = self._spilled(piece.file, piece.number)
        if piece.rows != batch.num_rows:
            where = f"stored table {piece.table!r}" if piece.file is None else f"spill file {str(piece.file)!r}"
            raise StateError(f"The {where} holds {batch.num_rows} rows, not {piece.rows}.")
        return batch

    def _spilled(self, file: Path, number: int) -> pa.RecordBatch:
        try:
            reader = self._open.get(file)
            if reader is None:
                reader = self._open[file] = pa.ipc.open_file(pa.memory_map(str(file), "rb"))
            return reader.get_batch(number)
        except (OSError, pa.ArrowInvalid) as error:
            raise StateError(
                f"The spill file {str(file)!r} cannot be read: {error}.",
                hint="Restore the last snapshot; spill files are not kept across restarts.",
            ) from error

    def _read(self, piece: Piece, rows: Int32Array) -> pa.RecordBatch:
        """A copy of rows of a piece."""
        mapped, places = self.mapped(piece), pa.array(rows)
        batch = pa.RecordBatch.from_arrays([column.take(places) for column in mapped.columns], schema=mapped.schema)
        self.bytes_read += int(batch.nbytes)
        return batch

    def load(self, i: int, piece: Piece, start: int = 0, stop: int | None = None) -> Chunk:
        """Rows of a piece as a chunk; `keep_done` writes back the done bits set in it."""
        return self._chunk_of(i, piece, np.arange(start, piece.rows if stop is None else stop, dtype=np.int32))

    def load_rows(self, i: int, piece: Piece, rows: Int32Array) -> Chunk:
        """Some rows of a piece, in ascending order, as a chunk; see `load`."""
        return self._chunk_of(i, piece, rows)

    def _chunk_of(self, i: int, piece: Piece, rows: Int32Array) -> Chunk:
        tuples = tuples_of(self._spec, i, self._read(piece, rows))
        if piece.done is not None:
            tuples = tuples._replace(done=get_bits(piece.done, rows))
        # A piece may have been stored before rows of a code were in the order of their times.
        is_timed = tuples.low is not None and are_runs_in_time_order(tuples.codes[0], tuples.low)
        return Chunk.of_ordered(
            piece.serial, tuples, self._spec.partitions, piece.level, piece.departure, is_timed=is_timed
        )

    @staticmethod
    def keep_done(piece: Piece, start: int, chunk: Chunk, rows: Int32Array | None = None) -> None:
        """Write back the done bits of a loaded part: all rows from `start`, or these rows."""
        if piece.done is not None and chunk.done is not None:
            places = np.flatnonzero(get_bits(chunk.done, None, len(chunk)))
            set_bits(piece.done, start + places if rows is None else rows[places])

    def codes_of(self, piece: Piece) -> Int64Array:
        """The codes of the first attribute, mapped; what a caller touches of them it reports to `bytes_read`."""
        return _integers(self.mapped(piece).column(0))

    def arrivals_of(self, i: int, piece: Piece) -> Int64Array:
        """The arrival stamps of a piece, which are read whole."""
        self.bytes_read += 8 * piece.rows
        return _integers(self.mapped(piece).column(len(self._spec.input_attributes[i])))

    def release(self) -> None:
        """Unmap all files."""
        self._open.clear()
        self._tables.clear()

    def drop(self, piece: Piece) -> None:
        """Drop a piece; its spill file is deleted with the last one."""
        if piece.file is None:
            return
        self._pieces_per_file[piece.file] -= 1
        if self._pieces_per_file[piece.file] == 0:
            del self._pieces_per_file[piece.file]
            self._open.pop(piece.file, None)
            piece.file.unlink(missing_ok=True)


def chunk_table(spec: MJoinSpec, i: int, chunk: Chunk) -> pa.RecordBatch:
    """A chunk's rows with codes, stamps and times first, in stored order, without done bits."""
    names = [spec.code_columns[k] for k in spec.input_attributes[i]] + ["__arrival"]
    arrays = [pa.array(codes) for codes in chunk.codes] + [pa.array(chunk.arrivals)]
    if chunk.low is not None:
        names.append("__low")
        arrays.append(pa.array(chunk.low))
    if chunk.high is not chunk.low:
        names.append("__high")
        arrays.append(pa.array(chunk.high))
    fields = [pa.field(name, pa.int64()) for name in names] + list(chunk.rows.schema)
    return pa.RecordBatch.from_arrays(arrays + chunk.rows.columns, schema=pa.schema(fields))


def tuples_of(spec: MJoinSpec, i: int, batch: pa.RecordBatch) -> Tuples:
    """The inverse of `chunk_table`."""
    attributes = len(spec.input_attributes[i])
    has_times = spec.window is not None
    codes = tuple(_integers(batch.column(k)) for k in range(attributes))
    arrivals = _integers(batch.column(attributes))
    low = high = _integers(batch.column(attributes + 1)) if has_times else None
    has_both = "__high" in batch.schema.names
    if has_both:
        high = _integers(batch.column(attributes + 2))
    first = attributes + 1 + has_times + has_both
    schema = spec.schemas[spec.names[i]]
    rows = pa.RecordBatch.from_arrays(batch.columns[first:], schema=schema)
    return Tuples(rows, codes, arrivals, low, high, None)


def _integers(column: pa.Array) -> Int64Array:
    integers: Int64Array = column.to_numpy(zero_copy_only=True)
    return integers
