"""One generation of a shared cache: an immutable file that any worker of a host maps.

::

    record batches of rows, sorted by join value, each an Arrow IPC message at a multiple of 64 bytes
    the slots of a ValueTable: code, first row, number of rows (0: known to have none), frequency
    a JSON footer, its length (8 bytes), and a mark that the file is whole (8 bytes)

A reader holds a shared lock on the file for as long as it has it mapped. A file that nobody has locked can be removed,
and then takes no space any more: so the files of a cache can be counted against a budget, whoever is killed when.
"""

import base64
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.kernels.sorted_codes import expand_ranges, group_by_block
from dovetail.kernels.value_table import MAX_COUNT, ValueTable

__all__ = ["Generation", "GenerationWriter"]

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_MARK = b"dovetail"
_LINE = 64
_MAX_LOAD = 0.6
FOOTER_BYTES = 4_096
"""More than a footer takes, but for its schema and its list of record batches."""


class Generation:
    """A generation that this process has mapped. Serves as a relation's reader for the values that it has."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock
        with pa.memory_map(str(path)) as file:
            data = file.read_buffer()
        tail = bytes(data[data.size - 16 :])
        if data.size < 16 or tail[8:] != _MARK:
            raise ValueError(f"{path} is not whole")
        footer_bytes = int.from_bytes(tail[:8], "little")
        footer = json.loads(bytes(data[data.size - 16 - footer_bytes : data.size - 16]))
        self.nbytes = int(data.size)
        self.version: int = footer["version"]
        self.num_rows: int = footer["rows"]
        self.schema: pa.Schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(footer["schema"])))
        slots = np.frombuffer(data, np.int64, footer["slots"], footer["slots_at"])
        self.values = ValueTable.over(slots, footer["values"], _MAX_LOAD)
        self._data = data
        self._places: list[list[int]] = footer["batches"]
        self._starts = np.concatenate([[0], np.cumsum([rows for _, _, rows in self._places])]).astype(np.int64)
        self._batches: list[pa.RecordBatch | None] = [None] * len(self._places)

    @classmethod
    def attach(cls, path: Path) -> "Generation | None":
        """Map a generation; None if it is gone, or was given up by its writer."""
        try:
            lock = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.fstat(lock).st_nlink:
                return cls(path, lock)
        except (OSError, ValueError, KeyError):
            os.close(lock)
            return None
        os.close(lock)
        return None

    def close(self) -> None:
        """Give the mapping up: from now on the file may be removed."""
        if self._lock is not None:
            self._batches, self._data, self.values = [], None, ValueTable(1)
            os.close(self._lock)
            self._lock = None

    # ---------------------------------------------------------------- as a reader

    def find(self, codes: Int64Array) -> Int64Array:
        """The slots of codes, -1 for those that it does not know."""
        return self.values.find(codes)

    def rows_of(self, found: Int64Array) -> tuple[Int64Array, npt.NDArray[np.int32]]:
        """The first row and the number of rows of values that it knows, by slot."""
        return self.values.rows_at(found), self.values.counts_at(found).astype(np.int32)

    def lookup(self, codes: Int64Array, *, in_order: bool = True) -> tuple[Int64Array, Int64Array]:
        """Pairs (which of ``codes``, where): all rows of the codes that it knows."""
        found = self.find(codes)
        known = np.flatnonzero(found >= 0)
        queries, rows = expand_ranges(*self.rows_of(found[known]))
        return known[queries], rows

    def count(self, codes: Int64Array) -> Int64Array:
        """The number of rows of each code, 0 for those that it does not know."""
        found = self.find(codes)
        counts = np.zeros(codes.size, np.int64)
        known = np.flatnonzero(found >= 0)
        counts[known] = self.values.counts_at(found[known])
        return counts

    def gather_ascending(self, positions: Int64Array) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows at ascending positions, in pieces."""
        if not positions.size:
            return
        numbers, offsets = group_by_block(positions, self._starts[:-1])
        for number, low, high in zip(numbers.tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            inside = positions[low:high] - self._starts[number]
            yield low, pc.take(self._batch(number), pa.array(inside), boundscheck=False)

    def _batch(self, number: int) -> pa.RecordBatch:
        batch = self._batches[number]
        if batch is None:
            offset, length, _ = self._places[number]
            message = pa.ipc.read_message(self._data.slice(offset, length))
            batch = self._batches[number] = pa.ipc.read_record_batch(message, self.schema)
        return batch


class GenerationWriter:
    """Writes a generation, never beyond its limit.

    Parameters
    ----------
    path
        A new file.
    limit_bytes
        The most bytes that it may have.
    values
        The most join values that will be added.
    schema, version
        The columns of the rows, and the relation's version that they are of.
    """

    def __init__(self, path: Path, limit_bytes: int, values: int, schema: pa.Schema, version: int) -> None:
        self._file: IO[bytes] = open(path, "xb")  # noqa: SIM115 -- closed by `finish`, or with the process
        self._limit_bytes = limit_bytes
        self._schema, self._version = schema, version
        self._table = ValueTable(max(1, values), _MAX_LOAD)
        self._batches: list[list[int]] = []
        self._rows = 0
        self._end = 0
        serialized = schema.serialize().size * 4 // 3 + 64
        self._overhead_bytes = self._table.nbytes + serialized + FOOTER_BYTES + _LINE

    @staticmethod
    def value_bytes(row_bytes: float, rows_per_value: float) -> float:
        """About what a value takes, with its rows and its slot."""
        return row_bytes * rows_per_value + 16 / _MAX_LOAD

    def add(self, codes: Int64Array, counts: Int64Array, frequencies: Int64Array, rows: pa.RecordBatch) -> bool:
        """Add values and their rows, which come in the same order; False if they do not fit: then nothing is added."""
        message = rows.serialize()
        listed = 64 * (len(self._batches) + 1)
        if self._end + message.size + _LINE + self._overhead_bytes + listed > self._limit_bytes:
            return False
        assert int(counts.max(initial=0)) <= MAX_COUNT, "more rows than a slot can count"
        self._table.put(codes, self._rows + np.cumsum(counts) - counts, counts, frequencies)
        if rows.num_rows:
            self._batches.append([self._write(message), message.size, rows.num_rows])
            self._rows += rows.num_rows
        return True

    def finish(self) -> int:
        """Write what is left and close the file; gives its size."""
        slots_at = self._write(self._table.slots)
        footer = json.dumps(
            {
                "version": self._version,
                "rows": self._rows,
                "values": len(self._table),
                "schema": base64.b64encode(self._schema.serialize().to_pybytes()).decode(),
                "slots_at": slots_at,
                "slots": self._table.slots.size,
                "batches": self._batches,
            }
        ).encode()
        self._file.write(footer + len(footer).to_bytes(8, "little") + _MARK)
        self._file.close()
        return self._end + len(footer) + 16

    def give_up(self) -> None:
        """Close the file without finishing it."""
        self._file.close()

    def _write(self, data: Any) -> int:
        """Write at the next multiple of 64 bytes, and give where that is."""
        padding = -self._end % _LINE
        self._file.write(b"\0" * padding)
        start = self._end + padding
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._end = start + view.nbytes
        return start
