"""Writing one shard of a new version: the effect of a build, append, upsert or delete on one shard.

The same function runs in a Spark task and in the local process. It reads the shard's parent version, writes new
immutable files next to the old ones, and returns a description of the new shard. Existing files never change: a
replaced or deleted row is marked in a new bitmap file, and its bytes stay until a merge drops them.

An upsert therefore writes the new rows, and one bit per row of the affected segments. To keep lookups short, a write
merges segments of a shard that has more than :data:`MAX_SEGMENTS` segments, or a segment that is mostly deleted. The
cost of merges is amortised over the writes that made them necessary.
"""

import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.errors import RelationError
from dovetail.core.faultpoints import fault_point
from dovetail.relation.deletions import load_deletions
from dovetail.relation.format import CODE_COLUMN, Deletions, Manifest, Operation, Segment, Shard, ShardStats
from dovetail.relation.keys import keys_equal
from dovetail.relation.merge import live_run_statistics, merge_segments
from dovetail.relation.segment_writer import SegmentWriter
from dovetail.relation.shard_reader import ShardReader
from dovetail.storage.digests import digest_of
from dovetail.storage.files import RelationFiles, storage_errors
from dovetail.storage.interface import Storage
from dovetail.storage.local import LOCAL

MAX_SEGMENTS = 8
MAX_DELETED_FRACTION = 0.5

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ShardTask:
    """A write to one shard. ``base`` is the version to change: an empty one for a build."""

    root: str
    number: int
    operation: Operation
    base: Manifest
    storage: Storage = LOCAL

    @property
    def directory(self) -> Path:
        return Path(self.root) / "data" / str(self.number)


def write_shard(task: ShardTask, batches: Iterable[pa.RecordBatch]) -> Shard:
    """Apply ``task`` with the rows in ``batches``: sorted by code, which is the first column.

    For a delete the batches have only the key columns.
    """
    with storage_errors(Path(task.root)):
        return _ShardWriter(task).run(batches)


def remove_new_files(root: str, base: Manifest, shards: Mapping[int, Shard], storage: Storage = LOCAL) -> None:
    """Remove the files of ``shards`` (by number) that ``base`` does not use: their version will not be committed."""
    old = base.data_files()
    for number, shard in shards.items():
        names = {f"{number}/{name}" for segment in shard.segments for name in segment.file_names()}
        for name in names - old:
            storage.delete(Path(root) / "data" / name)


