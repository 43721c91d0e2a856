"""Reading all shards of a relation as one: for lookups of a stream that was not shuffled.

If every worker can map every shard, a stream does not need to be shuffled for an index join: each code is looked up in
its shard. Positions are numbered consecutively, shard after shard.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.errors import PlanError
from dovetail.kernels.spark_hash import shard_of_codes
from dovetail.relation.format import RelationStats, ShardStats
from dovetail.relation.io import Disk, IoMode
from dovetail.relation.reads.read_costs import ReadCosts
from dovetail.relation.shard_reader import Block, ShardReader

__all__ = ["RelationReader"]

Int64Array = npt.NDArray[np.int64]


class RelationReader:
    """Several shards behind the interface of one. Created by :meth:`dovetail.Relation.reader`.

    Examples
    --------
    >>> import tempfile, dovetail as dt
    >>> table = pa.table({"k": [5, 1, 3, 3], "name": ["e", "a", "c", "d"]})
    >>> relation = dt.Relation.build(table, tempfile.mkdtemp() + "/r", on="k", shards=3)
    >>> reader = relation.reader(columns=["name"])
    >>> queries, positions = reader.lookup(np.array([3, 4, 5]))
    >>> queries.tolist(), reader.gather(positions).column("name").to_pylist()
    ([0, 0, 2], ['c', 'd', 'e'])
    """

    def __init__(self, shards: Sequence[ShardReader]) -> None:
        self._shards = list(shards)
        self.number = 0
        self.version = shards[0].version
        self._bases = np.concatenate([[0], np.cumsum([shard.num_rows for shard in shards])]).astype(np.int64)
        self.schema: pa.Schema = shards[0].schema
        self.num_rows = int(self._bases[-1])
        self.live_rows = sum(shard.live_rows for shard in shards)
        totals = RelationStats.of(tuple(shard.stats for shard in shards))
        self.stats = ShardStats(
            totals.rows, totals.bytes, totals.distinct_codes, totals.max_multiplicity, totals.null_key_rows
        )
        disk_bytes = sum(shard.disk_row_bytes * shard.num_rows for shard in shards)
        self.disk_row_bytes = disk_bytes / self.num_rows if self.num_rows else 0.0

    # ---------------------------------------------------------------- scan

    def read_block(self, start: int, rows: int) -> Block:
        """Read the live rows at positions ``[start, start + rows)``, clipped at the end of the shard of ``start``."""
        if rows < 1 or not 0 <= start <= self.num_rows:
            raise PlanError(f"A block of {rows} rows at {start} is not in a relation of {self.num_rows} rows.")
        number = min(int(np.searchsorted(self._bases, start, side="right")) - 1, len(self._shards) - 1)
        base = int(self._bases[number])
        block = self._shards[number].read_block(start - base, rows)
        return Block(block.start + base, block.stop + base, block.codes, block.rows)

    # ---------------------------------------------------------------- index

    def lookup(self, codes: Int64Array, *, in_order: bool = True) -> tuple[Int64Array, Int64Array]:
        """Return all live rows of each code as pairs (index into ``codes``, position).

        With ``in_order`` the pairs are sorted by query and then by position. Without it they are grouped by shard,
        which costs less.
        """
        found = []
        for shard, base, mine in self._routed(codes):
            queries, positions = shard.lookup(codes[mine])
            found.append((mine[queries], positions + base))
        if not found:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        queries, positions = (np.concatenate(part) for part in zip(*found, strict=True))
        if not in_order:
            return queries, positions
        order = np.argsort(queries, kind="stable")
        return queries[order], positions[order]

    def locate(self, codes: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return where the rows of each code can be, from the resident index; see :meth:`ShardReader.locate`."""
        found = []
        for shard, base, mine in self._routed(codes):
            queries, starts, stops = shard.locate(codes[mine])
            found.append((mine[queries], starts + base, stops + base))
        if not found:
            return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64)
        queries, starts, stops = (np.concatenate(part) for part in zip(*found, strict=True))
        order = np.argsort(queries, kind="stable")
        return queries[order], starts[order], stops[order]

    def count(self, codes: Int64Array) -> Int64Array:
        """Return the number of live rows of each code, from the index."""
        counts = np.zeros(len(codes), np.int64)
        for shard, _, mine in self._routed(codes):
            counts[mine] = shard.count(codes[mine])
        return counts

    def gather(self, positions: Int64Array) -> pa.RecordBatch:
        """Return the rows at these positions, in the given order."""
        groups = list(self.gather_grouped(positions))
        if not groups:
            return pa.RecordBatch.from_pylist([], schema=self.schema)
        rows = groups[0][1] if len(groups) == 1 else pa.concat_batches([batch for _, batch in groups])
        asked = np.concatenate([which for which, _ in groups])
        back = np.empty_like(asked)
        back[asked] = np.arange(len(asked))
        return pc.take(rows, pa.array(back), boundscheck=False)

    def gather_grouped(self, positions: Int64Array) -> Iterator[tuple[Int64Array, pa.RecordBatch]]:
        """Return the rows at these positions in the cheapest order: pairs (indexes into ``positions``, rows)."""
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < self.num_rows:
            raise PlanError(f"A position is not in a relation of {self.num_rows} rows.")
        order = np.argsort(positions, kind="stable")
        ascending = positions[order]
        for first, batch in self.gather_ascending(ascending):
            yield order[first : first + batch.num_rows], batch

    def gather_ascending(self, positions: Int64Array, *, in_pass: bool = False) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Return the rows at ascending positions, in pieces; see :meth:`ShardReader.gather_ascending`."""
        bounds = np.searchsorted(positions, self._bases).tolist()
        for shard, base, low, high in zip(self._shards, self._bases.tolist(), bounds, bounds[1:], strict=False):
            if low < high:
                for first, batch in shard.gather_ascending(positions[low:high] - base, in_pass=in_pass):
                    yield low + first, batch

    def widest(self, start: int, stop: int) -> int:
        """Bytes of the widest row at positions ``[start, stop)``, at most."""
        widest = 0
        for shard, base in zip(self._shards, self._bases.tolist(), strict=False):
            low, high = max(start - base, 0), min(stop - base, shard.num_rows)
            if low < high:
                widest = max(widest, shard.widest(low, high))
        return widest

    def widest_at(self, positions: Int64Array) -> int:
        """Bytes of the widest row at ascending positions, at most."""
        bounds = np.searchsorted(positions, self._bases).tolist()
        parts = zip(self._shards, self._bases.tolist(), bounds, bounds[1:], strict=False)
        return max(shard.widest_at(positions[low:high] - base) for shard, base, low, high in parts)

    def widths(self, positions: Int64Array) -> Int64Array | int:
        """Bytes of the rows at ascending positions, or the one number of bytes that all rows have."""
        bounds = np.searchsorted(positions, self._bases).tolist()
        found = []
        for shard, base, low, high in zip(self._shards, self._bases.tolist(), bounds, bounds[1:], strict=False):
            mine = shard.widths(positions[low:high] - base)
            if isinstance(mine, int):
                return mine
            found.append(mine)
        return np.concatenate(found)

    def codes_at(self, positions: Int64Array) -> Int64Array:
        """Return the codes of the rows at these positions, in the given order."""
        codes = np.empty(len(positions), np.int64)
        numbers = np.searchsorted(self._bases, positions, side="right") - 1
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            codes[mine] = self._shards[number].codes_at(positions[mine] - self._bases[number])
        return codes

    def _routed(self, codes: Int64Array) -> Iterator[tuple[ShardReader, int, Int64Array]]:
        """Yield each shard that has codes, its first position, and the indexes of its codes."""
        if len(self._shards) == 1:
            if len(codes):
                yield self._shards[0], 0, np.arange(len(codes))
            return
        numbers = shard_of_codes(codes, len(self._shards))
        # numpy sorts 16-bit integers with a radix sort, in a fraction of the time.
        by_shard = np.argsort(numbers.astype(np.uint16), kind="stable")
        bounds = np.searchsorted(numbers[by_shard], np.arange(len(self._shards) + 1))
        for number, shard in enumerate(self._shards):
            mine = by_shard[bounds[number] : bounds[number + 1]]
            if len(mine):
                yield shard, int(self._bases[number]), mine

    # ---------------------------------------------------------------- sizes and I/O

    @property
    def disk(self) -> Disk | None:
        """The disk that every access is reported to, if any."""
        return self._shards[0].disk

    @property
    def io_mode(self) -> IoMode:
        """How bytes are read."""
        return self._shards[0].io_mode

    @property
    def row_bytes(self) -> float:
        """Mean bytes of a projected row in memory."""
        return sum(shard.row_bytes * shard.num_rows for shard in self._shards) / max(1, self.num_rows)

    def absent_share(self) -> float:
        """The share of the rows that is not in memory, from a sample of pages."""
        return sum(shard.absent_share() * shard.num_rows for shard in self._shards) / max(1, self.num_rows)

    @property
    def pass_bytes(self) -> int:
        """What reading whole record batches holds at a time."""
        return max(shard.pass_bytes for shard in self._shards)

    @property
    def read_costs(self) -> ReadCosts | None:
        """The costs of reads of the device; None if the rows are not mapped."""
        return self._shards[0].read_costs

    @property
    def num_segments(self) -> int:
        """The number of sorted runs of rows."""
        return sum(shard.num_segments for shard in self._shards)

    @property
    def reads_in_place(self) -> bool:
        """Whether a block within a record batch is a view of mapped pages."""
        return all(shard.reads_in_place for shard in self._shards)

    def rows_in_place(self, start: int) -> int:
        """Return how many rows from a position are in the same record batch."""
        number = int(np.searchsorted(self._bases, start, side="right")) - 1
        return self._shards[number].rows_in_place(start - int(self._bases[number]))

    @property
    def index_bytes(self) -> int:
        """Bytes of the resident index."""
        return sum(shard.index_bytes for shard in self._shards)
