"""Emits results: batches of bounded size, and rows without a match."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.core.arrays import BoolArray, Int32Array, Int64Array
from dovetail.core.memory import Reservation
from dovetail.joins.multiway.chunk import Chunk, get_bits, set_bits
from dovetail.joins.multiway.metrics import MJoinMetrics
from dovetail.joins.multiway.output import MultiOutput, RowRefs
from dovetail.joins.multiway.probing import Partial
from dovetail.joins.multiway.spec import MJoinSpec

__all__ = ["ResultWriter"]

_VARIABLE = (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)


class ResultWriter:
    """Turns complete results into batches, and maintains the done bits of preserved inputs."""

    def __init__(
        self, spec: MJoinSpec, output: MultiOutput, metrics: MJoinMetrics, reservation: Reservation, max_bytes: int
    ) -> None:
        self._spec = spec
        self._output = output
        self._metrics = metrics
        self._reservation = reservation
        self._max_bytes = max_bytes

    def matched(self, result: Partial) -> Iterator[pa.RecordBatch]:
        """The output rows of complete results, according to the join type."""
        refs = dict(result.refs)
        if self._spec.how == "semi":
            refs = {0: _first_time(refs[0])}
        for i, kept in enumerate(self._spec.preserved):
            if kept and i in refs:
                _mark_done(refs[i])
        if self._spec.how == "anti":
            return
        count = len(next(iter(refs.values())).rows)
        for start, stop in self._cuts(refs, count):
            self._metrics.output_rows += stop - start
            part = {i: r.take(slice(start, stop)) for i, r in refs.items()}
            yield from self._given(self._output.batch(part, stop - start))

    def unmatched(self, i: int, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Rows of a preserved input that can no longer match; `rows` is already of bounded size."""
        if rows.num_rows and self._spec.preserved[i] and self._spec.gives_unmatched:
            self._metrics.output_rows += rows.num_rows
            self._metrics.unmatched_rows += rows.num_rows
            yield from self._given(self._output.nulls_around(i, rows))

    def unmatched_of(self, i: int, chunk: Chunk, candidates: BoolArray) -> Iterator[pa.RecordBatch]:
        """The candidates of a chunk that have not matched; marks them done."""
        assert chunk.done is not None
        rows = np.flatnonzero(candidates & ~get_bits(chunk.done, None, len(chunk))).astype(np.int32)
        refs = RowRefs([chunk], None, rows)
        everything = list(range(chunk.rows.num_columns))
        for start, stop in self._cuts({i: refs}, len(rows)):
            part = refs.take(slice(start, stop))
            set_bits(chunk.done, part.rows)
            batch = pa.RecordBatch.from_arrays(part.gather(everything), schema=chunk.rows.schema)
            yield from self.unmatched(i, batch)

    def _given(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        # The batch counts towards our budget while the consumer works on it.
        self._reservation.grow(min(int(batch.nbytes), self._max_bytes))
        try:
            yield batch
        finally:
            self._reservation.shrink(min(int(batch.nbytes), self._max_bytes))

    def _cuts(self, refs: dict[int, RowRefs], count: int) -> Iterator[tuple[int, int]]:
        """Ranges of result rows, at least one row each, whose batches stay within bounds."""
        if count == 0:
            return
        sizes = np.full(count, 8 * len(self._output.schema) + 8, np.int64)
        for i, r in refs.items():
            sizes += _row_sizes(r, self._output.columns_per_input[i])
        ends = np.cumsum(sizes)
        start, before = 0, 0
        while start < count:
            stop = max(start + 1, int(np.searchsorted(ends, before + self._max_bytes, side="right")))
            yield start, stop
            start, before = stop, int(ends[stop - 1])


def _row_sizes(refs: RowRefs, columns: Sequence[int]) -> Int64Array:
    """Bytes per referenced row beyond eight per column."""
    sizes = np.zeros(len(refs.rows), np.int64)
    if not len(refs.rows):
        return sizes
    schema = refs.chunks[0].rows.schema
    for number in columns:
        kind = schema.field(number).type
        if any(is_kind(kind) for is_kind in _VARIABLE):
            for places, chunk, rows in _places_by_chunk(refs):
                sizes[places] += _lengths(chunk.rows.column(number), rows)
        elif pa.types.is_primitive(kind) or pa.types.is_boolean(kind):
            sizes += max(0, kind.bit_width // 8 - 8)
        else:
            means = [int(c.rows.column(number).nbytes) // max(1, len(c)) for c in refs.chunks]
            sizes += refs.values(
                [np.full(len(c), 4 * mean, np.int64) for c, mean in zip(refs.chunks, means, strict=True)]
            )
    return sizes


def _lengths(column: pa.Array, rows: Int32Array) -> Int64Array:
    """The lengths of the values of some rows; nothing else of the column is read."""
    if len(column) == 0:
        return np.zeros(len(rows), np.int64)
    is_large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    dtype = np.dtype(np.int64 if is_large else np.int32)
    offsets = np.frombuffer(column.buffers()[1], dtype, len(column) + 1, column.offset * dtype.itemsize)
    return offsets[rows + 1].astype(np.int64) - offsets[rows]


def _mark_done(refs: RowRefs) -> None:
    for chunk, rows in _by_chunk(refs):
        assert chunk.done is not None
        set_bits(chunk.done, rows)


def _first_time(refs: RowRefs) -> RowRefs:
    """References to rows that are not done, each once."""
    source = np.zeros(len(refs.rows), np.int32) if refs.source is None else refs.source
    _, first = np.unique(source.astype(np.int64) << 32 | refs.rows, return_index=True)
    is_new = np.zeros(len(refs.rows), np.bool_)
    is_new[first] = True
    for number, chunk in enumerate(refs.chunks):
        mine = np.flatnonzero((source == number) & is_new)
        if mine.size:
            assert chunk.done is not None
            is_new[mine] = ~get_bits(chunk.done, refs.rows[mine])
    return refs.take(is_new)


def _by_chunk(refs: RowRefs) -> Iterator[tuple[Chunk, Int32Array]]:
    for _, chunk, rows in _places_by_chunk(refs):
        yield chunk, rows


def _places_by_chunk(refs: RowRefs) -> Iterator[tuple[npt.NDArray[np.intp] | slice, Chunk, Int32Array]]:
    """The references of each chunk: their places, and their rows."""
    if refs.source is None:
        yield slice(None), refs.chunks[0], refs.rows
        return
    for number in np.unique(refs.source).tolist():
        places = np.flatnonzero(refs.source == number)
        yield places, refs.chunks[number], refs.rows[places]
