"""The current rows of keys: those of a relation's shard, unless a newer level has the key.

A level is a table of rows written together, sorted by code. The newest level that has a key has all current rows of the
key; older levels are obsolete for it. Levels are merged to keep them few. New levels that exceed their memory limit are
written to a file and looked up there.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int64Array
from dovetail.kernels.sorted_codes import expand_ranges
from dovetail.relation.format import CODE_COLUMN
from dovetail.relation.keys import keys_equal
from dovetail.relation.shard_reader import ShardReader

__all__ = ["KeptRows", "Level", "merged_levels", "on_disk"]


class Level:
    """Rows with their codes (column ``__code``), found by code and key. If ``is_hashed``, codes are hashes of the key.

    >>> level = Level(pa.table({"__code": [2, 1, 2], "k": [2, 1, 2], "v": ["b", "a", "c"]}), ["k"], False)
    >>> queries, positions = level.find(np.array([1, 2, 3]), [pa.array([1, 2, 3])])
    >>> queries.tolist(), level.rows.column("v").take(pa.array(positions)).to_pylist()
    ([0, 1, 1], ['a', 'b', 'c'])
    """

    def __init__(self, rows: pa.Table | pa.RecordBatch, key: Sequence[str], is_hashed: bool) -> None:
        table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        column = table.column(CODE_COLUMN)
        # A single chunk is used in place: a mapped level takes no memory.
        codes = (column.chunk(0) if column.num_chunks == 1 else column).to_numpy().astype(np.int64, copy=False)
        if codes.size > 1 and np.any(codes[1:] < codes[:-1]):
            order = np.argsort(codes, kind="stable")
            table, codes = table.take(pa.array(order)), codes[order]
        self.table = table
        self.codes = codes
        self._key, self._is_hashed = list(key), is_hashed
        self._rows: pa.RecordBatch | None = None

    @property
    def rows(self) -> pa.RecordBatch:
        if self._rows is None:
            table = self.table.combine_chunks()
            batches = table.to_batches()
            self._rows = batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)
        return self._rows

    def find(self, codes: Int64Array, keys: Sequence[pa.Array]) -> tuple[Int64Array, Int64Array]:
        """Pairs (index into ``codes``, row) of rows with the same key, sorted by query."""
        first = np.searchsorted(self.codes, codes, side="left").astype(np.int64)
        count = (np.searchsorted(self.codes, codes, side="right") - first).astype(np.int32)
        queries, positions = expand_ranges(first, count)
        if self._is_hashed and queries.size:
            theirs = [self.rows.column(name).take(pa.array(positions)) for name in self._key]
            same = keys_equal([column.take(pa.array(queries)) for column in keys], theirs)
            queries, positions = queries[same], positions[same]
        return queries, positions

    def has(self, codes: Int64Array, keys: Sequence[pa.Array]) -> BoolArray:
        found = np.zeros(codes.size, np.bool_)
        found[self.find(codes, keys)[0]] = True
        return found

    def keys(self) -> list[pa.Array]:
        return [self.rows.column(name) for name in self._key]


def merged_levels(levels: Sequence[Level], key: Sequence[str], is_hashed: bool) -> pa.Table:
    """Merge levels, given oldest first: for each key the rows of the newest level that has it.

    >>> old = Level(pa.table({"__code": [1, 2], "v": ["a", "b"]}), [], False)
    >>> new = Level(pa.table({"__code": [2], "v": ["B"]}), [], False)
    >>> merged_levels([old, new], [], False).to_pydict()
    {'__code': [1, 2], 'v': ['a', 'B']}
    """
    parts = []
    for number, level in enumerate(levels):
        counts = np.ones(level.codes.size, np.bool_)
        for newer in levels[number + 1 :]:
            counts &= ~newer.has(level.codes, level.keys() if is_hashed else [])
        parts.append(level.table if counts.all() else level.table.filter(pa.array(counts)))
    return Level(pa.concat_tables(parts), key, is_hashed).table


class KeptRows:
    """The current rows of one shard, which a task can look up and replace."""

    def __init__(
        self,
        shard: ShardReader,  # of the version on disk, opened with the columns to read, including the key
        levels: Sequence[Level],  # the changes since that version, oldest first
        key: Sequence[str],
        is_hashed: bool,
        room_bytes: int | None = None,  # of new levels in memory; beyond it they are spilled to a file
        scratch: Path | None = None,  # the directory of that file; default: the temporary directory
    ) -> None:
        self._shard, self._levels = shard, list(levels)
        self._key, self._is_hashed = list(key), is_hashed
        self._room_bytes, self._scratch = room_bytes, scratch
        self._old, self._in_files = len(self._levels), 0
        self.spilled_bytes = 0

    @property
    def new_levels(self) -> list[Level]:
        """The levels added by `put`, oldest first."""
        return self._levels[self._old :]

    @property
    def size_bytes(self) -> int:
        """Bytes of the new levels in memory."""
        return sum(level.table.nbytes for level in self._levels[self._old + self._in_files :])

    def find(self, codes: Int64Array, keys: Sequence[pa.Array]) -> tuple[Int64Array, pa.RecordBatch]:
        """The current rows of keys: index into ``codes`` of each row, and the rows, in no particular order."""
        open_queries = np.arange(codes.size)
        found_queries: list[Int64Array] = []
        found_rows: list[pa.RecordBatch] = []
        for level in reversed(self._levels):
            if not open_queries.size:
                break
            queries, positions = level.find(codes[open_queries], self._taken(keys, open_queries, codes.size))
            if queries.size:
                found_queries.append(open_queries[queries])
                rows = level.rows.select(self._shard.schema.names)
                found_rows.append(rows.take(pa.array(positions)))
                is_open = np.ones(open_queries.size, np.bool_)
                is_open[queries] = False
                open_queries = open_queries[is_open]
        if open_queries.size and self._shard.num_rows:
            queries, positions = self._shard.lookup(codes[open_queries])
            if queries.size:
                rows = self._shard.gather(positions)
                queries = open_queries[queries]
                if self._is_hashed:
                    theirs = [rows.column(name) for name in self._key]
                    same = keys_equal([column.take(pa.array(queries)) for column in keys], theirs)
                    queries, rows = queries[same], rows.filter(pa.array(same))
                found_queries.append(queries)
                found_rows.append(rows)
        if not found_queries:
            return np.empty(0, np.int64), pa.RecordBatch.from_pylist([], schema=self._shard.schema)
        schema = self._shard.schema
        pieces = [rows.select(schema.names).cast(schema) for rows in found_rows]
        return np.concatenate(found_queries), pa.concat_batches(pieces) if len(pieces) > 1 else pieces[0]

    def put(self, codes: Int64Array, rows: pa.RecordBatch) -> None:
        """Replace all rows of their keys with these rows."""
        if rows.num_rows:
            self._levels.append(Level(rows.add_column(0, CODE_COLUMN, pa.array(codes)), self._key, self._is_hashed))
            if self._room_bytes is not None and self.size_bytes > self._room_bytes:
                self._spill()

    def _spill(self) -> None:
        """Write each level that is in memory to a file, and map it."""
        first = self._old + self._in_files
        for number in range(first, len(self._levels)):
            table = self._levels[number].table
            self.spilled_bytes += table.nbytes
            self._levels[number] = Level(on_disk(table, self._scratch), self._key, self._is_hashed)
        self._in_files = len(self._levels) - self._old

    def _taken(self, keys: Sequence[pa.Array], numbers: Int64Array, size: int) -> Sequence[pa.Array]:
        if not self._is_hashed or numbers.size == size:
            return keys
        return [column.take(pa.array(numbers)) for column in keys]


def on_disk(table: pa.Table, scratch: Path | None) -> pa.Table:
    """The same table, mapped from a file that is removed when no longer in use."""
    with tempfile.NamedTemporaryFile(dir=scratch, prefix="dovetail-changes-") as file:
        with pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
        file.flush()
        with pa.memory_map(file.name) as mapped:
            return pa.ipc.open_stream(mapped.read_buffer()).read_all()
