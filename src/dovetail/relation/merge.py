"""Merging sorted segments, and computing statistics as if they were merged.

Both stream: codes are mapped and rows are gathered one record batch at a time, so memory does not grow with the
segments.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.kernels.sorted_codes import merge_sorted_runs, run_statistics
from dovetail.relation.format import Segment
from dovetail.relation.io import Arena
from dovetail.relation.segment_reader import SegmentReader
from dovetail.relation.segment_writer import SegmentWriter
from dovetail.storage.files import RelationFiles

MERGE_ROWS = 65_536
MERGE_BYTES = 64 * 2**20


def merge_segments(
    files: RelationFiles, schema: pa.Schema, shard: int, segments: Sequence[Segment], writer: SegmentWriter
) -> list[Segment]:
    """Write the live rows of ``segments`` in code order. Returns one segment, or none if no row is live.

    Segments of rows whose key has a NULL have no codes and are concatenated.
    """
    readers = _open(files, schema, shard, segments, schema.names)
    runs = [reader.all_codes() if reader.is_keyed else np.zeros(reader.rows, np.int64) for reader in readers]
    cursors = np.zeros(len(runs), np.int64)
    widest_row_bytes = max(segment.rows_bytes / segment.rows for segment in segments)
    step_rows = max(1, min(MERGE_ROWS, int(MERGE_BYTES / widest_row_bytes)))
    while True:
        sources, rows = merge_sorted_runs(runs, cursors, step_rows)
        if not len(sources):
            break
        pieces: list[pa.RecordBatch] = []
        codes, order = [], []
        for number, (reader, run) in enumerate(zip(readers, runs, strict=True)):
            mine = np.flatnonzero(sources == number)
            wanted = rows[mine]
            if reader.deleted is not None:
                alive = ~reader.is_deleted(wanted)
                mine, wanted = mine[alive], wanted[alive]
            if len(mine):
                pieces.extend(reader.gather(wanted))
                codes.append(run[wanted])
                order.append(mine)
        if pieces:
            by_code = np.argsort(np.concatenate(order), kind="stable")
            batch = pc.take(pa.concat_batches(pieces), pa.array(by_code), boundscheck=False)
            writer.write(batch, np.concatenate(codes)[by_code])
    merged = writer.close()
    return [] if merged is None else [merged]


def live_run_statistics(
    files: RelationFiles, schema: pa.Schema, shard: int, segments: Sequence[Segment]
) -> tuple[int, int]:
    """Count the distinct codes of the live rows of ``segments``, and the rows of the most frequent code."""
    readers = _open(files, schema, shard, segments, [])
    masks = [_deleted_mask(reader) for reader in readers]
    return run_statistics([reader.all_codes() for reader in readers], masks)


def _open(
    files: RelationFiles, schema: pa.Schema, shard: int, segments: Sequence[Segment], columns: Sequence[str]
) -> list[SegmentReader]:
    arena = Arena()
    return [SegmentReader(files, shard, segment, schema, columns, "map", arena) for segment in segments]


def _deleted_mask(reader: SegmentReader) -> npt.NDArray[np.bool_] | None:
    if reader.deleted is None:
        return None
    return np.unpackbits(reader.deleted, bitorder="little")[: reader.rows].view(np.bool_)
