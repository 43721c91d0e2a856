"""The join codes whose rows differ between two versions of a relation."""

import numpy as np
import numpy.typing as npt

from dovetail.core.errors import RelationError
from dovetail.kernels.spark_hash import shard_of_codes
from dovetail.relation.format import Manifest, Segment
from dovetail.relation.io import Arena
from dovetail.relation.segment_reader import SegmentReader
from dovetail.storage.files import RelationFiles

__all__ = ["changed_codes"]

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def changed_codes(files: RelationFiles, before: Manifest, after: Manifest, codes: Int64Array) -> BoolArray:
    """Return which of these codes may have different rows in ``after`` than in ``before``; all, if it is unknown.

    A code counts as changed if it is in a segment that only one of the versions has, or if only one version has deleted
    one of its rows. A merge of segments rewrites unchanged rows, so their codes count as changed too.
    """
    if before.relation_id != after.relation_id or len(before.shards) != len(after.shards):
        return np.ones(codes.size, np.bool_)
    changed = np.zeros(codes.size, np.bool_)
    numbers = shard_of_codes(codes, len(after.shards))
    for number, (old, new) in enumerate(zip(before.shards, after.shards, strict=True)):
        mine = np.flatnonzero(numbers == number)
        if mine.size == 0 or old.segments == new.segments:
            continue
        old_segments, new_segments = ({s.name: s for s in shard.segments if s.is_keyed} for shard in (old, new))
        for name in old_segments.keys() | new_segments.keys():
            pair = [s for s in (old_segments.get(name), new_segments.get(name)) if s is not None]
            try:
                changed[mine] |= _differs(files, number, after, pair, codes[mine])
            except RelationError:
                # Vacuumed: the old segment can no longer be compared.
                changed[mine] = True
    return changed


def _differs(
    files: RelationFiles, number: int, manifest: Manifest, segments: list[Segment], codes: Int64Array
) -> BoolArray:
    """Return which codes a segment has in only one of two versions, or with different rows deleted."""
    if len(segments) == 2 and segments[0].deletions == segments[1].deletions:
        return np.zeros(codes.size, np.bool_)
    readers = [SegmentReader(files, number, segment, manifest.schema, [], "map", Arena()) for segment in segments]
    first, counts = readers[0].lookup(codes)
    if len(readers) == 1:
        return np.asarray(counts > 0, np.bool_)
    owners = np.repeat(np.arange(codes.size), counts)
    rows = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(owners.size)
    differs = np.zeros(codes.size, np.bool_)
    differs[owners[readers[0].is_deleted(rows) != readers[1].is_deleted(rows)]] = True
    return differs