class _ShardWriter:
    def __init__(self, task: ShardTask) -> None:
        self._task, self._base = task, task.base
        self._storage = task.storage
        self._files = RelationFiles(task.root, storage=task.storage)
        self._segments = list(task.base.shards[task.number].segments)
        self._hashed = task.base.code_kind == "xxhash64"
        self._replaces = task.operation in ("upsert", "delete")
        self._adds = task.operation != "delete"
        key = list(task.base.key)
        self._reader = ShardReader(self._files, task.base, task.number, columns=key)
        self._deleted: list[Int64Array] = []
        self._writers: list[SegmentWriter] = []
        self._bitmaps: list[str] = []
        self._duplicates = _DuplicateKeys(task.base) if task.base.is_unique_key and self._adds else None

    def run(self, batches: Iterable[pa.RecordBatch]) -> Shard:
        try:
            segments = self._merged(self._with_rows_of(batches))
            shard = Shard(tuple(segments), self._stats(segments))
        except BaseException:
            self._remove_new_files(keep=())
            raise
        # Segments that were written and then merged belong to no version.
        self._remove_new_files(keep=shard.segments)
        return shard

    def _with_rows_of(self, batches: Iterable[pa.RecordBatch]) -> list[Segment]:
        """Return the parent's segments with the deletions of this write, and segments of the new rows."""
        keyed = self._new_writer(is_keyed=True)
        keyless = self._new_writer(is_keyed=False)
        for batch in batches:
            rows, codes, null_rows = self._split(batch)
            if null_rows.num_rows:
                self._accept_null_keys(null_rows, keyless)
            if rows.num_rows:
                self._accept(rows, codes, keyed)
        added = [segment for segment in (keyed.close(), keyless.close()) if segment is not None]
        return [*self._with_deletions(), *added]

    def _new_writer(self, is_keyed: bool) -> SegmentWriter:
        writer = SegmentWriter(self._task.directory, uuid.uuid4().hex, self._base.schema, is_keyed, self._storage)
        self._writers.append(writer)
        return writer

    def _remove_new_files(self, keep: Iterable[Segment]) -> None:
        kept = {name for segment in keep for name in segment.file_names()}
        for writer in self._writers:
            if f"{writer.name}.rows" not in kept:
                writer.abandon()
        for name in self._bitmaps:
            if name not in kept:
                self._storage.delete(self._task.directory / name)

    def _split(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Int64Array, pa.RecordBatch]:
        """Split into rows with a key, their codes, and rows whose key has a NULL."""
        code = batch.column(CODE_COLUMN)
        rows = batch.drop_columns([CODE_COLUMN])
        if self._adds:
            rows = rows.cast(self._base.schema)
        if code.null_count == 0:
            return rows, code.to_numpy(), rows.slice(0, 0)
        has_key = code.is_valid()
        return rows.filter(has_key), code.drop_null().to_numpy(), rows.filter(pc.invert(has_key))

    def _accept_null_keys(self, rows: pa.RecordBatch, writer: SegmentWriter) -> None:
        if self._task.operation == "upsert":
            raise RelationError(
                f"upsert: {rows.num_rows} or more rows have a NULL in the key ({', '.join(self._base.key)}), so the "
                "row they replace cannot be found. Nothing was changed; filter them out, or append them."
            )
        if self._adds:
            writer.write(rows, np.zeros(rows.num_rows, np.int64))

    def _accept(self, rows: pa.RecordBatch, codes: Int64Array, writer: SegmentWriter) -> None:
        if self._duplicates is not None:
            self._duplicates.check(rows, codes)
        if self._replaces or self._duplicates is not None:
            present = self._existing(rows, codes)
            if self._replaces:
                self._deleted.append(present)
            elif len(present):
                self._refuse_duplicate(rows, present)
        if self._adds:
            writer.write(rows, codes)

    def _existing(self, rows: pa.RecordBatch, codes: Int64Array) -> Int64Array:
        """Return the positions of live rows that have one of these keys."""
        # Use each key once: the pairs of rows here and rows there could exceed the memory.
        rows, codes = self._distinct_keys(rows, codes)
        queries, positions = self._reader.lookup(codes)
        if self._hashed and len(positions):
            mine = [pc.take(rows.column(name), pa.array(queries)) for name in self._base.key]
            theirs = self._reader.gather(positions)
            positions = positions[keys_equal(mine, [theirs.column(name) for name in self._base.key])]
        return positions

    def _distinct_keys(self, rows: pa.RecordBatch, codes: Int64Array) -> tuple[pa.RecordBatch, Int64Array]:
        is_first = np.concatenate([[True], codes[1:] != codes[:-1]])
        if is_first.all():
            return rows, codes
        if not self._hashed:
            return rows, codes[is_first]
        # Of rows with equal hashes, drop those whose key equals the previous one. Few remain.
        keys = rows.select(list(self._base.key))
        repeats = np.flatnonzero(~is_first)
        same = keys_equal(keys.take(pa.array(repeats)).columns, keys.take(pa.array(repeats - 1)).columns)
        kept = np.delete(np.arange(len(codes)), repeats[same])
        return rows.take(pa.array(kept)), codes[kept]

    def _refuse_duplicate(self, rows: pa.RecordBatch, positions: Int64Array) -> None:
        example = _shown(self._reader.gather(positions[:1]))
        raise RelationError(
            f"the key ({', '.join(self._base.key)}) was declared unique, but {len(positions)} or more appended rows "
            f"have a key that the relation already has, such as {example}. Nothing was changed; use upsert to replace "
            "rows."
        )

    # ---------------------------------------------------------------- deletions

    def _with_deletions(self) -> list[Segment]:
        """Return the parent's segments with the deletions of this version; segments without live rows are dropped."""
        positions = np.unique(np.concatenate(self._deleted)) if self._deleted else np.empty(0, np.int64)
        segments = []
        start = 0
        for segment in self._segments:
            if not segment.is_keyed:
                segments.append(segment)
                continue
            low, high = np.searchsorted(positions, [start, start + segment.rows])
            changed = self._delete_rows(segment, positions[low:high] - start) if low < high else segment
            if changed.live_rows:
                segments.append(changed)
            start += segment.rows
        return segments

    def _delete_rows(self, segment: Segment, rows: Int64Array) -> Segment:
        bits = np.zeros(-(-segment.rows // 8) * 8, np.bool_)
        bits[rows] = True
        bitmap = np.packbits(bits, bitorder="little")
        count = len(rows)
        if segment.deletions is not None:
            bitmap |= load_deletions(self._files, self._task.number, segment.deletions)
            count += segment.deletions.count
        if count == segment.rows:
            return replace(segment, deletions=Deletions("", count, ""))
        name = f"{segment.name}-{uuid.uuid4().hex[:12]}.deleted"
        self._bitmaps.append(name)
        with self._storage.open_new(self._task.directory / name) as file:
            file.write(bitmap.tobytes())
        self._storage.sync([self._task.directory / name, self._task.directory])
        fault_point("relation.deletions.durable")
        return replace(segment, deletions=Deletions(name, count, digest_of(bitmap)))

    # ---------------------------------------------------------------- merging

    def _merged(self, segments: list[Segment]) -> list[Segment]:
        for is_keyed in (True, False):
            chosen = choose_merge([segment for segment in segments if segment.is_keyed == is_keyed])
            if chosen:
                writer = self._new_writer(is_keyed)
                merged = merge_segments(self._files, self._base.schema, self._task.number, chosen, writer)
                segments = [*merged, *(segment for segment in segments if segment not in chosen)]
        return segments

    def _stats(self, segments: list[Segment]) -> ShardStats:
        keyed = [segment for segment in segments if segment.is_keyed]
        distinct, longest = live_run_statistics(self._files, self._base.schema, self._task.number, keyed)
        return ShardStats(
            rows=sum(segment.live_rows for segment in segments),
            bytes=sum(segment.rows_bytes for segment in segments),
            distinct_codes=distinct,
            max_multiplicity=longest,
            null_key_rows=sum(segment.live_rows for segment in segments if not segment.is_keyed),
        )


def choose_merge(segments: list[Segment]) -> list[Segment]:
    """Return the segments to merge into one, in their order; often none. All have keys, or none has.

    The smallest are merged, plus each next larger one that is at most twice as large as all before it together. A row
    is therefore rewritten about as often as its segment doubles, not on every small write.
    """
    due = {s.name for s in segments if s.rows - s.live_rows > MAX_DELETED_FRACTION * s.rows}
    if len(segments) > MAX_SEGMENTS:
        by_size = sorted(segments, key=lambda s: s.live_rows)
        rows = 0
        for number, segment in enumerate(by_size):
            if number >= 2 and segment.live_rows > 2 * rows:
                break
            due.add(segment.name)
            rows += segment.live_rows
    return [segment for segment in segments if segment.name in due]


class _DuplicateKeys:
    """Refuses a second row of the same key among rows sorted by code."""

    def __init__(self, base: Manifest) -> None:
        self._key, self._hashed = list(base.key), base.code_kind == "xxhash64"
        self._last_code: int | None = None
        self._last_keys: list[pa.RecordBatch] = []

    def check(self, rows: pa.RecordBatch, codes: Int64Array) -> None:
        keys = rows.select(self._key)
        continues = self._last_code is not None and int(codes[0]) == self._last_code
        same_as_before = np.concatenate([[continues], codes[1:] == codes[:-1]])
        if same_as_before.any():
            self._compare(keys, codes, same_as_before)
        run_start = int(np.searchsorted(codes, codes[-1], side="left"))
        if not (continues and run_start == 0):
            self._last_keys = []
        self._last_code = int(codes[-1])
        self._last_keys.append(keys.slice(run_start))

    def _compare(self, keys: pa.RecordBatch, codes: Int64Array, same_as_before: npt.NDArray[np.bool_]) -> None:
        if not self._hashed:
            first = int(np.flatnonzero(same_as_before)[0])
            self._refuse(keys.slice(first, 1))
        # Equal hashes do not imply equal keys: compare the few keys that share one.
        shares = same_as_before | np.append(same_as_before[1:], False)
        seen = set()
        for batch in [*self._last_keys, keys.filter(pa.array(shares))]:
            for number, key in enumerate(_comparable(batch)):
                if key in seen:
                    self._refuse(batch.slice(number, 1))
                seen.add(key)

    def _refuse(self, example: pa.RecordBatch) -> None:
        raise RelationError(
            f"the key ({', '.join(self._key)}) was declared unique, but the data has more than one row for "
            f"{_shown(example)}. Nothing was changed; remove the duplicates, or declare unique=False."
        )


def _comparable(keys: pa.RecordBatch) -> Iterator[tuple[object, ...]]:
    """The keys as tuples that compare equal if the keys are equal in Spark."""
    return zip(*(_comparable_values(column) for column in keys.columns), strict=True)


def _comparable_values(column: pa.Array) -> list[object]:
    if pa.types.is_timestamp(column.type):
        column = column.view(pa.int64())  # Spark's range of dates is larger than Python's
    elif pa.types.is_date32(column.type):
        column = column.view(pa.int32())
    if not pa.types.is_floating(column.type):
        return column.to_pylist()  # type: ignore[no-any-return]
    return ["NaN" if value != value else value + 0.0 for value in column.to_pylist()]


def _shown(row: pa.RecordBatch) -> dict[str, object]:
    """A row for a message; timestamps outside Python's range are formatted by Arrow."""
    shown = {}
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            shown[name] = column[0].as_py()
        except (OverflowError, ValueError):
            shown[name] = pc.cast(column, pa.string())[0].as_py()
    return shown
