"""Arriving batches: checked, cut to size, and taken apart into codes, event times and rows."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dovetail.errors import BudgetError, SchemaError
from dovetail.kernels.bucket_index import bucket_count_of
from dovetail.operators.mjoin.chunk import BoolArray, Int64Array, Tuples
from dovetail.operators.mjoin.spec import MJoinSpec, TimeWindow

__all__ = ["Arrival", "ArrivalReader"]


class Arrival(NamedTuple):
    """A slice of a batch: tuples that can match, and those that cannot."""

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
        """The batch with its codes in front and its own columns in the declared order; refused if any is missing."""
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
                    f"Column {field.name!r} of input {name!r} is {column_type}, declared is {field.type}."
                )
            columns.append(batch.column(field.name))
            fields.append(field)
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))

    def slices(self, i: int, batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Pieces of the batch whose chunks stay within bounds, each with the bytes that its chunk takes at most."""
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
        """The most bytes that a chunk of so many rows takes."""
        attributes = len(self._spec.input_attributes[i])
        buckets = bucket_count_of(rows, self._spec.partitions) + 1
        # Splitting what goes to disk from what stays makes two indexes of it.
        index_bytes = attributes * (4 * 2 * buckets + 64)
        # A buffer is rounded up, and has room for one more offset than there are values.
        rounding_bytes = 16 * len(self._spec.schemas[self._spec.names[i]])
        return row_bytes + rows * (8 + 16 + 1 + 12 * (attributes - 1)) + index_bytes + rounding_bytes

    def read(
        self, i: int, piece: pa.RecordBatch, first_arrival: int, first_place: int, watermark: int | None
    ) -> Arrival:
        """Take a slice apart; its rows get consecutive stamps."""
        attributes = len(self._spec.input_attributes[i])
        rows = piece.select(range(attributes, piece.num_columns))
        codes, valid = [], np.ones(piece.num_rows, np.bool_)
        for k in range(attributes):
            values, is_valid = _integers(piece.column(k))
            codes.append(values)
            valid &= is_valid
        low = high = None
        is_late = np.zeros(piece.num_rows, np.bool_)
        if self._times[i]:
            low, low_valid = _integers(rows.column(self._times[i][0]))
            high = low
            if self._times[i][1] != self._times[i][0]:
                high, _ = _integers(rows.column(self._times[i][1]))
            valid &= low_valid
            if watermark is not None:
                # What is late is so whatever its key: it must not come out as unmatched either.
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


def _integers(column: pa.Array) -> tuple[Int64Array, BoolArray]:
    """The integers behind a column, zero where NULL, and which are not NULL."""
    width = column.type.bit_width
    storage = {8: pa.int8(), 16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[width]
    valid: npt.NDArray[np.bool_] = np.ones(len(column), np.bool_)
    if column.null_count:
        valid = column.is_valid().to_numpy(zero_copy_only=False)
    numbers = column.view(storage).fill_null(0).to_numpy(zero_copy_only=False)
    return numbers.astype(np.int64, copy=False), valid
