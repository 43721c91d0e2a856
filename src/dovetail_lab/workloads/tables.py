"""A relation and stream batches in the shape of the papers' synthetic data sets.

Relation rows are 120 bytes (MESHJOIN table 2, HYBRIDJOIN table 2), stream tuples 20 bytes. These are the bytes of the
columns in Arrow, including a string's offset.
"""

# mypy: allow-untyped-decorators

from collections.abc import Iterator

import numba
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

import dovetail.kernels  # noqa: F401 -- chooses where compiled code is kept; must come first
from dovetail.core.errors import PlanError
from dovetail.runtime.generator.mixing import GOLDEN, splitmix
from dovetail.runtime.generator.zipf import Zipf

__all__ = ["make_relation_table", "make_stream_batch", "relation_batches"]

RELATION_SCHEMA = pa.schema([pa.field("k", pa.int64()), pa.field("sk", pa.int64()), pa.field("pay", pa.string())])
STREAM_SCHEMA = pa.schema([pa.field("k", pa.int64()), pa.field("v", pa.int64()), pa.field("q", pa.int32())])

# Key and surrogate key take 8 bytes each, the payload's offset 4.
_BYTES_BESIDE_PAYLOAD = 20
_ROWS_PER_BATCH = 1 << 16


def make_relation_table(
    rows: int, row_bytes: int = 120, seed: int = 0, *, rows_per_key: int = 1, keys: Zipf | None = None
) -> pa.Table:
    """Generate the relation R: keys 1, 2, ... in order, or skewed, each with a surrogate key and a payload.

    Parameters
    ----------
    rows
        Number of rows.
    row_bytes
        Arrow bytes per row: 16 for the two keys, 4 for the payload's offset, the rest is payload.
    seed
        The seed of surrogate keys and payloads. They depend only on row number and seed, so two relations with the
        same seed agree on their common rows.
    rows_per_key
        Rows that share a key.
    keys
        A distribution to draw each row's key from, with repetition: the papers' relations with skew z_R. Some keys
        have many rows, and some none.

    Returns
    -------
    pyarrow.Table
        Columns ``k`` (int64), ``sk`` (int64), ``pay`` (string of fixed length), in record batches of 65536
        rows.

    Examples
    --------
    >>> table = make_relation_table(1000, row_bytes=120, seed=1)
    >>> table.schema.names, table.num_rows, len(table["pay"][0].as_py())
    (['k', 'sk', 'pay'], 1000, 100)
    >>> make_relation_table(4, rows_per_key=2)["k"].to_pylist()
    [1, 1, 2, 2]
    >>> skewed = make_relation_table(1000, keys=Zipf(1000, exponent=1.0, seed=3))["k"].to_pylist()
    >>> skewed.count(1) > 50 and len(set(skewed)) < 1000
    True
    """
    batches = relation_batches(rows, row_bytes, seed, rows_per_key=rows_per_key, keys=keys)
    return pa.Table.from_batches(list(batches), schema=RELATION_SCHEMA)


def relation_batches(
    rows: int, row_bytes: int = 120, seed: int = 0, *, rows_per_key: int = 1, keys: Zipf | None = None
) -> Iterator[pa.RecordBatch]:
    """Generate the rows of `make_relation_table` one record batch at a time, for relations larger than memory.

    Examples
    --------
    >>> [batch.num_rows for batch in relation_batches(100_000)]
    [65536, 34464]
    """
    if rows < 0:
        raise PlanError(f"rows={rows}: the number of rows cannot be negative.")
    if row_bytes < _BYTES_BESIDE_PAYLOAD:
        raise PlanError(f"row_bytes={row_bytes}: keys and offset alone take {_BYTES_BESIDE_PAYLOAD} bytes.")
    if rows_per_key < 1:
        raise PlanError(f"rows_per_key={rows_per_key}: a key has at least one row.")
    if keys is not None and rows_per_key != 1:
        raise PlanError("With drawn keys the rows per key cannot be set.", hint="Leave rows_per_key out.")
    return _generate_batches(rows, row_bytes - _BYTES_BESIDE_PAYLOAD, seed, rows_per_key, keys)


