"""Reading all shards of a relation as if they were one: for lookups that no shuffle has routed.

Where every worker can map every shard, a stream need not be shuffled to be joined by index: each code is looked up in
its own shard. Positions run through the shards, shard after shard.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.errors import PlanError
from dovetail.kernels.spark_hash import shard_of_codes
from dovetail.relation.format import RelationStats, ShardStats
from dovetail.relation.io import Disk, IoMode
from dovetail.relation.shard_reader import Block, ShardReader

__all__ = ["RelationReader"]

Int64Array = npt.NDArray[np.int64]


class RelationReader:
    """Several shards behind the interface of one. Made by :meth:`dovetail.Relation.reader`.

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
        """The live rows at positions ``[start, start + rows)``, clipped at the end of the shard that has ``start``."""
        if rows < 1 or not 0 <= start <= self.num_rows:
            raise PlanError(f"a block of {rows} rows at {start} is not in a relation of {self.num_rows} rows.")
        number = min(int(np.searchsorted(self._bases, start, side="right")) - 1, len(self._shards) - 1)
        base = int(self._bases[number])
        block = self._shards[number].read_block(start - base, rows)
        return Block(block.start + base, block.stop + base, block.codes, block.rows)

    # ---------------------------------------------------------------- index

    def lookup(self, codes: Int64Array, *, in_order: bool = True) -> tuple[Int64Array, Int64Array]:
        """All live rows of each code: pairs (which of ``codes``, where).

        Parameters
        ----------
        codes
            What to look up.
        in_order
            Give the pairs by query and then by position; without it, they come shard by shard, which costs less.
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
        """Where the rows of each code can be, from the resident index alone; see :meth:`ShardReader.locate`."""
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
        """How many live rows each code has, through the index."""
        counts = np.zeros(len(codes), np.int64)
        for shard, _, mine in self._routed(codes):
            counts[mine] = shard.count(codes[mine])
        return counts

    def gather(self, positions: Int64Array) -> pa.RecordBatch:
        """The rows at these positions, in the order asked for."""
        groups = list(self.gather_grouped(positions))
        if not groups:
            return pa.RecordBatch.from_pylist([], schema=self.schema)
        rows = groups[0][1] if len(groups) == 1 else pa.concat_batches([batch for _, batch in groups])
        asked = np.concatenate([which for which, _ in groups])
        back = np.empty_like(asked)
        back[asked] = np.arange(len(asked))
        return pc.take(rows, pa.array(back), boundscheck=False)

    def gather_grouped(self, positions: Int64Array) -> Iterator[tuple[Int64Array, pa.RecordBatch]]:
        """The rows at these positions in the order that costs least: pairs (which of ``positions``, their rows)."""
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < self.num_rows:
            raise PlanError(f"a position is not in a relation of {self.num_rows} rows.")
        order = np.argsort(positions, kind="stable")
        ascending = positions[order]
        for first, batch in self.gather_ascending(ascending):
            yield order[first : first + batch.num_rows], batch

    def gather_ascending(self, positions: Int64Array) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows at ascending positions, in pieces; see :meth:`ShardReader.gather_ascending`."""
        bounds = np.searchsorted(positions, self._bases).tolist()
        for shard, base, low, high in zip(self._shards, self._bases.tolist(), bounds, bounds[1:], strict=False):
            if low < high:
                for first, batch in shard.gather_ascending(positions[low:high] - base):
                    yield low + first, batch

    def codes_at(self, positions: Int64Array) -> Int64Array:
        """The codes of the rows at these positions, in the order asked for."""
        codes = np.empty(len(positions), np.int64)
        numbers = np.searchsorted(self._bases, positions, side="right") - 1
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            codes[mine] = self._shards[number].codes_at(positions[mine] - self._bases[number])
        return codes

    def _routed(self, codes: Int64Array) -> Iterator[tuple[ShardReader, int, Int64Array]]:
        """Each shard that has codes, where its positions begin, and which of the codes are its own."""
        if len(self._shards) == 1:
            if len(codes):
                yield self._shards[0], 0, np.arange(len(codes))
            return
        numbers = shard_of_codes(codes, len(self._shards))
        # Sixteen bits are sorted digit by digit, which takes a fraction of the time.
        by_shard = np.argsort(numbers.astype(np.uint16), kind="stable")
        bounds = np.searchsorted(numbers[by_shard], np.arange(len(self._shards) + 1))
        for number, shard in enumerate(self._shards):
            mine = by_shard[bounds[number] : bounds[number + 1]]
            if len(mine):
                yield shard, int(self._bases[number]), mine

    # ---------------------------------------------------------------- sizes, and where they are

    @property
    def disk(self) -> Disk | None:
        """The disk that every access is told to, if one was given."""
        return self._shards[0].disk

    @property
    def io_mode(self) -> IoMode:
        """How bytes are read."""
        return self._shards[0].io_mode

    @property
    def row_bytes(self) -> float:
        """Mean bytes of a projected row in memory."""
        return sum(shard.row_bytes * shard.num_rows for shard in self._shards) / max(1, self.num_rows)

    @property
    def num_segments(self) -> int:
        """How many runs of rows, each sorted by code, the positions are made of."""
        return sum(shard.num_segments for shard in self._shards)

    @property
    def reads_in_place(self) -> bool:
        """Whether a block within a record batch is a view of mapped pages."""
        return all(shard.reads_in_place for shard in self._shards)

    def rows_in_place(self, start: int) -> int:
        """How many rows from a position on lie in one record batch."""
        number = int(np.searchsorted(self._bases, start, side="right")) - 1
        return self._shards[number].rows_in_place(start - int(self._bases[number]))

    @property
    def index_bytes(self) -> int:
        """Bytes of the resident index."""
        return sum(shard.index_bytes for shard in self._shards)
