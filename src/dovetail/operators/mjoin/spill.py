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
from dovetail.operators.mjoin.chunk import Chunk, Int64Array, Tuples, UInt8Array
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
        "bytes", "departure", "done", "file", "level", "max_arrival", "max_low", "min_low", "number", "partition",
        "rows", "serial",
    )  # fmt: skip

    def __init__(self, chunk: Chunk, file: Path, number: int, departure: int, partition: int) -> None:
        self.serial = chunk.serial
        self.partition = partition
        self.file = file
        self.number = number
        self.rows = len(chunk)
        self.bytes = chunk.nbytes
        self.departure = departure
        self.max_arrival = chunk.max_arrival
        self.min_low, self.max_low = chunk.min_low, chunk.max_low
        self.done: UInt8Array | None = chunk.done
        self.level = chunk.level

    @property
    def resident_bytes(self) -> int:
        """Bytes that stay in memory."""
        return 0 if self.done is None else self.done.nbytes


class SpillStore:
    """The files below the spill directory."""

    def __init__(self, spec: MJoinSpec) -> None:
        self._spec = spec
        self._pieces_per_file: dict[Path, int] = {}
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

    def read_table(self, piece: Piece) -> pa.RecordBatch:
        """The piece's record batch, in memory of its own."""
        try:
            with pa.OSFile(str(piece.file), "rb") as file:
                batch = pa.ipc.open_file(file).get_batch(piece.number)
        except (OSError, pa.ArrowInvalid) as error:
            raise StateError(
                f"The spill file {str(piece.file)!r} cannot be read: {error}.",
                hint="Restore the last snapshot; spill files are not kept across restarts.",
            ) from error
        self.bytes_read += int(batch.nbytes)
        return batch

    def load(self, i: int, piece: Piece) -> Chunk:
        """The piece as a chunk; its done bits are the piece's own, so that setting them lasts."""
        tuples = tuples_of(self._spec, i, self.read_table(piece))
        if piece.rows != len(tuples.arrivals):
            raise StateError(f"The spill file {str(piece.file)!r} holds {len(tuples.arrivals)} rows, not {piece.rows}.")
        chunk = Chunk.of_ordered(piece.serial, tuples, self._spec.partitions, piece.level, piece.departure)
        chunk.done = piece.done
        return chunk

    def drop(self, piece: Piece) -> None:
        """Forget a piece, and delete its file with the last one."""
        self._pieces_per_file[piece.file] -= 1
        if self._pieces_per_file[piece.file] == 0:
            del self._pieces_per_file[piece.file]
            piece.file.unlink(missing_ok=True)


def chunk_table(spec: MJoinSpec, i: int, chunk: Chunk) -> pa.RecordBatch:
    """A chunk's rows with codes, stamps and times in front, in stored order; done bits are not part of it."""
    names = [spec.code_columns[k] for k in spec.input_attributes[i]] + ["__arrival"]
    arrays = [pa.array(codes) for codes in chunk.codes] + [pa.array(chunk.arrivals)]
    if chunk.low is not None:
        names += ["__low", "__high"]
        arrays += [pa.array(chunk.low), pa.array(chunk.high)]
    fields = [pa.field(name, pa.int64()) for name in names] + list(chunk.rows.schema)
    return pa.RecordBatch.from_arrays(arrays + chunk.rows.columns, schema=pa.schema(fields))


def tuples_of(spec: MJoinSpec, i: int, batch: pa.RecordBatch) -> Tuples:
    """What `chunk_table` made a batch of."""
    attributes = len(spec.input_attributes[i])
    has_times = spec.window is not None
    codes = tuple(_integers(batch.column(k)) for k in range(attributes))
    arrivals = _integers(batch.column(attributes))
    low = _integers(batch.column(attributes + 1)) if has_times else None
    high = _integers(batch.column(attributes + 2)) if has_times else None
    if low is not None and high is not None and np.array_equal(low, high):
        high = low
    first = attributes + 1 + 2 * has_times
    schema = spec.schemas[spec.names[i]]
    rows = pa.RecordBatch.from_arrays(batch.columns[first:], schema=schema)
    return Tuples(rows, codes, arrivals, low, high, None)


def _integers(column: pa.Array) -> Int64Array:
    integers: Int64Array = column.to_numpy(zero_copy_only=True)
    return integers
