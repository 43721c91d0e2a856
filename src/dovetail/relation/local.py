"""Writing a relation from Arrow data in this process, without Spark.

For tables that fit in memory: tests, experiments, generated lookup tables. Codes and files are the same as Spark's.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.errors import SchemaError
from dovetail.kernels.sorted_codes import group_by_block
from dovetail.kernels.spark_hash import shard_of_codes
from dovetail.relation.format import CODE_COLUMN, Manifest, Operation, Shard
from dovetail.relation.keys import compute_codes
from dovetail.relation.shard_writer import ShardTask, remove_new_files, write_shard
from dovetail.storage.interface import Storage
from dovetail.storage.local import LOCAL

_PIECE_ROWS = 65_536


class ArrowSource:
    """Rows to write, from an Arrow table in memory."""

    spark_schema: dict[str, Any] | None = None

    def __init__(self, table: pa.Table | pa.RecordBatch | pa.RecordBatchReader, storage: Storage = LOCAL) -> None:
        self._storage = storage
        if isinstance(table, pa.RecordBatchReader):
            table = table.read_all()
        elif isinstance(table, pa.RecordBatch):
            table = pa.Table.from_batches([table])
        self.schema = nullable_fields(table.schema)
        self._table = _cast(table, self.schema)

    def write(
        self,
        root: str,
        operation: Operation,
        base: Manifest,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Shard]:
        """Apply ``operation`` with these rows to every shard of ``base``."""
        columns = list(base.key) if operation == "delete" else base.schema.names
        batches = self._table.select(columns).to_batches(max_chunksize=_PIECE_ROWS)
        batches = [_with_codes(batch, base.key) for batch in batches]
        codes = pa.concat_arrays([pa.array([], pa.int64()), *(batch.column(CODE_COLUMN) for batch in batches)])
        numbers = shard_of_codes(codes.fill_null(0).to_numpy(), len(base.shards))
        numbers[codes.is_null().to_numpy(zero_copy_only=False)] = 0
        by_shard = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[by_shard], np.arange(len(base.shards) + 1))
        shards: list[Shard] = []
        try:
            for number in range(len(base.shards)):
                rows = by_shard[bounds[number] : bounds[number + 1]]
                order = pc.array_sort_indices(codes.take(pa.array(rows)), null_placement="at_start")
                pieces = _pieces(batches, rows[order.to_numpy()])
                shards.append(write_shard(ShardTask(root, number, operation, base, self._storage), pieces))
                if progress is not None:
                    progress(number + 1, len(base.shards))
        except BaseException:
            remove_new_files(root, base, dict(enumerate(shards)), self._storage)
            raise
        return shards


def _with_codes(batch: pa.RecordBatch, key: Sequence[str]) -> pa.RecordBatch:
    return batch.add_column(0, CODE_COLUMN, compute_codes(batch, key))


def _pieces(batches: Sequence[pa.RecordBatch], rows: npt.NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
    """Rows of the batches, numbered consecutively, in this order. Never a whole column: it may exceed 2 GiB."""
    starts = np.concatenate([[0], np.cumsum([batch.num_rows for batch in batches])]).astype(np.int64)
    for first in range(0, len(rows), _PIECE_ROWS):
        piece = rows[first : first + _PIECE_ROWS]
        order = np.argsort(piece, kind="stable")
        numbers, offsets = group_by_block(piece[order], starts[:-1])
        parts = [
            batches[number].take(pa.array(piece[order][low:high] - starts[number]))
            for number, low, high in zip(numbers.tolist(), offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        ]
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        yield pa.concat_batches(parts).take(pa.array(back))


def _cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    try:
        return table.cast(schema)
    except pa.ArrowInvalid:
        for column, field in zip(table.columns, schema, strict=True):
            try:
                column.cast(field.type)
            except pa.ArrowInvalid as error:
                raise SchemaError(
                    f"column {field.name!r} of type {column.type} cannot be stored as {field.type}: "
                    f"{error}. Cast it first."
                ) from None
        raise


def nullable_fields(schema: pa.Schema) -> pa.Schema:
    """Return ``schema`` with NULLs allowed everywhere, including nested fields."""
    return pa.schema([_plain_field(field) for field in schema])


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(_plain_type(field.name, field.type)).with_nullable(True)


def _plain_type(name: str, kind: pa.DataType) -> pa.DataType:
    """Return the type of Spark's own Arrow data; refuse types that Spark does not have."""
    t = pa.types
    if t.is_dictionary(kind):
        return _plain_type(name, kind.value_type)
    if t.is_large_string(kind) or t.is_string_view(kind):
        return pa.string()
    if t.is_large_binary(kind) or t.is_binary_view(kind) or t.is_fixed_size_binary(kind):
        return pa.binary()
    if t.is_timestamp(kind):
        return pa.timestamp("us", tz=None if kind.tz is None else "UTC")
    if t.is_duration(kind):
        return pa.duration("us")
    if t.is_date64(kind):
        return pa.date32()
    if t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    if t.is_map(kind):
        return pa.map_(_plain_field(kind.key_field).with_nullable(False), _plain_field(kind.item_field))
    if t.is_struct(kind):
        return pa.struct([_plain_field(kind.field(i)) for i in range(kind.num_fields)])
    if (
        t.is_signed_integer(kind)
        or t.is_float32(kind)
        or t.is_float64(kind)
        or t.is_boolean(kind)
        or t.is_string(kind)
        or t.is_binary(kind)
        or t.is_date32(kind)
        or t.is_decimal128(kind)
        or t.is_null(kind)
        or kind == pa.time64("ns")
    ):
        return kind
    raise SchemaError(f"column {name!r} has type {kind}, for which Spark has no type: cast it first.")
