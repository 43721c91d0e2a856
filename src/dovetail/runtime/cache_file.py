"""One generation of a shared cache: an immutable file that any worker of a host maps.

::

    record batches of rows, sorted by join value, each an Arrow IPC message at a multiple of 64 bytes
    the slots of a ValueTable: code, first row, number of rows (0: known to have none), frequency
    a JSON footer, its length (8 bytes), and a mark that the file is complete (8 bytes)

A reader holds a shared lock on the file while it has it mapped. A file without locks can be removed and then takes no
space, so the files of a cache can be counted against a budget even if workers are killed.
"""

import base64
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.arrays import BoolArray, Int32Array, Int64Array
from dovetail.joins.phases.row_source import joined
from dovetail.kernels.sorted_codes import expand_ranges, group_by_block
from dovetail.kernels.value_table import MAX_COUNT, ValueTable
from dovetail.relation.widths import fixed_row_bytes, row_widths, widest_row

__all__ = ["Generation", "GenerationWriter"]

_MARK = b"dovetail"
_LINE = 64
_MAX_LOAD = 0.6
FOOTER_BYTES = 4_096
"""Upper bound of a footer, without its schema and its list of record batches."""


class Generation:
    """A generation mapped by this process. It serves as a relation's reader for the values it has."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock
        with pa.memory_map(str(path)) as file:
            data = file.read_buffer()
        tail = bytes(data[data.size - 16 :])
        if data.size < 16 or tail[8:] != _MARK:
            raise ValueError(f"{path} is incomplete")
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
        self._widest: int | None = None

    @classmethod
    def attach(cls, path: Path) -> "Generation | None":
        """Map a generation; None if it is gone or was abandoned by its writer."""
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
        """Unmap the file; it may be removed from now on."""
        if self._lock is not None:
            self._batches, self._data, self.values = [], None, ValueTable(1)
            os.close(self._lock)
            self._lock = None

    # ---------------------------------------------------------------- as a reader

    def find(self, codes: Int64Array) -> Int64Array:
        """The slots of codes, -1 for unknown ones."""
        return self.values.find(codes)

    def rows_of(self, found: Int64Array) -> tuple[Int64Array, Int32Array]:
        """The first row and the number of rows of values, by slot."""
        return self.values.rows_at(found), self.values.counts_at(found).astype(np.int32)

    @property
    def row_limit(self) -> int:
        """One more than the highest row number."""
        return self.num_rows

    @property
    def widest(self) -> int:
        """Upper bound of the bytes of a row."""
        if self._widest is None:
            self._widest = max((widest_row(self._batch(number)) for number in range(len(self._places))), default=0)
        return self._widest

    def find_rows(self, codes: Int64Array) -> tuple[BoolArray, Int64Array, Int64Array]:
        """Whether each code is known, and the first row and number of rows of the known ones."""
        found = self.find(codes)
        is_known = found >= 0
        firsts, counts = np.zeros(codes.size, np.int64), np.zeros(codes.size, np.int64)
        known_firsts, known_counts = self.rows_of(found[is_known])
        firsts[is_known], counts[is_known] = known_firsts, known_counts
        return is_known, firsts, counts

    def rows_at(self, rows: Int64Array) -> pa.RecordBatch:
        """The rows with these ascending numbers."""
        return joined([batch for _, batch in self.gather_ascending(rows)], self.schema)

    def row_widths(self, rows: Int64Array) -> Int64Array | int:
        """Bytes of the rows with these ascending numbers, or one number if all rows are equally wide."""
        fixed = fixed_row_bytes(self.schema)
        if fixed is not None:
            return fixed
        if not rows.size:
            return np.empty(0, np.int64)
        numbers, offsets = group_by_block(rows, self._starts[:-1])
        widths = [
            row_widths(self._batch(number), rows[low:high] - self._starts[number])
            for number, low, high in zip(numbers.tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        ]
        return np.concatenate(widths) if widths else np.empty(0, np.int64)

    def lookup(self, codes: Int64Array, *, in_order: bool = True) -> tuple[Int64Array, Int64Array]:
        """Pairs (index into ``codes``, position) of all rows of the known codes."""
        found = self.find(codes)
        known = np.flatnonzero(found >= 0)
        queries, rows = expand_ranges(*self.rows_of(found[known]))
        return known[queries], rows

    def count(self, codes: Int64Array) -> Int64Array:
        """The number of rows per code, 0 for unknown ones."""
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
    """Writes a generation to a new file of at most `limit_bytes`, with at most `values` join values."""

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
        """The approximate size of a value with its rows and its slot."""
        return row_bytes * rows_per_value + 16 / _MAX_LOAD

    def add(self, codes: Int64Array, counts: Int64Array, frequencies: Int64Array, rows: pa.RecordBatch) -> bool:
        """Add values and their rows, in the same order; False, and nothing is added, if they do not fit."""
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
        """Write the rest and close the file; returns its size."""
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
        """Write at the next multiple of 64 bytes; returns that position."""
        padding = -self._end % _LINE
        self._file.write(b"\0" * padding)
        start = self._end + padding
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._end = start + view.nbytes
        return start