def _generate_batches(
    rows: int, payload_bytes: int, seed: int, rows_per_key: int, keys: Zipf | None
) -> Iterator[pa.RecordBatch]:
    for start in range(0, rows, _ROWS_PER_BATCH):
        count = min(_ROWS_PER_BATCH, rows - start)
        row_numbers = np.arange(start, start + count, dtype=np.int64)
        # The mixing relies on overflow; numpy warns about it if the functions are not compiled.
        with np.errstate(over="ignore"):
            surrogates, letters = _mix_rows(row_numbers, payload_bytes, seed)
        offsets = np.arange(count + 1, dtype=np.int32) * np.int32(payload_bytes)
        payload = pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(letters))
        codes = row_numbers // rows_per_key + 1 if keys is None else keys.sample(count)
        columns = [pa.array(codes), pa.array(surrogates), payload]
        yield pa.record_batch(columns, schema=RELATION_SCHEMA)


def make_stream_batch(
    keys: Zipf | NDArray[np.int64],
    rows: int | None = None,
    *,
    first_sequence: int = 0,
    unmatched_share: float = 0.0,
    seed: int = 0,
) -> pa.RecordBatch:
    """Generate a batch of 20-byte stream tuples.

    Parameters
    ----------
    keys
        A distribution to draw `rows` keys from (it advances, so the next batch continues the stream), or the keys.
    rows
        Tuples in the batch; required with a distribution, otherwise the number of keys.
    first_sequence
        ``v`` of the first tuple; it counts up, so that every tuple of a stream is distinct.
    unmatched_share
        Fraction of the tuples, chosen at random, whose key is negated, so that it is in no relation.
    seed
        The seed of ``q`` and the choice of unmatched tuples, together with `first_sequence`.

    Returns
    -------
    pyarrow.RecordBatch
        Columns ``k`` (int64, the key), ``v`` (int64, a sequence number), ``q`` (int32, a quantity 1..100).

    Examples
    --------
    >>> batch = make_stream_batch(Zipf(1000, exponent=1.0, seed=2), 4, first_sequence=10)
    >>> batch.schema.names, batch["v"].to_pylist()
    (['k', 'v', 'q'], [10, 11, 12, 13])
    >>> make_stream_batch(np.array([5, 6]), unmatched_share=1.0)["k"].to_pylist()
    [-5, -6]
    """
    if not 0.0 <= unmatched_share <= 1.0:
        raise PlanError(f"unmatched_share={unmatched_share}: it must be between 0 and 1.")
    if isinstance(keys, Zipf):
        if rows is None:
            raise PlanError("A batch drawn from a distribution needs its number of rows.", hint="Pass rows=...")
        codes = keys.sample(rows)
    else:
        codes = np.asarray(keys, dtype=np.int64)
        if rows is not None and rows != codes.size:
            raise PlanError(f"rows={rows}, but {codes.size} keys were given.", hint="Leave rows out.")
    generator = np.random.Generator(np.random.PCG64([seed, first_sequence]))
    if unmatched_share > 0.0:
        codes = np.where(generator.random(codes.size) < unmatched_share, -codes, codes)
    sequence = np.arange(first_sequence, first_sequence + codes.size, dtype=np.int64)
    quantity = generator.integers(1, 101, codes.size, dtype=np.int32)
    return pa.record_batch([pa.array(codes), pa.array(sequence), pa.array(quantity)], schema=STREAM_SCHEMA)


@numba.njit(cache=True)
def _mix_rows(
    row_numbers: NDArray[np.int64], payload_bytes: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Surrogate key and payload letters (a to p) of each row, from its number and the seed."""
    surrogates = np.empty(row_numbers.size, dtype=np.int64)
    letters = np.empty(row_numbers.size * payload_bytes, dtype=np.uint8)
    written = 0
    for i in range(row_numbers.size):
        state = splitmix(np.uint64(row_numbers[i]) + splitmix(np.uint64(seed) + GOLDEN))
        surrogates[i] = np.int64(state >> np.uint64(2))
        for j in range(payload_bytes):
            if j % 16 == 0:
                state = splitmix(state + GOLDEN)
            letters[written] = np.uint8(97 + ((state >> np.uint64(4 * (j % 16))) & np.uint64(15)))
            written += 1
    return surrogates, letters
