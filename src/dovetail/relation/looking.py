"""Looking into a relation: a few rows, or those of some keys."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from dovetail.core.errors import SchemaError
from dovetail.relation.keys import compute_codes, keys_equal
from dovetail.relation.relation_reader import RelationReader
from dovetail.relation.shard_reader import ShardReader

__all__ = ["first_rows", "rows_of_keys", "table_of_keys"]


def first_rows(shards: Iterable[ShardReader], rows: int, schema: pa.Schema) -> pa.Table:
    """At most `rows` rows, in the order of the shards; reads no more than that."""
    found: list[pa.RecordBatch] = []
    left = rows
    for shard in shards:
        for block in shard.blocks(max(1, rows)):
            if left <= 0:
                break
            found.append(block.rows.slice(0, left))
            left -= found[-1].num_rows
    return pa.Table.from_batches(found, schema=schema)


def rows_of_keys(reader: RelationReader, schema: pa.Schema, key: Sequence[str], keys: Any) -> pa.Table:
    """All rows of the keys, in their order. A key that is NULL has no rows."""
    asked = table_of_keys(keys, pa.schema([schema.field(name) for name in key]))
    codes = compute_codes(asked, key)
    known = np.flatnonzero(codes.is_valid().to_numpy(zero_copy_only=False))
    queries, positions = reader.lookup(codes.fill_null(0).to_numpy()[known])
    rows = pa.Table.from_batches([reader.gather(positions)], schema=schema)
    wanted = asked.take(pa.array(known[queries]))
    # Two keys may have one code.
    is_same = keys_equal(
        [wanted.column(name).combine_chunks() for name in key], [rows.column(name).combine_chunks() for name in key]
    )
    return rows.filter(pa.array(is_same))


def table_of_keys(keys: Any, schema: pa.Schema) -> pa.Table:
    """The keys as a table of the key's columns."""
    names = ", ".join(schema.names)
    try:
        if isinstance(keys, pa.Table | pa.RecordBatch):
            missing = [name for name in schema.names if name not in keys.schema.names]
            if missing:
                raise SchemaError(f"The keys have no column {missing[0]!r}; the key is ({names}).")
            return pa.table({name: keys.column(name) for name in schema.names}).cast(schema)
        values = [key if isinstance(key, tuple) else (key,) for key in keys]
        for value in values:
            if len(value) != len(schema.names):
                raise SchemaError(f"{value!r} is not a key; the key is ({names}).")
        columns = [[value[place] for value in values] for place in range(len(schema.names))]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
        return pa.Table.from_arrays(arrays, schema=schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        kinds = ", ".join(f"{field.name} {field.type}" for field in schema)
        raise SchemaError(f"The keys are not of the key's type, which is ({kinds}): {error}.") from None
