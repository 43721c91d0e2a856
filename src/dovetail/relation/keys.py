"""Keys: supported types, equality, and their 64-bit codes.

The code of a row is a 64-bit integer computed from its key. A single integral, date or timestamp key is its own code
(``value``); any other key is hashed with Spark's ``xxhash64``. Equal keys have equal codes. With hashed codes the
reverse does not hold, so code that matches by code compares the actual keys with :func:`keys_equal` before joining.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.errors import PlanError, SchemaError
from dovetail.kernels import spark_hash
from dovetail.relation.format import RESERVED_COLUMNS, CodeKind

BoolArray = npt.NDArray[np.bool_]


def normalize_key(on: str | Sequence[str]) -> tuple[str, ...]:
    """Return the key as a tuple of names; refuse an empty key and repeated names."""
    names = (on,) if isinstance(on, str) else tuple(on) if isinstance(on, Iterable) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise PlanError(f"on={on!r} names no key column: pass one column name or a list of names.")
    if len(set(names)) != len(names):
        raise PlanError(f"on={list(names)!r} names a column twice: name each key column once.")
    return names


def check_names(names: Sequence[str]) -> None:
    """Refuse duplicate column names."""
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise SchemaError(f"column {repeated[0]!r} appears more than once: rename or drop the others.")


def check_schema(schema: pa.Schema, key: Sequence[str]) -> None:
    """Refuse a schema that cannot be a relation with this key, naming the offending column."""
    names = schema.names
    check_names(names)
    # Spark's column names are case-insensitive, so a reserved name in capitals would conflict too.
    taken = sorted(name for name in names if name.casefold() in RESERVED_COLUMNS)
    if taken:
        raise SchemaError(f"column {taken[0]!r} has a name reserved by dovetail: rename it.")
    missing = [name for name in key if name not in names]
    if missing:
        raise PlanError(f"key column {missing[0]!r} is not in the data: its columns are {', '.join(names)}.")
    for name in key:
        _check_key_type(name, schema.field(name).type)


def code_kind(schema: pa.Schema, key: Sequence[str]) -> CodeKind:
    """Return how keys of this schema become codes."""
    if len(key) == 1 and _is_own_code(schema.field(key[0]).type):
        return "value"
    return "xxhash64"


def compute_codes(rows: pa.RecordBatch | pa.Table, key: Sequence[str]) -> pa.Int64Array:
    """Return the code of every row, NULL if any key column is NULL. Bit-identical to the codes of the Spark plan.

    Examples
    --------
    >>> import pyarrow as pa
    >>> compute_codes(pa.table({"k": [3, None, -1]}), ["k"]).to_pylist()
    [3, None, -1]
    >>> compute_codes(pa.table({"k": ["a", None]}), ["k"]).to_pylist()
    [-8582455328737087284, None]
    """
    columns = [_flat(rows.column(rows.schema.get_field_index(name))) for name in key]
    for name, column in zip(key, columns, strict=True):
        _check_key_type(name, column.type)
    if rows.num_rows == 0:
        return pa.array([], pa.int64())
    valid = np.ones(rows.num_rows, np.bool_)
    for column in columns:
        valid &= _valid_mask(column)
    if len(key) == 1 and _is_own_code(columns[0].type):
        codes = _integers(columns[0]).astype(np.int64)
    else:
        hashes = spark_hash.new_seeds(rows.num_rows)
        for column in columns:
            _fold_column(column, hashes)
        codes = hashes.view(np.int64)
    return pa.array(codes, pa.int64(), mask=~valid)


def keys_equal(left: Sequence[pa.Array], right: Sequence[pa.Array]) -> BoolArray:
    """Return row by row whether two keys are equal by Spark's rules: NaN = NaN, -0.0 = 0.0, NULL equals nothing.

    Examples
    --------
    >>> nan = float("nan")
    >>> keys_equal([pa.array([nan, -0.0, None])], [pa.array([nan, 0.0, None])]).tolist()
    [True, True, False]
    """
    equal = np.ones(len(left[0]), np.bool_)
    for a, b in zip(left, right, strict=True):
        same = pc.equal(a, b)
        if pa.types.is_floating(a.type) and pa.types.is_floating(b.type):
            same = pc.or_(same, pc.and_(pc.is_nan(a), pc.is_nan(b)))
        equal &= same.fill_null(False).to_numpy(zero_copy_only=False)
    return equal


def _is_own_code(kind: pa.DataType) -> bool:
    is_moment = pa.types.is_timestamp(kind) and kind.unit == "us"
    return bool(pa.types.is_signed_integer(kind) or pa.types.is_date32(kind) or is_moment)


def _check_key_type(name: str, kind: pa.DataType) -> None:
    t = pa.types
    supported = (
        _is_own_code(kind)
        or t.is_string(kind)
        or t.is_binary(kind)
        or t.is_boolean(kind)
        or t.is_float32(kind)
        or t.is_float64(kind)
        or t.is_decimal128(kind)
    )
    if not supported:
        raise SchemaError(
            f"column {name!r} of type {kind} cannot be a key: use an integral, string, binary, boolean, float, double, "
            "decimal, date or timestamp (in microseconds) column."
        )


def _flat(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _valid_mask(column: pa.Array) -> BoolArray:
    if column.null_count == 0:
        return np.ones(len(column), np.bool_)
    return column.is_valid().to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _integers(column: pa.Array) -> npt.NDArray[np.int64]:
    """The integers behind a fixed-width integral, date or timestamp column, NULLs as zero."""
    width = column.type.bit_width // 8
    storage = {1: pa.int8(), 2: pa.int16(), 4: pa.int32(), 8: pa.int64()}[width]
    return column.view(storage).fill_null(0).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _fold_column(column: pa.Array, seeds: spark_hash.Seeds) -> None:
    kind, valid, t = column.type, _valid_mask(column), pa.types
    if t.is_boolean(kind):
        spark_hash.fold_int32(column.fill_null(False).cast(pa.int8()).to_numpy().astype(np.int32), valid, seeds)
    elif t.is_float32(kind):
        spark_hash.fold_int32(_float_bits(column, np.float32).view(np.int32), valid, seeds)
    elif t.is_float64(kind):
        spark_hash.fold_int64(_float_bits(column, np.float64).view(np.int64), valid, seeds)
    elif t.is_decimal128(kind):
        _fold_decimals(column, valid, seeds)
    elif t.is_string(kind) or t.is_binary(kind):
        data, offsets = _bytes_of(column)
        spark_hash.fold_bytes(data, offsets, valid, seeds)
    elif kind.bit_width <= 32:
        spark_hash.fold_int32(_integers(column).astype(np.int32), valid, seeds)
    else:
        spark_hash.fold_int64(_integers(column), valid, seeds)


def _float_bits(column: pa.Array, dtype: type[np.floating]) -> npt.NDArray[np.floating]:
    values: npt.NDArray[np.floating] = column.fill_null(0.0).to_numpy(zero_copy_only=False).astype(dtype)
    values[values == 0] = 0.0  # one zero
    values[np.isnan(values)] = np.nan  # one NaN, the one Java's floatToIntBits gives
    return values


def _bytes_of(column: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    _, offsets, data = column.buffers()
    first, rows = column.offset, len(column)
    starts = np.frombuffer(offsets, np.int32, rows + 1, first * 4) if offsets else np.zeros(1, np.int32)
    return (np.frombuffer(data, np.uint8) if data and data.size else np.zeros(1, np.uint8)), starts


def _fold_decimals(column: pa.Array, valid: BoolArray, seeds: spark_hash.Seeds) -> None:
    buffer = column.buffers()[1]
    raw = np.frombuffer(buffer, np.uint8, len(column) * 16, column.offset * 16).reshape(-1, 16)
    if column.type.precision <= 18:
        spark_hash.fold_int64(raw[:, :8].copy().view(np.int64)[:, 0], valid, seeds)
    else:
        spark_hash.fold_wide_decimals(raw, valid, seeds)
