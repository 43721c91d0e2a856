"""Reading one shard of one version: by scan, block by block, and by index, from codes to positions to rows.

Positions number the rows of a shard: segment after segment, each sorted by code. They are stable while the version is
open. Deleted rows keep their positions and are not returned.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.errors import PlanError, SchemaError
from dovetail.kernels.pages import PAGE_BYTES
from dovetail.kernels.sorted_codes import expand_ranges, group_by_block
from dovetail.relation.format import FENCE_STRIDE, Manifest, ShardStats
from dovetail.relation.io import Arena, Disk, IoMode
from dovetail.relation.reads.drop_behind import DropBehind, available_memory
from dovetail.relation.reads.read_costs import ReadCosts
from dovetail.relation.segment_reader import SegmentReader
from dovetail.relation.widths import fixed_row_bytes
from dovetail.storage.files import RelationFiles

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Block:
    """The result of one disk step: the live rows at positions ``[start, stop)`` and their codes.

    With ``io="buffered"`` or ``"direct"`` the rows are in the reader's block buffer, which the next read overwrites:
    copy (``take``) rows that must live longer.
    """

    start: int
    stop: int
    codes: Int64Array
    rows: pa.RecordBatch

    @property
    def nbytes(self) -> int:
        """Bytes of the rows and their codes."""
        return int(self.rows.nbytes) + self.codes.nbytes


class ShardReader:
    """One shard of a relation, open for reading. Created by :meth:`dovetail.Relation.shard`.

    Not thread-safe: the threads would share a block buffer.

    Examples
    --------
    >>> import tempfile, numpy as np, pyarrow as pa, dovetail as dt
    >>> table = pa.table({"k": [5, 1, 3, 3], "name": ["e", "a", "c", "d"]})
    >>> relation = dt.Relation.build(table, tempfile.mkdtemp() + "/r", on="k", shards=1)
    >>> shard = relation.shard(0, columns=["name"])
    >>> block = shard.read_block(0, 3)
    >>> block.codes.tolist(), block.rows.column("name").to_pylist()
    ([1, 3, 3], ['a', 'c', 'd'])
    >>> queries, positions = shard.lookup(np.array([3, 4, 5]))
    >>> queries.tolist(), shard.gather(positions).column("name").to_pylist()
    ([0, 0, 2], ['c', 'd', 'e'])
    """

    def __init__(
        self,
        files: RelationFiles,
        manifest: Manifest,
        number: int,
        columns: Sequence[str] | None = None,
        io: IoMode | Disk = "map",
        include_null_keys: bool = False,
    ) -> None:
        shard = manifest.shards[number]
        names = list(manifest.schema.names if columns is None else columns)
        unknown = [name for name in names if name not in manifest.schema.names]
        if unknown:
            raise SchemaError(
                f"column {unknown[0]!r} is not in the relation: its columns are {', '.join(manifest.schema.names)}."
            )
        mode, disk = _mode_and_disk(io)
        self.number = number
        self.version = manifest.version
        self.stats: ShardStats = shard.stats
        self._disk = disk
        self._io_mode: IoMode = mode
        self._uses_block_buffer = mode != "map"
        self._arena = Arena()
        kept = [s for s in shard.segments if s.is_keyed] + [
            s for s in shard.segments if include_null_keys and not s.is_keyed
        ]
        drops = _what_to_drop(manifest, names) if mode == "map" and files.local is not None else DropBehind()
        self._segments = [
            SegmentReader(files, number, segment, manifest.schema, names, mode, self._arena, drops) for segment in kept
        ]
        self.schema: pa.Schema = pa.schema([manifest.schema.field(name) for name in names])
        self._bases = np.concatenate([[0], np.cumsum([s.rows for s in kept])]).astype(np.int64)
        self.num_rows = int(self._bases[-1])
        self.live_rows = sum(segment.live_rows for segment in kept)
        disk_bytes = sum(segment.rows_bytes for segment in kept)
        self.disk_row_bytes = disk_bytes / self.num_rows if self.num_rows else 0.0
        self._row_bytes: float | None = None
        self._fixed_row_bytes = fixed_row_bytes(self.schema)

    # ---------------------------------------------------------------- scan

    def read_block(self, start: int, rows: int) -> Block:
        """Read the live rows at positions ``[start, start + rows)``, clipped at the end of the shard."""
        if rows < 1 or not 0 <= start <= self.num_rows:
            raise PlanError(f"A block of {rows} rows at {start} is not in a shard of {self.num_rows} rows.")
        stop = min(start + rows, self.num_rows)
        self._charge(start, stop)
        self._arena.reset()
        pieces: list[pa.RecordBatch] = []
        codes: list[Int64Array] = []
        for segment, low, high in self._pieces(start, stop):
            batches = segment.read(low, high)
            block_codes = segment.codes(low, high) if segment.is_keyed else np.zeros(high - low, np.int64)
            if segment.deleted is not None:
                alive = ~segment.is_deleted(np.arange(low, high))
                if not alive.all():
                    batches = [pa.concat_batches(batches).filter(pa.array(alive))]
                    block_codes = block_codes[alive]
            pieces.extend(batches)
            codes.append(block_codes)
        return Block(start, stop, _joined(codes), self._concat(pieces))

    def blocks(self, block_rows: int) -> Iterator[Block]:
        """Read every row once, in blocks of ``block_rows`` positions; the last block may be shorter."""
        if block_rows < 1:
            raise PlanError(f"block_rows={block_rows}: a block has at least 1 row.")
        for start in range(0, self.num_rows, block_rows):
            yield self.read_block(start, block_rows)

    @property
    def reads_in_place(self) -> bool:
        """Whether a block within a record batch is a view of mapped pages, without a copy."""
        is_mapped = self._io_mode == "map" and self._disk is None
        return is_mapped and all(segment.is_mapped and segment.deleted is None for segment in self._segments)

    def rows_in_place(self, start: int) -> int:
        """Return how many rows from a position are in the same record batch, so that reading them copies nothing."""
        number = int(np.searchsorted(self._bases, start, side="right")) - 1
        return self._segments[number].rows_in_batch(start - int(self._bases[number]))

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[SegmentReader, int, int]]:
        for segment, base in zip(self._segments, self._bases[:-1].tolist(), strict=True):
            low, high = max(start - base, 0), min(stop - base, segment.rows)
            if low < high:
                yield segment, low, high

    # ---------------------------------------------------------------- index

    def lookup(self, codes: Int64Array, *, in_order: bool = True) -> tuple[Int64Array, Int64Array]:
        """Look up all live rows of each code in the index. Reads no rows.

        Parameters
        ----------
        codes
            The codes to look up.
        in_order
            Ignored: the pairs are always in order.

        Returns
        -------
        queries, positions
            Pairs (index into ``codes``, position), sorted by query and then by position.

        Notes
        -----
        The sparse index is resident; the codes are mapped and in the page cache. A simulated disk is charged for each
        distinct page of codes touched. :meth:`locate` uses only the resident part.
        """
        found = [self._lookup_segment(segment, base, codes) for segment, base in self._keyed()]
        if not found:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        if len(found) == 1:
            return found[0]
        queries = np.concatenate([pair[0] for pair in found])
        positions = np.concatenate([pair[1] for pair in found])
        order = np.argsort(queries, kind="stable")
        return queries[order], positions[order]

    def _lookup_segment(self, segment: SegmentReader, base: int, codes: Int64Array) -> tuple[Int64Array, Int64Array]:
        queries, rows = expand_ranges(*self._ranges(segment, codes))
        if segment.deleted is not None:
            alive = ~segment.is_deleted(rows)
            queries, rows = queries[alive], rows[alive]
        return queries, rows + base

    def _ranges(self, segment: SegmentReader, codes: Int64Array) -> tuple[Int64Array, npt.NDArray[np.int32]]:
        """Return the rows of each code in a segment, including deleted ones: first and count."""
        first, count = segment.lookup(codes)
        if self._disk is not None:
            first_page = first * 8 // PAGE_BYTES
            last_page = (first + np.maximum(count, 1) - 1) * 8 // PAGE_BYTES
            _, pages = expand_ranges(first_page, (last_page - first_page + 1).astype(np.int32))
            for page in np.unique(pages).tolist():
                self._disk.access(f"{segment.file_name}.codes", page * PAGE_BYTES, PAGE_BYTES)
        return first, count

    def count(self, codes: Int64Array) -> Int64Array:
        """Return the number of live rows of each code, from the index."""
        counts = np.zeros(len(codes), np.int64)
        for segment, base in self._keyed():
            if segment.deleted is None:
                counts += self._ranges(segment, codes)[1]
            else:
                queries, _ = self._lookup_segment(segment, base, codes)
                counts += np.bincount(queries, minlength=len(codes))
        return counts

    def locate(self, codes: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return where the rows of each code can be, from the resident index only. Accesses no disk.

        Returns
        -------
        queries, starts, stops
            Ranges of positions, at most one per segment and code, that together contain every row of the code. A code
            without a range has no rows; a code with a range may still have none.
        """
        found = []
        for segment, base in self._keyed():
            low = np.searchsorted(segment.fences, codes, side="left")
            high = np.searchsorted(segment.fences, codes, side="right")
            # The rows of a code may start before the first fence equal to it, after the previous fence.
            starts = np.maximum(low - 1, 0) * FENCE_STRIDE
            stops = np.minimum(high * FENCE_STRIDE, segment.rows)
            queries = np.flatnonzero((high > 0) & (codes <= segment.max_code))
            found.append((queries, starts[queries] + base, stops[queries] + base))
        if not found:
            return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
        if len(found) == 1:
            return found[0]
        queries, starts, stops = (np.concatenate(part).astype(np.int64) for part in zip(*found, strict=True))
        order = np.argsort(queries, kind="stable")
        return queries[order], starts[order], stops[order]

    def gather(self, positions: Int64Array) -> pa.RecordBatch:
        """Return the rows at these positions, in the given order, including rows deleted in this version."""
        self._check_positions(positions)
        order = np.argsort(positions, kind="stable")
        ascending = positions[order]
        rows = self._concat([batch for _, batch in self.gather_ascending(ascending)])
        if np.array_equal(order, np.arange(len(order))):
            return rows
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return pc.take(rows, pa.array(back), boundscheck=False)

    def gather_grouped(self, positions: Int64Array) -> Iterator[tuple[Int64Array, pa.RecordBatch]]:
        """Return the rows at these positions in the cheapest order: pairs (indexes into ``positions``, rows)."""
        self._check_positions(positions)
        order = np.argsort(positions, kind="stable")
        ascending = positions[order]
        for first, batch in self.gather_ascending(ascending):
            yield order[first : first + batch.num_rows], batch

    def gather_ascending(self, positions: Int64Array, *, in_pass: bool = False) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Return the rows at ascending positions, in pieces: pairs (index of the piece's first position, rows).

        With `in_pass`, whole record batches may be read, in buffers of `pass_bytes`, where that is cheaper than pages.
        Positions are not checked: one outside the shard would read foreign memory.
        """
        if self._uses_block_buffer or self._disk is not None:
            yield from self._gather_pages(positions)
            return
        bounds = np.searchsorted(positions, self._bases)
        for segment, base, low, high in zip(
            self._segments, self._bases[:-1].tolist(), bounds[:-1].tolist(), bounds[1:].tolist(), strict=True
        ):
            for batch in segment.gather(positions[low:high] - base, in_pass=in_pass):
                yield low, batch
                low += batch.num_rows

    def widest(self, start: int, stop: int) -> int:
        """Bytes of the widest row at positions ``[start, stop)``, at most."""
        if self._fixed_row_bytes is not None:
            return self._fixed_row_bytes
        return max((segment.widest(low, high) for segment, low, high in self._pieces(start, stop)), default=0)

    def widest_at(self, positions: Int64Array) -> int:
        """Bytes of the widest row at ascending positions, at most."""
        if self._fixed_row_bytes is not None:
            return self._fixed_row_bytes
        bounds = np.searchsorted(positions, self._bases).tolist()
        parts = zip(self._segments, self._bases[:-1].tolist(), bounds[:-1], bounds[1:], strict=True)
        return max((segment.widest_at(positions[low:high] - base) for segment, base, low, high in parts), default=0)

    def widths(self, positions: Int64Array) -> Int64Array | int:
        """Bytes of the rows at ascending positions, or the one number of bytes that all rows have."""
        if self._fixed_row_bytes is not None:
            return self._fixed_row_bytes
        bounds = np.searchsorted(positions, self._bases).tolist()
        found = [
            segment.widths(positions[low:high] - base)
            for segment, base, low, high in zip(
                self._segments, self._bases[:-1].tolist(), bounds[:-1], bounds[1:], strict=True
            )
        ]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _gather_pages(self, positions: Int64Array) -> Iterator[tuple[int, pa.RecordBatch]]:
        page_rows = max(1, int(PAGE_BYTES // max(1.0, self.disk_row_bytes)))
        pages, offsets = group_by_block(positions, page_rows)
        ahead, ready = self._read_ahead(positions), 0
        for page, low, high in zip(pages.tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            while ready < high:
                ready = next(ahead, high)
            start, stop = page * page_rows, min((page + 1) * page_rows, self.num_rows)
            self._charge(start, stop)
            self._arena.reset()
            rows = self._concat([b for s, low_, high_ in self._pieces(start, stop) for b in s.read(low_, high_)])
            yield low, pc.take(rows, pa.array(positions[low:high] - start), boundscheck=False)

    def _read_ahead(self, positions: Int64Array) -> Iterator[int]:
        """Read ascending positions into the page cache, many at a time; yields how many are there."""
        if self._io_mode != "buffered":
            return
        bounds = np.searchsorted(positions, self._bases).tolist()
        for segment, base, low, high in zip(
            self._segments, self._bases[:-1].tolist(), bounds[:-1], bounds[1:], strict=True
        ):
            for _, stop in segment.prepared(positions[low:high] - base):
                yield low + stop

    def codes_at(self, positions: Int64Array) -> Int64Array:
        """Return the codes of the rows at these positions, in the given order; 0 for rows whose key has a NULL."""
        self._check_positions(positions)
        codes = np.zeros(len(positions), np.int64)
        numbers = np.searchsorted(self._bases, positions, side="right") - 1
        for number, (segment, base) in enumerate(self._keyed()):
            mine = numbers == number
            if mine.any():
                codes[mine] = segment.codes_at(positions[mine] - base)
        return codes

    # ---------------------------------------------------------------- sizes and I/O

    @property
    def disk(self) -> Disk | None:
        """The disk that every access is reported to, if any."""
        return self._disk

    @property
    def io_mode(self) -> IoMode:
        """How bytes are read; ``map`` with a simulated disk."""
        return self._io_mode

    @property
    def row_bytes(self) -> float:
        """Mean bytes of a projected row in memory, from the first record batch of each segment."""
        if self._row_bytes is None:
            samples = [segment.read(0, min(segment.rows, 4096)) for segment in self._segments]
            batches = [batch for sample in samples for batch in sample]
            rows = sum(batch.num_rows for batch in batches)
            self._row_bytes = sum(batch.nbytes for batch in batches) / rows if rows else 0.0
        return self._row_bytes

    def absent_share(self) -> float:
        """The share of the rows that is not in memory, from a sample of pages; 0 if they are not mapped."""
        rows = sum(segment.rows for segment in self._segments)
        if self._disk is not None or self._io_mode != "map" or not rows:
            return 0.0
        return sum(segment.absent_share() * segment.rows for segment in self._segments) / rows

    @property
    def pass_bytes(self) -> int:
        """What reading whole record batches holds at a time."""
        return max((segment.pass_bytes for segment in self._segments), default=0)

    @property
    def read_costs(self) -> ReadCosts | None:
        """The costs of reads of the device that the rows are mapped from; None if they are not mapped."""
        return next((s.read_costs for s in self._segments if s.read_costs is not None), None)

    @property
    def num_segments(self) -> int:
        """The number of sorted runs of rows, without runs of NULL keys."""
        return sum(segment.is_keyed for segment in self._segments)

    @property
    def index_bytes(self) -> int:
        """Bytes of the resident index."""
        return sum(segment.resident_bytes for segment in self._segments) + self._bases.nbytes

    # ---------------------------------------------------------------- helpers

    def _keyed(self) -> Iterator[tuple[SegmentReader, int]]:
        for segment, base in zip(self._segments, self._bases[:-1].tolist(), strict=True):
            if segment.is_keyed:
                yield segment, base

    def _check_positions(self, positions: Int64Array) -> None:
        # Gathering has no bounds checks: a wrong position would read, or return, foreign memory.
        if len(positions):
            low, high = int(positions.min()), int(positions.max())
            if low < 0 or high >= self.num_rows:
                wrong = low if low < 0 else high
                raise PlanError(f"Position {wrong} is not in a shard of {self.num_rows} rows.")

    def _charge(self, start: int, stop: int) -> None:
        if self._disk is not None:
            low, high = int(start * self.disk_row_bytes), int(stop * self.disk_row_bytes)
            self._disk.access(f"shard-{self.number}", low, high - low)

    def _concat(self, pieces: list[pa.RecordBatch]) -> pa.RecordBatch:
        if len(pieces) == 1:
            return pieces[0]
        if not pieces:
            return pa.RecordBatch.from_pylist([], schema=self.schema)
        return pa.concat_batches(pieces)


def _what_to_drop(manifest: Manifest, names: Sequence[str]) -> DropBehind:
    """What long reads of a relation leave in memory, judged by the size of all its shards."""
    segments = [segment for shard in manifest.shards for segment in shard.segments]
    rows = sum(segment.rows for segment in segments)
    widths = (_fixed_bits(manifest.schema.field(name).type) for name in names)
    return DropBehind.of(
        codes_bytes=8 * rows,
        fixed_bytes=rows * sum(widths) // 8,
        rows_bytes=sum(segment.rows_bytes for segment in segments),
        memory_bytes=available_memory(),
    )


def _fixed_bits(kind: pa.DataType) -> int:
    try:
        return int(kind.bit_width)
    except ValueError:
        return 32  # the bounds of a value of variable length


def _mode_and_disk(io: IoMode | Disk) -> tuple[IoMode, Disk | None]:
    if isinstance(io, str):
        if io not in ("map", "buffered", "direct"):
            raise PlanError(f'io={io!r} is not an I/O mode: use "map", "buffered", "direct" or a SimulatedDisk.')
        return io, None
    return "map", io


def _joined(codes: list[Int64Array]) -> Int64Array:
    if len(codes) == 1:
        return codes[0]
    return np.concatenate(codes) if codes else np.empty(0, np.int64)
