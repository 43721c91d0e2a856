"""Chunks on disk: one Arrow IPC file per flush and input, one record batch per piece of a hash partition.

A file is written under a temporary name, flushed to the disk's own queue and renamed, so a flush that runs out of space
leaves nothing behind and everything in memory. Files are never changed; one is deleted when its last piece is dropped.

Where the operator's state is stored elsewhere too (a runtime's durable files), a piece lies there and not here: it is
read from the stored table by name, and what was written here is deleted. So taking a stored state over costs nothing
for what is on disk, however much that is.
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

from dovetail.errors import SpillError, StateError
from dovetail.faultpoints import fault_point
from dovetail.kernels.bucket_index import partitions_of
from dovetail.operators.mjoin.chunk import Chunk, Int64Array, Tuples, UInt8Array, get_bits, set_bits
from dovetail.operators.mjoin.spec import MJoinSpec

__all__ = ["FACTS", "Fetch", "Piece", "SpillStore", "StoredTable", "chunk_table", "tuples_of"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


Fetch = Callable[[str], pa.Table]
"""Gives a stored table by its name; mapped where it can be."""


class StoredTable(NamedTuple):
    """How much a stored table holds, what is no longer needed of it included."""

    pieces: int
    rows: int


FACTS = (
    "serial", "level", "departure", "partition", "rows", "bytes", "max_arrival", "min_low", "max_low", "min_code",
    "max_code",
)  # fmt: skip
"""What is known of a piece besides where it lies."""


def _named(facts: Sequence[int]) -> dict[str, Any]:
    return dict(zip(FACTS, facts, strict=True))


@dataclass(slots=True)
class Piece:
    """Tuples of one hash partition of one input on disk; what is resident of them is one bit each where needed.

    Attributes
    ----------
    serial, level, departure, rows, bytes, max_arrival, min_low, max_low
        As of the chunk that it was.
    min_code, max_code
        The least and the greatest code of its first attribute.
    partition
        Of the hash.
    file
        The spill file, or None where the piece lies in a stored table.
    table
        The name of the stored table.
    number
        Which record batch of the file or of the table it is.
    done
        One bit per row of a preserved input.
    """

    serial: int
    level: int
    departure: int
    partition: int
    rows: int
    bytes: int
    max_arrival: int
    min_low: int
    max_low: int
    min_code: int
    max_code: int
    number: int
    file: Path | None = None
    table: str = ""
    done: UInt8Array | None = None

    @classmethod
    def of(cls, chunk: Chunk, file: Path, number: int, departure: int, partition: int) -> "Piece":
        """A chunk that was written to a spill file."""
        # The rows may be a stretch of a larger chunk, whose buffers they share.
        size = chunk.nbytes - int(chunk.rows.get_total_buffer_size()) + int(chunk.rows.nbytes)
        codes = int(chunk.codes[0].min()), int(chunk.codes[0].max())
        facts = (chunk.serial, chunk.level, departure, partition, len(chunk), size, *chunk.extremes, *codes)
        return cls(**_named(facts), number=number, file=file, done=chunk.done)

    def facts(self) -> list[int]:
        """The values of `FACTS`; the inverse of `stored`."""
        return [getattr(self, name) for name in FACTS]

    @classmethod
    def stored(cls, facts: Sequence[int], table: str, number: int) -> "Piece":
        """A piece in a stored table."""
        return cls(**_named(facts), number=number, table=table)

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
        self._tables: dict[str, list[pa.RecordBatch]] = {}
        self._fetch: Fetch | None = None
        self.bytes_read = 0

    def write(self, i: int, chunks: Iterable[Chunk], departure: int) -> tuple[list[Piece], int]:
        """Write chunks, each of one partition, into one file; gives their pieces and the bytes written."""
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
                f"The spill directory {str(directory)!r} {reason}: {error}. No tuple was lost: those accepted so far "
                "are still in memory.",
                hint="Make room there or raise the budget, then go on.",
            ) from error
        self._pieces_per_file[path] = len(pieces)
        return pieces, written

    def fetch_from(self, fetch: Fetch) -> None:
        """Read stored tables by this from now on."""
        self._fetch = fetch
        self._tables.clear()

    def refer(self, piece: Piece, table: str, number: int) -> None:
        """The piece is stored: read it from there, and do without the spill file."""
        self.drop(piece)
        piece.file, piece.table, piece.number = None, table, number

    def mapped(self, piece: Piece) -> pa.RecordBatch:
        """The piece's record batch, mapped: only what is looked at is read, and none of it is ours."""
        if piece.file is None:
            batches = self._tables.get(piece.table)
            if batches is None:
                assert self._fetch is not None
                batches = self._tables[piece.table] = self._fetch(piece.table).to_batches()
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
        self._tables.clear()

    def drop(self, piece: Piece) -> None:
        """Forget a piece, and delete its spill file with the last one."""
        if piece.file is None:
            return
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
