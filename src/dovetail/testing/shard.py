"""A relation's shard in memory, with codes chosen by the test.

It has the interface of `dovetail.relation.ShardReader`, needs no disk, and is stricter: the rows of a block are wiped
when the next block is read, as the buffer of a real reader is overwritten, so an operator that keeps a view of a block
finds zeros. Codes may collide, and rows may be marked deleted.

Examples
--------
>>> table = pa.table({"k": ["x", "y", "x"], "v": [1, 2, 3]})
>>> shard = MemoryShard(table, codes=[7, 7, 3])
>>> block = shard.read_block(0, 2)
>>> block.codes.tolist(), block.rows.column("v").to_pylist()
([3, 7], [3, 1])
>>> queries, positions = shard.lookup(np.array([7, 5]))
>>> queries.tolist(), positions.tolist(), shard.gather(positions).column("v").to_pylist()
([0, 0], [1, 2], [1, 2])
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.errors import PlanError
from dovetail.kernels.sorted_codes import expand_ranges
from dovetail.relation.format import ShardStats
from dovetail.relation.io import Disk
from dovetail.relation.reads.read_costs import ReadCosts
from dovetail.relation.widths import fixed_row_bytes, row_widths, widest_row
from dovetail.testing.batches import CodeOf
from dovetail.testing.rows import Row

__all__ = ["MemoryBlock", "MemoryShard"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """The live rows at positions ``[start, stop)`` and their codes; valid until the next block is read."""

    start: int
    stop: int
    codes: Int64Array
    rows: pa.RecordBatch

    @property
    def nbytes(self) -> int:
        return int(self.rows.nbytes) + self.codes.nbytes


class MemoryShard:
    """A shard held in memory, sorted by code like a real one; ``block_reads`` lists ``(start, stop)`` of every block
    read.

    Parameters
    ----------
    table, codes
        The relation's rows and their codes; ``None`` if the key has a NULL.
    columns
        The columns to return; ``None``: all.
    deleted
        Numbers of rows of ``table`` that are marked deleted: they keep a position and are never returned.
    include_null_keys
        Whether rows without a code have positions, after all others and with code 0; for joins without equality.
    fence_stride
        The granularity of `locate`: ranges start and end at multiples of it.
    segments
        The segment number of each row of ``table``; None: a single segment. Each segment is sorted by code.
    disk
        A disk to which every block and row read is reported, such as a virtual `SimulatedDisk`.
    batch_rows
        The rows per record batch within which blocks are read in place; None: blocks are copies.
    """

    def __init__(
        self,
        table: pa.Table,
        codes: Sequence[int | None],
        columns: Sequence[str] | None = None,
        deleted: Collection[int] = (),
        include_null_keys: bool = False,
        fence_stride: int = 3,
        segments: Sequence[int] | None = None,
        disk: Disk | None = None,
        version: int = 1,
        batch_rows: int | None = None,
    ) -> None:
        if len(codes) != table.num_rows:
            raise ValueError(f"{table.num_rows} rows have {len(codes)} codes.")
        segment_of = [0] * len(codes) if segments is None else list(segments)
        keyed = sorted((segment_of[row], code, row) for row, code in enumerate(codes) if code is not None)
        unkeyed = [(0, 0, row) for row, code in enumerate(codes) if code is None and include_null_keys]
        order = [row for _, _, row in keyed + unkeyed]
        projected = table if columns is None else table.select(columns)
        self.schema: pa.Schema = projected.schema
        self._rows = _one_batch(projected.take(pa.array(order, pa.int64())))
        self._codes = np.array([code for _, code, _ in keyed + unkeyed], np.int64)
        numbers = np.array([number for number, _, _ in keyed], np.int64)
        # Where each segment starts, and where the last one ends.
        self._bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(keyed)] if keyed else [0, 0]
        self._disk = disk
        self._batch_rows = batch_rows
        self.absent, self.costs = 0.0, None if disk is not None else ReadCosts()
        self.version, self.number = version, 0
        self._keyed_rows = len(keyed)
        self._is_live = np.array([row not in deleted for row in order], np.bool_)
        self._fence_stride = fence_stride
        self._lent = np.empty(0, np.uint8)
        self.num_rows = len(order)
        self.live_rows = int(self._is_live.sum())
        self.block_reads: list[tuple[int, int]] = []
        live_codes = self._codes[: self._keyed_rows][self._is_live[: self._keyed_rows]]
        _, multiplicities = np.unique(live_codes, return_counts=True)
        self.stats = ShardStats(
            rows=self.live_rows,
            bytes=int(self._rows.nbytes),
            distinct_codes=multiplicities.size,
            max_multiplicity=int(multiplicities.max(initial=0)),
            null_key_rows=self.live_rows - live_codes.size,
        )

    @classmethod
    def of_rows(cls, rows: Sequence[Row], schema: pa.Schema, code_of: CodeOf) -> Self:
        """A shard of plain rows, coded by a function such as `colliding_code`."""
        table = pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
        return cls(table, [code_of(row) for row in rows])

    @property
    def disk(self) -> Disk | None:
        return self._disk

    @property
    def io_mode(self) -> Literal["map"]:
        return "map"

    @property
    def row_bytes(self) -> float:
        """Mean bytes of a row in memory."""
        return self._rows.nbytes / self.num_rows if self.num_rows else 0.0

    @property
    def num_segments(self) -> int:
        """The number of sorted runs of rows."""
        return len(self._bounds) - 1

    @property
    def reads_in_place(self) -> bool:
        """Whether a block within a record batch takes no memory."""
        return self._batch_rows is not None and self._disk is None and self.live_rows == self.num_rows

    def rows_in_place(self, start: int) -> int:
        """How many rows from a position are in the same record batch."""
        assert self._batch_rows is not None
        return self._batch_rows - start % self._batch_rows

    @property
    def index_bytes(self) -> int:
        """Bytes that a real reader would keep resident: every ``fence_stride``-th code."""
        return self._codes[:: self._fence_stride].nbytes

    def read_block(self, start: int, rows: int) -> MemoryBlock:
        """Read the live rows at positions ``[start, start + rows)``, clipped at the end; wipes the previous block."""
        if rows < 1 or not 0 <= start <= self.num_rows:
            raise PlanError(f"A block of {rows} rows at {start} is not in a shard of {self.num_rows} rows.")
        stop = min(start + rows, self.num_rows)
        alive = np.flatnonzero(self._is_live[start:stop]) + start
        self.block_reads.append((start, stop))
        self._tell_disk(start, stop)
        return MemoryBlock(
            start, stop, self._codes[alive], self._lend(pc.take(self._rows, pa.array(alive, pa.int64())))
        )

    def lookup(self, codes: Int64Array, *, in_order: bool = True) -> tuple[Int64Array, Int64Array]:
        """Pairs (index into ``codes``, position) of all live rows, sorted by query and then by position."""
        queries, positions = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for low, high in self._segments():
            first = np.searchsorted(self._codes[low:high], codes, "left")
            counts = np.searchsorted(self._codes[low:high], codes, "right") - first
            which, rows = expand_ranges(first, counts.astype(np.int32))
            alive = self._is_live[low + rows]
            queries.append(which[alive])
            positions.append(low + rows[alive])
        all_queries = np.concatenate(queries)
        order = np.argsort(all_queries, kind="stable")
        return all_queries[order], np.concatenate(positions)[order]

    def locate(self, codes: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Ranges ``(index into codes, start, stop)`` of positions that can have rows of these codes."""
        ranges = []
        stride = self._fence_stride
        for query, code in enumerate(codes.tolist()):
            for low, high in self._segments():
                mine = self._codes[low:high]
                if not mine[0] <= code <= mine[-1]:
                    continue
                first, last = int(np.searchsorted(mine, code, "left")), int(np.searchsorted(mine, code, "right"))
                start = first // stride * stride
                ranges.append((query, low + start, low + min(max(last, start + 1) + stride - 1, high - low)))
        queries, starts, stops = np.array(ranges, np.int64).reshape(-1, 3).T
        return queries.copy(), starts.copy(), stops.copy()

    def count(self, codes: Int64Array) -> Int64Array:
        """The number of live rows of each code."""
        queries, _ = self.lookup(codes)
        return np.bincount(queries, minlength=len(codes)).astype(np.int64)

    def gather(self, positions: Int64Array) -> pa.RecordBatch:
        """The rows at these positions, in the given order; they stay valid."""
        for position in np.unique(positions).tolist() if self._disk is not None else ():
            self._tell_disk(position, position + 1)
        return pc.take(self._rows, pa.array(positions, pa.int64()))

    def gather_grouped(self, positions: Int64Array) -> Iterator[tuple[Int64Array, pa.RecordBatch]]:
        """The rows at these positions, ascending: pairs (indexes into ``positions``, rows), in two pieces."""
        order = np.argsort(positions, kind="stable")
        for part in np.array_split(order, 2):
            if part.size:
                yield part, self.gather(positions[part])

    def gather_ascending(self, positions: Int64Array, *, in_pass: bool = False) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows at ascending positions, in two pieces: pairs (number of the piece's first position, rows)."""
        half = positions.size // 2
        for low, high in ((0, half), (half, positions.size)):
            if low < high:
                yield low, self.gather(positions[low:high])

    def widest(self, start: int, stop: int) -> int:
        """The bytes of the widest row at positions ``[start, stop)``, at most."""
        return widest_row(self._rows.slice(start, stop - start))

    def widest_at(self, positions: Int64Array) -> int:
        """The bytes of the widest row at ascending positions, at most."""
        return widest_row(self._rows)

    def widths(self, positions: Int64Array) -> Int64Array | int:
        """Bytes of the rows at these positions, or the one number of bytes that all rows have."""
        fixed = fixed_row_bytes(self.schema)
        return row_widths(self._rows, positions) if fixed is None else fixed

    def codes_at(self, positions: Int64Array) -> Int64Array:
        return self._codes[positions]

    def absent_share(self) -> float:
        """The share of the rows that is not in memory: `absent`, which a test may set."""
        return self.absent

    @property
    def pass_bytes(self) -> int:
        """A pass over rows in memory needs no buffer."""
        return 0

    @property
    def read_costs(self) -> ReadCosts | None:
        """The costs of reads of a device that a test may set; None: there is none."""
        return self.costs

    def _segments(self) -> list[tuple[int, int]]:
        """Start and end of each segment; none if no row has a code."""
        return [(low, high) for low, high in pairwise(self._bounds) if low < high]

    def _tell_disk(self, start: int, stop: int) -> None:
        if self._disk is not None:
            low, high = int(start * self.row_bytes), int(stop * self.row_bytes)
            self._disk.access("rows", low, high - low)

    def _lend(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Copy the rows to memory that the next call wipes. Zeros, unlike noise, are valid offsets and lengths."""
        self._lent[:] = 0
        stored = pa.BufferOutputStream()
        with pa.ipc.new_stream(stored, rows.schema) as writer:
            writer.write_batch(rows)
        self._lent = np.frombuffer(stored.getvalue(), np.uint8).copy()
        return pa.ipc.open_stream(pa.py_buffer(self._lent)).read_next_batch()


def _one_batch(table: pa.Table) -> pa.RecordBatch:
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
