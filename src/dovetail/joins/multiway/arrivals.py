"""Reads arriving batches: checks them, slices them, and splits them into codes, event times and rows."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import BoolArray
from dovetail.core.errors import BudgetError, SchemaError
from dovetail.joins.multiway.chunk import Tuples
from dovetail.joins.multiway.integers import integers_of
from dovetail.joins.multiway.spec import MJoinSpec, TimeWindow
from dovetail.kernels.bucket_index import bucket_count_of

__all__ = ["Arrival", "ArrivalReader"]


class Arrival(NamedTuple):
    """A slice of a batch: the tuples that can match, and those with a NULL key or behind the watermark."""

    tuples: Tuples
    nulls: pa.RecordBatch
    late: pa.RecordBatch
    accepted: int


class ArrivalReader:
    """Reads the batches of all inputs of a join."""

    def __init__(self, spec: MJoinSpec, max_slice_bytes: int) -> None:
        self._spec = spec
        self._max_slice_bytes = max_slice_bytes
        self._times = [
            [schema.get_field_index(c) for c in spec.window.columns_of(name)]
            if isinstance(spec.window, TimeWindow)
            else []
            for name, schema in spec.schemas.items()
        ]

    def checked(self, i: int, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch with its codes first and its columns in the declared order; refused if a column is missing."""
        name = self._spec.names[i]
        schema, columns, fields = self._spec.schemas[name], [], []
        for k in self._spec.input_attributes[i]:
            column = self._spec.code_columns[k]
            if column not in batch.schema.names or batch.schema.field(column).type != pa.int64():
                raise SchemaError(
                    f"A batch of input {name!r} has no int64 column {column!r} with the codes of {self._describe(k)}.",
                    hint="Add it, for instance by MJoinSpec.with_codes.",
                )
            columns.append(batch.column(column))
            fields.append(pa.field(column, pa.int64()))
        for field in schema:
            if field.name not in batch.schema.names:
                raise SchemaError(f"A batch of input {name!r} has no column {field.name!r}.")
            column_type = batch.schema.field(field.name).type
            if column_type != field.type:
                raise SchemaError(
                    f"Column {field.name!r} of input {name!r} is {column_type}, but is declared as {field.type}."
                )
            columns.append(batch.column(field.name))
            fields.append(field)
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))

    def slices(self, i: int, batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Slices of the batch whose chunks stay within bounds, each with the maximum size of its chunk in bytes."""
        start = 0
        while start < batch.num_rows:
            rows = batch.num_rows - start
            while True:
                piece = batch.slice(start, rows)
                size = self.chunk_bytes(i, int(piece.nbytes), rows)
                if size <= self._max_slice_bytes:
                    break
                if rows == 1:
                    wanted = 16 * size
                    raise BudgetError(
                        f"One tuple of input {self._spec.names[i]!r} takes {size} bytes; a budget of "
                        f"{self._spec.budget.total_bytes} bytes has no room for it.",
                        hint=f"Raise the budget to {wanted} bytes or more.",
                        minimum_bytes=wanted,
                    )
                rows = max(1, min(rows // 2, rows * self._max_slice_bytes // size))
            yield piece, size
            start += rows

    def chunk_bytes(self, i: int, row_bytes: int, rows: int) -> int:
        """The maximum size of a chunk of `rows` rows."""
        attributes = len(self._spec.input_attributes[i])
        buckets = bucket_count_of(rows, self._spec.partitions) + 1
        # Splitting rows for disk from rows for memory creates two indexes.
        index_bytes = attributes * (4 * 2 * buckets + 64)
        # Buffers are rounded up, and offsets have one more entry than values.
        rounding_bytes = 16 * len(self._spec.schemas[self._spec.names[i]])
        return row_bytes + rows * (8 + 16 + 1 + 12 * (attributes - 1)) + index_bytes + rounding_bytes

    def read(
        self, i: int, piece: pa.RecordBatch, first_arrival: int, first_place: int, watermark: int | None
    ) -> Arrival:
        """Split a slice into its parts; its rows get consecutive stamps."""
        attributes = len(self._spec.input_attributes[i])
        rows = piece.select(range(attributes, piece.num_columns))
        codes, valid = [], np.ones(piece.num_rows, np.bool_)
        for k in range(attributes):
            values, is_valid = integers_of(piece.column(k))
            codes.append(values)
            valid &= is_valid
        low = high = None
        is_late = np.zeros(piece.num_rows, np.bool_)
        if self._times[i]:
            low, low_valid = integers_of(rows.column(self._times[i][0]))
            high = low
            if self._times[i][1] != self._times[i][0]:
                high, _ = integers_of(rows.column(self._times[i][1]))
            valid &= low_valid
            if watermark is not None:
                # A late tuple is late whatever its key: it must not be emitted as unmatched either.
                is_late = low_valid & (high < watermark)
                valid &= ~is_late
        elif self._spec.window is not None:
            low = high = np.arange(first_place, first_place + piece.num_rows)
        done = np.zeros(piece.num_rows, np.bool_) if self._spec.preserved[i] else None
        arrivals = np.arange(first_arrival, first_arrival + piece.num_rows)
        tuples = Tuples(rows, tuple(codes), arrivals, low, high, done)
        if valid.all():
            return Arrival(tuples, rows.slice(0, 0), rows.slice(0, 0), piece.num_rows)
        late, nulls = _only(rows, is_late), _only(rows, ~valid & ~is_late)
        return Arrival(tuples.filter(valid), nulls, late, piece.num_rows)

    def _describe(self, k: int) -> str:
        return f"join attribute {self._spec.attributes[k].name!r}"


def _only(rows: pa.RecordBatch, mask: BoolArray) -> pa.RecordBatch:
    return rows.filter(pa.array(mask)) if mask.any() else rows.slice(0, 0)
