"""The join by index alone: a batch of stream tuples is looked up, its rows are gathered, and nothing waits.

What it computes
    The exact join of a stream batch with all shards of a relation that this process can map, or with one: equality of
    keys with or without a residual condition, one-to-many and many-to-many, inner, left, semi and anti.
How
    Each different code of a batch is looked up once. The rows that were found are gathered in the order in which they
    lie on disk, and then taken as often as tuples want them, in the order of the stream.
Memory
    What a batch of tuples and `MAX_ROWS` rows of relation and output take; a batch with more matches is joined part by
    part. Nothing is kept between batches.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.kernels.distinct import distinct_codes
from dovetail.metrics import OperatorMetrics
from dovetail.operators.matching import expand_in_pieces
from dovetail.operators.output import OutputPlan
from dovetail.operators.protocol import CODE_COLUMN
from dovetail.operators.spec import JoinSpec
from dovetail.operators.tuple_store import Positions
from dovetail.spark.shared_cache import RowIndex

__all__ = ["MAX_ROWS", "LookupJoin"]

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Observer = Callable[[Int64Array, Int64Array], None]

MAX_ROWS = 65_536
"""The most relation rows gathered, and output rows put out, together."""


class StreamRows:
    """Rows of a stream batch, as a `StreamSide`; all of them, in order, are not copied."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._batch = batch

    def gather(self, positions: Positions, columns: list[int]) -> list[pa.Array]:
        """The columns with these numbers of the rows at the positions."""
        if positions.size == self._batch.num_rows and np.array_equal(positions, np.arange(positions.size)):
            return [self._batch.column(number) for number in columns]
        rows = pa.array(positions)
        return [self._batch.column(number).take(rows) for number in columns]


