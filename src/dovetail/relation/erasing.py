"""Erasing: the rows of some keys leave every version of a relation, and every file of it.

A delete only marks rows: they stay in segments, and in older versions. An erasure rewrites every segment that has a row
of the keys, marked as deleted or not, without these rows, and replaces the manifests of the versions that use it. The
versions keep their numbers, so whoever names one still finds it, without those rows. This is the only operation that
changes a manifest.

New files are durable before the first manifest is replaced, and the old ones are removed when the last has been. An
erasure that was killed in between is completed by repeating it.
"""

import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.core.errors import SchemaError
from dovetail.core.faultpoints import fault_point
from dovetail.relation.deletions import load_deletions
from dovetail.relation.format import Deletions, Manifest, Segment, Shard, ShardStats
from dovetail.relation.io import Arena
from dovetail.relation.keys import compute_codes, keys_equal
from dovetail.relation.looking import table_of_keys
from dovetail.relation.merge import live_run_statistics
from dovetail.relation.pins import holders
from dovetail.relation.segment_reader import SegmentReader
from dovetail.relation.segment_writer import SegmentWriter
from dovetail.relation.version_log import VersionLog
from dovetail.storage.digests import digest_of
from dovetail.storage.files import RelationFiles

__all__ = ["ErasureReport", "erase"]

_STEP_ROWS = 65_536
_ALL = 1 << 62
_NOT_OURS = (
    "rows that were joined and written elsewhere: sinks, side outputs, dead letters",
    "the sources that the relation was built from, which would bring the keys back",
    "caches and waiting rows of queries and flows that join with the relation",
)

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ErasureReport:
    """What an erasure did.

    Attributes
    ----------
    keys
        How many keys were given.
    rows
        Rows of these keys that were in segments, those of older versions and deleted ones included.
    versions
        The versions whose manifests were replaced.
    segments, bytes
        How many segments were written again, and their size.
    files_removed
        Files that no version uses any more.
    not_erased
        Where else rows of the keys may be, which is not the relation's.
    """

    keys: int
    rows: int
    versions: tuple[int, ...]
    segments: int
    bytes: int
    files_removed: int
    not_erased: tuple[str, ...]


def erase(files: RelationFiles, keys: Any) -> ErasureReport:
    """See `Relation.erase`."""
    with files.writing() as root:
        log = VersionLog(files)
        # Completes a vacuum or an erasure that was killed.
        removed_before = log.vacuum(root, _ALL).files
        manifests = [log.read(number) for number in log.numbers()]
        work = _Erasure(files, manifests[-1], keys)
        changed = [new for old in manifests if (new := work.without(old)) is not old]
        fault_point("relation.erase.written")
        for manifest in changed:
            # Replaced at once and durably; a reader finds one or the other.
            path = root / "versions" / f"{manifest.version:08d}.json"
            files.storage.put(path, manifest.to_json().encode())
            fault_point("relation.erase.manifest")
        removed = log.vacuum(root, _ALL).files
        pinned = [f"the state of the flow with the checkpoint {name}" for name in holders(root, files.storage)]
        return ErasureReport(
            keys=work.asked.num_rows,
            rows=work.rows,
            versions=tuple(manifest.version for manifest in changed),
            segments=work.segments,
            bytes=work.bytes,
            files_removed=removed_before + removed,
            not_erased=(*pinned, *_NOT_OURS),
        )


