"""Chunks on disk: one Arrow IPC file per flush and input, one record batch per piece of a hash partition.

A file is written under a temporary name, flushed to the disk's own queue and renamed, so a flush that runs out of space
leaves nothing behind and everything in memory. Files are never changed; one is deleted when its last piece is dropped.
"""

import errno
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa

from dovetail.errors import DovetailError, StateError
from dovetail.kernels.bucket_index import partitions_of
from dovetail.operators.mjoin.chunk import Chunk, Int64Array, Tuples, UInt8Array, get_bits, set_bits
from dovetail.operators.mjoin.spec import MJoinSpec

__all__ = ["Piece", "SpillError", "SpillStore", "chunk_table", "tuples_of"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SpillError(DovetailError, OSError):
    """The spill directory cannot take what memory has no room for; the tuples are still in memory.

    What to do: make room there, or raise the budget, and offer the rest of the batch again:
    ``metrics.tuples_in`` tells how many tuples were accepted.

    Examples
    --------
    >>> raise SpillError("The spill directory 'spill' is full.")
    Traceback (most recent call last):
    dovetail.operators.mjoin.spill.SpillError: The spill directory 'spill' is full.
    """


class Piece:
    """Tuples of one hash partition of one input on disk; what is resident of them is one bit each where needed."""

    __slots__ = (
        "bytes", "departure", "done", "file", "level", "max_arrival", "max_code", "max_low", "min_code", "min_low",
        "number", "partition", "rows", "serial",
    )  # fmt: skip

    def __init__(self, chunk: Chunk, file: Path, number: int, departure: int, partition: int) -> None:
        self.serial = chunk.serial
        self.partition = partition
        self.file = file
        self.number = number
        self.rows = len(chunk)
        # The rows may be a stretch of a larger chunk, whose buffers they share.
        self.bytes = chunk.nbytes - int(chunk.rows.get_total_buffer_size()) + int(chunk.rows.nbytes)
        self.departure = departure
        self.max_arrival = chunk.max_arrival
        self.min_low, self.max_low = chunk.min_low, chunk.max_low
        self.min_code, self.max_code = int(chunk.codes[0].min()), int(chunk.codes[0].max())
        self.done: UInt8Array | None = chunk.done
        self.level = chunk.level

    @property
    def extremes(self) -> tuple[int, int, int]:
        """As of the chunk."""
        return self.max_arrival, self.min_low, self.max_low

    @property
    def resident_bytes(self) -> int:
        """Bytes that stay in memory."""
        return 0 if self.done is None else self.done.nbytes


class SpillStore:
    """The files below the spill directory."""

    def __init__(self, spec: MJoinSpec) -> None:
        self._spec = spec
        self._pieces_per_file: dict[Path, int] = {}
        self._open: dict[Path, pa.ipc.RecordBatchFileReader] = {}
        self.bytes_read = 0

    def write(self, i: int, chunks: Iterable[Chunk], departure: int) -> tuple[list[Piece], int]:
        """Write chunks, each of one partition, into one file; gives their pieces and the bytes written."""
        directory = self._spec.spill_directory
        assert directory is not None
        pieces: list[Piece] = []
        chunks = iter(chunks)
        first = next(chunks)
        name = f"{i}-{first.serial:012d}.arrow"
        path, unfinished = directory / name, directory / (name + ".unfinished")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            schema = chunk_table(self._spec, i, first).schema
            with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_file(file, schema) as writer:
                for number, chunk in enumerate(chain([first], chunks)):
                    writer.write_batch(chunk_table(self._spec, i, chunk))
                    partition = int(partitions_of(chunk.codes[0][:1], self._spec.partitions)[0])
                    pieces.append(Piece(chunk, path, number, departure, partition))
            written = unfinished.stat().st_size
            unfinished.rename(path)
        except OSError as error:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)
            reason = "is full" if error.errno in _FULL or "file too large" in str(error).lower() else "failed"
            raise SpillError(
                f"The spill directory {str(directory)!r} {reason}: {error}. No tuple was lost: those accepted so far "
                "are still in memory.",
                hint="Make room there or raise the budget, then go on.",
            ) from error
        self._pieces_per_file[path] = len(pieces)
        return pieces, written

    def mapped(self, piece: Piece) -> pa.RecordBatch:
        """The piece's record batch, mapped: only what is looked at is read, and none of it is ours."""
        try:
            reader = self._open.get(piece.file)
            if reader is None:
                reader = self._open[piece.file] = pa.ipc.open_file(pa.memory_map(str(piece.file), "rb"))
            batch = reader.get_batch(piece.number)
        except (OSError, pa.ArrowInvalid) as error:
            raise StateError(
                f"The spill file {str(piece.file)!r} cannot be read: {error}.",
                hint="Restore the last snapshot; spill files are not kept across restarts.",
            ) from error
        if piece.rows != batch.num_rows:
            raise StateError(f"The spill file {str(piece.file)!r} holds {batch.num_rows} rows, not {piece.rows}.")
        return batch

    def read_table(self, piece: Piece, start: int = 0, stop: int | None = None) -> pa.RecordBatch:
        """Rows of a piece, in memory of their own."""
        mapped = self.mapped(piece)
        rows = pa.array(np.arange(start, mapped.num_rows if stop is None else stop))
        batch = pa.RecordBatch.from_arrays([column.take(rows) for column in mapped.columns], schema=mapped.schema)
        self.bytes_read += int(batch.nbytes)
        return batch

    def load(self, i: int, piece: Piece, start: int = 0, stop: int | None = None) -> Chunk:
        """Rows of a piece as a chunk; `keep_done` gives the done bits back that were set meanwhile."""
        tuples = tuples_of(self._spec, i, self.read_table(piece, start, stop))
        if piece.done is not None:
            done = get_bits(piece.done, np.arange(start, start + len(tuples.arrivals)))
            tuples = tuples._replace(done=done)
        return Chunk.of_ordered(piece.serial, tuples, self._spec.partitions, piece.level, piece.departure)

    @staticmethod
    def keep_done(piece: Piece, start: int, chunk: Chunk) -> None:
        """Take over the done bits of a loaded part."""
        if piece.done is not None and chunk.done is not None:
            set_bits(piece.done, start + np.flatnonzero(get_bits(chunk.done, None, len(chunk))))

    def release(self) -> None:
        """Unmap all files."""
        self._open.clear()

    def drop(self, piece: Piece) -> None:
        """Forget a piece, and delete its file with the last one."""
        self._pieces_per_file[piece.file] -= 1
        if self._pieces_per_file[piece.file] == 0:
            del self._pieces_per_file[piece.file]
            self._open.pop(piece.file, None)
            piece.file.unlink(missing_ok=True)


def chunk_table(spec: MJoinSpec, i: int, chunk: Chunk) -> pa.RecordBatch:
    """A chunk's rows with codes, stamps and times in front, in stored order; done bits are not part of it."""
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
    """What `chunk_table` made a batch of."""
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