class LookupJoin:
    """Join batches of a stream with a relation by index.

    Parameters
    ----------
    spec
        The join, with equality. Its shard is `reader`; its budget is not used.
    reader
        All shards of the relation, opened with the columns that the join needs.
    max_multiplicity
        The most rows that a code has.
    observe
        Told of every batch: its different codes, and how many tuples have each.

    Examples
    --------
    >>> import tempfile
    >>> from dovetail.relation import Relation
    >>> rows = pa.table({"id": [1, 2, 2], "city": ["Rome", "Oslo", "Bergen"]})
    >>> relation = Relation.build(rows, tempfile.mkdtemp() + "/r", on="id", shards=2)
    >>> stream = pa.record_batch({"__code": [2, 7, 1], "id": [2, 7, 1]})
    >>> reader = relation.reader(["city"])
    >>> spec = JoinSpec(reader, stream.schema, (("id", "id"),), how="left")
    >>> join = LookupJoin(spec, reader, relation.stats.max_multiplicity)
    >>> [tuple(row.values()) for batch in join.join(stream) for row in batch.to_pylist()]
    [(2, 'Oslo'), (2, 'Bergen'), (7, None), (1, 'Rome')]
    """

    def __init__(
        self, spec: JoinSpec, reader: RowIndex, max_multiplicity: int, observe: Observer | None = None
    ) -> None:
        self.spec = spec
        self.metrics = OperatorMetrics()
        self.plan = OutputPlan(spec)
        self._reader = reader
        self._observe = observe
        self._max_multiplicity = max(1, max_multiplicity)
        self._stream_names = spec.stream_columns.names

    def join(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """All results of a batch of stream tuples; it has a column ``__code``."""
        column = batch.column(CODE_COLUMN)
        codes = np.asarray(column.fill_null(0).to_numpy(zero_copy_only=False), np.int64)
        is_null = np.asarray(column.is_null().to_numpy(zero_copy_only=False), np.bool_) if column.null_count else None
        own = batch.select(self._stream_names)
        for start, stop in self._parts(codes, is_null):
            part_null = None if is_null is None else is_null[start:stop]
            yield from self._join_part(own.slice(start, stop - start), codes[start:stop], part_null)

    def _parts(self, codes: Int64Array, is_null: BoolArray | None) -> Iterator[tuple[int, int]]:
        """Cut a batch where its tuples have too many rows between them; one tuple alone may still have more."""
        if codes.size * self._max_multiplicity <= MAX_ROWS:
            yield 0, codes.size
            return
        distinct, numbers = distinct_codes(codes)
        counts = self._reader.count(distinct)[numbers]
        if is_null is not None:
            counts[is_null] = 0
        ends = np.cumsum(np.maximum(counts, 1))
        start = 0
        while start < codes.size:
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + MAX_ROWS, side="right")))
            yield start, stop
            start = stop

    def _join_part(self, own: pa.RecordBatch, codes: Int64Array, is_null: BoolArray | None) -> Iterator[pa.RecordBatch]:
        keyed = None if is_null is None else np.flatnonzero(~is_null)
        distinct, numbers = _sorted_distinct(codes if keyed is None else codes[keyed])
        queries, positions = self._reader.lookup(distinct, in_order=False)
        self.metrics.stream_tuples_in += codes.size
        self.metrics.null_key_tuples += 0 if keyed is None else codes.size - keyed.size
        self.metrics.lookups += distinct.size
        if self._observe is not None:
            self._observe(distinct, np.bincount(numbers, minlength=distinct.size))
        side = StreamRows(own)
        if self._max_multiplicity == 1 and self.spec.how in ("inner", "left") and not self.plan.verifies:
            yield from self._put_out_single(side, codes.size, keyed, numbers, distinct.size, queries, positions)
            return
        # The pairs of a query follow one another, whatever the order of the queries.
        starts = np.flatnonzero(np.diff(queries, prepend=-1))
        firsts_of, counts_of = np.zeros(distinct.size, np.int64), np.zeros(distinct.size, np.int64)
        firsts_of[queries[starts]] = starts
        counts_of[queries[starts]] = np.diff(starts, append=queries.size)
        first, counts = firsts_of[numbers], counts_of[numbers]
        if keyed is not None:
            first, counts = _spread(first, keyed, codes.size), _spread(counts, keyed, codes.size)
        if self.spec.how in ("semi", "anti") and not self.plan.verifies:
            yield from self._put_out_tuples(side, counts > 0)
        elif positions.size <= MAX_ROWS:
            rows, row_of_pair = self._gather(positions)
            yield from self._put_out(side, first, counts, rows, row_of_pair)
        else:
            yield from self._put_out_one(side, positions)

    def _gather(self, positions: Int64Array) -> tuple[pa.RecordBatch, Int64Array]:
        """The rows at these positions in the order of the disk, and where each position's row is among them."""
        self.metrics.relation_rows_read += positions.size
        row_of_pair = np.arange(positions.size)
        if positions.size and np.any(positions[1:] < positions[:-1]):
            order = np.argsort(positions)
            positions = positions[order]
            row_of_pair[order] = np.arange(positions.size)
        pieces = [batch for _, batch in self._reader.gather_ascending(positions)]
        if not pieces:
            return pa.RecordBatch.from_pylist([], schema=self._reader.schema), row_of_pair
        return pieces[0] if len(pieces) == 1 else pa.concat_batches(pieces), row_of_pair

    # ---------------------------------------------------------------- putting out

    def _put_out_single(
        self,
        side: StreamRows,
        tuples: int,
        keyed: Int64Array | None,
        numbers: Int64Array,
        distinct: int,
        queries: Int64Array,
        positions: Int64Array,
    ) -> Iterator[pa.RecordBatch]:
        """Put out tuples of which none can have two rows: the short way, and by far the most frequent."""
        rows, row_of_pair = self._gather(positions)
        row_of_code = np.full(distinct, -1, np.int64)
        row_of_code[queries] = row_of_pair
        found = row_of_code[numbers]
        if keyed is not None:
            row_of_tuple = np.full(tuples, -1, np.int64)
            row_of_tuple[keyed] = found
            found = row_of_tuple
        has_match = found >= 0
        self._count(has_match)
        chosen = np.arange(tuples)
        if self.spec.how == "inner" and not has_match.all():
            chosen = np.flatnonzero(has_match)
            found = found[chosen]
        if chosen.size:
            yield self._counted(self.plan.joined(side, chosen, rows, found))

    def _put_out(
        self, side: StreamRows, first: Int64Array, counts: Int64Array, rows: pa.RecordBatch, row_of_pair: Int64Array
    ) -> Iterator[pa.RecordBatch]:
        """Put out tuples whose candidates are pairs ``[first, first + counts)``."""
        has_match = counts > 0
        if not self.plan.verifies:
            self._count(has_match)
            if self.spec.how == "left" and not has_match.all():
                # One more pair, with no row, for all who have none.
                first, counts = np.where(has_match, first, row_of_pair.size), np.maximum(counts, 1)
                row_of_pair = np.append(row_of_pair, -1)
            for tuples, pairs in expand_in_pieces(first, counts, row_of_pair, MAX_ROWS):
                yield self._counted(self.plan.joined(side, tuples, rows, pairs))
            return
        has_match = np.zeros(counts.size, np.bool_)
        for tuples, pairs in expand_in_pieces(first, counts, row_of_pair, MAX_ROWS):
            yield from self._put_out_verified(side, tuples, rows, pairs, has_match)
        yield from self._put_out_rest(side, has_match)

    def _put_out_one(self, side: StreamRows, positions: Int64Array) -> Iterator[pa.RecordBatch]:
        """Put out one tuple that has more candidates than are gathered together."""
        has_match = np.zeros(1, np.bool_)
        for start in range(0, positions.size, MAX_ROWS):
            rows, pairs = self._gather(positions[start : start + MAX_ROWS])
            yield from self._put_out_verified(side, np.zeros(pairs.size, np.int64), rows, pairs, has_match)
        yield from self._put_out_rest(side, has_match)

    def _put_out_verified(
        self, side: StreamRows, tuples: Positions, rows: pa.RecordBatch, pairs: Positions, has_match: BoolArray
    ) -> Iterator[pa.RecordBatch]:
        """Put out those pairs that are matches, and note which tuples had one."""
        if self.plan.verifies:
            kept = np.flatnonzero(self.plan.verify(side, tuples, rows, pairs))
            self.metrics.pairs_rejected += tuples.size - kept.size
            tuples, pairs = tuples[kept], pairs[kept]
        has_match[tuples] = True
        if tuples.size and self.spec.how in ("inner", "left"):
            yield self._counted(self.plan.joined(side, tuples, rows, pairs))

    def _put_out_rest(self, side: StreamRows, has_match: BoolArray) -> Iterator[pa.RecordBatch]:
        """Put out what is known of tuples once all their candidates were looked at."""
        if self.spec.how in ("semi", "anti"):
            yield from self._put_out_tuples(side, has_match)
            return
        self._count(has_match)
        unmatched = np.flatnonzero(~has_match)
        if self.spec.how == "left" and unmatched.size:
            yield self._counted(self.plan.unmatched(side, unmatched))

    def _put_out_tuples(self, side: StreamRows, has_match: BoolArray) -> Iterator[pa.RecordBatch]:
        self._count(has_match)
        tuples = np.flatnonzero(has_match if self.spec.how == "semi" else ~has_match)
        if tuples.size:
            yield self._counted(self.plan.unmatched(side, tuples))

    def _count(self, has_match: BoolArray) -> None:
        matched = int(np.count_nonzero(has_match))
        self.metrics.matched_tuples += matched
        self.metrics.unmatched_tuples += has_match.size - matched

    def _counted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        self.metrics.output_rows += batch.num_rows
        return batch


def _sorted_distinct(codes: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The different codes in ascending order, which is the order of the index, and for each row the number of its."""
    distinct, numbers = distinct_codes(codes)
    order = np.argsort(distinct)
    rank = np.empty(order.size, np.int64)
    rank[order] = np.arange(order.size)
    return distinct[order], rank[numbers]


def _spread(values: Int64Array, rows: Int64Array, size: int) -> Int64Array:
    """The values at these rows, 0 elsewhere."""
    spread = np.zeros(size, np.int64)
    spread[rows] = values
    return spread