class _Erasure:
    """Rewrites the segments of a relation, each once for all versions."""

    def __init__(self, files: RelationFiles, newest: Manifest, keys: Any) -> None:
        self._files, self._key = files, list(newest.key)
        self._is_hashed = newest.code_kind == "xxhash64"
        schema = pa.schema([newest.schema.field(name) for name in self._key])
        self.asked = table_of_keys(keys, schema).combine_chunks()
        codes = compute_codes(self.asked, newest.key)
        if codes.null_count:
            raise SchemaError("A key with a NULL has no rows of its own: it equals no other.")
        self._codes = codes.to_numpy()
        self._done: dict[tuple[int, str], tuple[Segment | None, Int64Array]] = {}
        self.rows = self.segments = self.bytes = 0

    def without(self, manifest: Manifest) -> Manifest:
        """The manifest of the same version without the keys; the same object if it has none of them."""
        shards = tuple(self._shard(manifest, number, shard) for number, shard in enumerate(manifest.shards))
        if all(new is old for new, old in zip(shards, manifest.shards, strict=True)):
            return manifest
        return replace(manifest, shards=shards)

    def _shard(self, manifest: Manifest, number: int, shard: Shard) -> Shard:
        segments = [self._segment(manifest, number, segment) for segment in shard.segments]
        if all(new is old for new, old in zip(segments, shard.segments, strict=True)):
            return shard
        left = [segment for segment in segments if segment is not None and segment.live_rows]
        keyed = [segment for segment in left if segment.is_keyed]
        distinct, longest = live_run_statistics(self._files, manifest.schema, number, keyed)
        stats = ShardStats(
            rows=sum(segment.live_rows for segment in left),
            bytes=sum(segment.rows_bytes for segment in left),
            distinct_codes=distinct,
            max_multiplicity=longest,
            null_key_rows=sum(segment.live_rows for segment in left if not segment.is_keyed),
        )
        return Shard(tuple(left), stats)

    def _segment(self, manifest: Manifest, shard: int, segment: Segment) -> Segment | None:
        if not segment.is_keyed:
            return segment
        name = (shard, segment.name)
        if name not in self._done:
            self._done[name] = self._rewritten(manifest, shard, replace(segment, deletions=None))
        new, kept = self._done[name]
        if new is None or new.name == segment.name:
            return segment if new is not None else None
        if segment.deletions is None:
            return new
        bits = np.unpackbits(load_deletions(self._files, shard, segment.deletions), bitorder="little")[kept]
        return self._with_deletions(shard, new, bits)

    def _rewritten(self, manifest: Manifest, shard: int, segment: Segment) -> tuple[Segment | None, Int64Array]:
        """The segment without the rows of the keys, and which rows it has; the same one if it has none of them."""
        schema = manifest.schema
        reader = SegmentReader(self._files, shard, segment, schema, schema.names, "map", Arena())
        gone = self._rows_of_keys(reader, schema)
        if not gone.size:
            return segment, np.empty(0, np.int64)
        self.rows += int(gone.size)
        kept = np.setdiff1d(np.arange(segment.rows), gone, assume_unique=True)
        if not kept.size:
            return None, kept
        codes = reader.all_codes()
        directory = self._files.writable() / "data" / str(shard)
        writer = SegmentWriter(directory, uuid.uuid4().hex, schema, True, self._files.storage)
        try:
            for first in range(0, kept.size, _STEP_ROWS):
                rows = kept[first : first + _STEP_ROWS]
                writer.write(pa.concat_batches(reader.gather(rows)), codes[rows])
            new = writer.close()
        except BaseException:
            writer.abandon()
            raise
        assert new is not None, "rows were written"
        self.segments += 1
        self.bytes += new.rows_bytes
        return new, kept

    def _rows_of_keys(self, reader: SegmentReader, schema: pa.Schema) -> Int64Array:
        order = np.argsort(self._codes, kind="stable")
        firsts, counts = reader.lookup(self._codes[order])
        found = [
            (query, np.arange(first, first + count))
            for query, first, count in zip(order.tolist(), firsts.tolist(), counts.tolist(), strict=True)
            if count
        ]
        if not found:
            return np.empty(0, np.int64)
        rows = np.concatenate([positions for _, positions in found])
        if self._is_hashed:
            queries = np.concatenate([np.full(positions.size, query) for query, positions in found])
            by_row = np.argsort(rows, kind="stable")
            rows, queries = rows[by_row], queries[by_row]
            theirs = pa.concat_batches(reader.gather(rows)).select(self._key)
            mine = [self.asked.column(name).combine_chunks().take(pa.array(queries)) for name in self._key]
            rows = rows[keys_equal(mine, theirs.columns)]
        return np.unique(rows)

    def _with_deletions(self, shard: int, segment: Segment, bits: npt.NDArray[np.uint8]) -> Segment:
        count = int(np.count_nonzero(bits))
        if not count:
            return segment
        if count == segment.rows:
            return replace(segment, deletions=Deletions("", count, ""))
        bitmap = np.packbits(np.concatenate([bits, np.zeros(-len(bits) % 8, np.uint8)]), bitorder="little")
        name = f"{segment.name}-{uuid.uuid4().hex[:12]}.deleted"
        path: Path = self._files.writable() / "data" / str(shard) / name
        with self._files.storage.open_new(path) as file:
            file.write(bitmap.tobytes())
        self._files.storage.sync([path, path.parent])
        return replace(segment, deletions=Deletions(name, count, digest_of(bitmap)))
