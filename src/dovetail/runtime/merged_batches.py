"""Merges Spark's batches, which are smaller than is best for lookups."""

from collections.abc import Iterator

import pyarrow as pa

__all__ = ["merged_batches"]


def merged_batches(batches: Iterator[pa.RecordBatch], rows: int, size_bytes: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of `rows`, or fewer once `size_bytes` are reached.

    Examples
    --------
    >>> batches = [pa.record_batch({"a": [1, 2]}), pa.record_batch({"a": [3]}), pa.record_batch({"a": [4, 5]})]
    >>> [batch.column(0).to_pylist() for batch in merged_batches(iter(batches), 3, 1000)]
    [[1, 2, 3], [4, 5]]
    >>> [batch.column(0).to_pylist() for batch in merged_batches(iter(batches), 3, 16)]
    [[1, 2], [3, 4], [5]]
    """
    waiting: list[pa.RecordBatch] = []
    count = held_bytes = 0
    for batch in batches:
        row_bytes = max(1, int(batch.nbytes) // max(1, batch.num_rows))
        while batch.num_rows:
            room = max(1, min(rows - count, (size_bytes - held_bytes) // row_bytes))
            taken = batch.slice(0, room)
            batch = batch.slice(taken.num_rows)
            waiting.append(taken)
            count, held_bytes = count + taken.num_rows, held_bytes + taken.num_rows * row_bytes
            if count >= rows or held_bytes + row_bytes > size_bytes:
                yield waiting[0] if len(waiting) == 1 else pa.concat_batches(waiting)
                waiting, count, held_bytes = [], 0, 0
    if waiting:
        yield waiting[0] if len(waiting) == 1 else pa.concat_batches(waiting)
