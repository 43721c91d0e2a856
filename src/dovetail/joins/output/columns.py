"""Turns pairs into output batches: where columns come from, and what a match needs besides equal codes."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.arrays import BoolArray
from dovetail.joins.spec import JoinSpec
from dovetail.joins.window.tuple_store import Positions, TupleStore
from dovetail.relation import keys_equal

__all__ = ["BatchRows", "OutputPlan", "StreamSide"]


class StreamSide(Protocol):
    """Where the stream's half of a pair is gathered from: the window, or an offered batch."""

    def gather(self, positions: Positions, columns: list[int]) -> list[pa.Array]: ...


class BatchRows:
    """Rows of a stream batch as a `StreamSide`; the batch has the stream's own columns, without the code.

    Examples
    --------
    >>> BatchRows(pa.record_batch({"v": [5, 6]})).gather(np.array([1, 1]), [0])[0].to_pylist()
    [6, 6]
    """

    def __init__(self, batch: pa.RecordBatch, may_share: bool = False) -> None:
        self._batch = batch
        # Whether all rows, in order, may be returned without a copy: not if results are held, which would keep the
        # whole batch of a slice alive.
        self._may_share = may_share

    def gather(self, positions: Positions, columns: list[int]) -> list[pa.Array]:
        """The columns with these numbers of the rows at the positions."""
        is_all = self._may_share and positions.size == self._batch.num_rows
        if is_all and np.array_equal(positions, np.arange(positions.size)):
            return [self._batch.column(number) for number in columns]
        rows = pa.array(positions)
        return [self._batch.column(number).take(rows) for number in columns]


class OutputPlan:
    """The output's columns, in Spark's order: join columns, the stream's others, the relation's others."""

    def __init__(self, spec: JoinSpec) -> None:
        self._spec = spec
        stream, relation = spec.stream_columns, spec.shard.schema
        keys = [stream_name for stream_name, _ in spec.on]
        names = keys + [name for name in stream.names if name not in keys]
        self._stream_columns = [stream.get_field_index(name) for name in names]
        self._relation_columns = [relation.get_field_index(name) for name in spec.relation_columns]
        self._needs_whole_rows = self._relation_columns == list(range(len(relation)))
        fields = [stream.field(number) for number in self._stream_columns]
        for number in self._relation_columns:
            column = relation.field(number)
            fields.append(column.with_nullable(True) if spec.how == "left" else column)
        self.schema: pa.Schema = pa.schema(fields)
        self._key_columns = [(stream.get_field_index(s), relation.get_field_index(r)) for s, r in spec.on]
        asked: tuple[list[str], list[str]] = ([], [])
        if spec.condition is not None:
            asked = spec.condition.columns(stream, relation)
        self._condition_stream = [stream.get_field_index(name) for name in asked[0]]
        self._condition_relation = [relation.get_field_index(name) for name in asked[1]]

    @property
    def verifies(self) -> bool:
        """Whether a match needs more than equal codes."""
        return self._spec.must_recheck_keys or self._spec.condition is not None

    @property
    def stream_bytes(self) -> float:
        """The approximate bytes of the stream's part of an output row; variable-width columns are guessed."""
        stream = self._spec.stream_columns
        return TupleStore.fixed_bytes_per_position(stream) + TupleStore.guess_paged_bytes(stream)

    @property
    def row_bytes(self) -> float:
        """The approximate bytes of an output row; variable-width columns of the stream are guessed."""
        return (
            self.stream_bytes + (self._spec.shard.row_bytes if self._relation_columns else 0.0) + len(self.schema) / 8
        )

    def verify(self, side: StreamSide, positions: Positions, relation: pa.RecordBatch, rows: Positions) -> BoolArray:
        """Which pairs (tuple at ``positions[i]``, relation row ``rows[i]``) with equal codes are matches."""
        mask = np.ones(positions.size, np.bool_)
        if self._spec.must_recheck_keys:
            left = side.gather(positions, [s for s, _ in self._key_columns])
            taken = pa.array(rows)
            mask &= keys_equal(left, [relation.column(r).take(taken) for _, r in self._key_columns])
        condition = self._spec.condition
        if condition is None:
            return mask
        # A condition only sees pairs with equal keys: it may rely on that.
        kept = np.flatnonzero(mask)
        if kept.size:
            stream_batch = self._batch(side.gather(positions[kept], self._condition_stream), self._condition_stream)
            taken = pa.array(rows[kept])
            columns = [relation.column(number).take(taken) for number in self._condition_relation]
            schema = pa.schema([relation.schema.field(number) for number in self._condition_relation])
            relation_batch = record_batch(columns, schema, kept.size)
            mask[kept] = condition.mask(stream_batch, relation_batch)
        return mask

    def joined(
        self, side: StreamSide, positions: Positions, relation: pa.RecordBatch, rows: Positions | None
    ) -> pa.RecordBatch:
        """The output rows of pairs; row number -1 stands for a relation row of NULLs.

        Without row numbers, the relation's rows are already those of the pairs.
        """
        columns = side.gather(positions, self._stream_columns)
        if rows is None:
            columns += [relation.column(number) for number in self._relation_columns]
        elif self._relation_columns:
            may_lack = self._spec.how == "left" and rows.size > 0
            taken = pa.array(rows, mask=rows < 0) if may_lack and int(rows.min()) < 0 else pa.array(rows)
            needed = relation if self._needs_whole_rows else relation.select(self._relation_columns)
            columns += pc.take(needed, taken, boundscheck=False).columns
        return record_batch(columns, self.schema, positions.size)

    def unmatched(self, side: StreamSide, positions: Positions) -> pa.RecordBatch:
        """The output rows of tuples without a match: for left with NULLs, for anti (and semi) unchanged."""
        columns = side.gather(positions, self._stream_columns)
        kinds = [self._spec.shard.schema.field(number).type for number in self._relation_columns]
        columns += [pa.nulls(positions.size, kind) for kind in kinds]
        return record_batch(columns, self.schema, positions.size)

    def _batch(self, columns: list[pa.Array], numbers: Sequence[int]) -> pa.RecordBatch:
        stream = self._spec.stream_columns
        return record_batch(
            columns, pa.schema([stream.field(number) for number in numbers]), len(columns[0]) if columns else 0
        )


def record_batch(columns: list[pa.Array], schema: pa.Schema, num_rows: int) -> pa.RecordBatch:
    """A record batch that keeps its length even without columns."""
    if columns:
        return pa.RecordBatch.from_arrays(columns, schema=schema)
    return pa.RecordBatch.from_struct_array(pa.array([{}] * num_rows, pa.struct([])))
