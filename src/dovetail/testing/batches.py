"""Stream batches from plain rows: with the code column that operators expect, cut at random places.

>>> batches = stream_batches([{"k": 1, "t": "a"}, {"k": None, "t": "b"}], on="k")
>>> batches[0].to_pylist()
[{'__code': 1, 'k': 1, 't': 'a'}, {'__code': None, 'k': None, 't': 'b'}]
"""

import random
import zlib
from collections.abc import Callable, Sequence

import pyarrow as pa

from dovetail.relation.format import CODE_COLUMN
from dovetail.relation.keys import compute_codes
from dovetail.testing.rows import Row, canonical

__all__ = ["CODE_COLUMN", "CodeOf", "colliding_code", "split_at_random", "stream_batches", "with_codes"]

#: Returns the code of a row, or ``None`` if its key has a NULL.
CodeOf = Callable[[Row], int | None]


def stream_batches(
    rows: Sequence[Row],
    on: str | Sequence[str],
    schema: pa.Schema | None = None,
    seed: int | None = None,
    max_batch_rows: int = 8,
    code_of: CodeOf | None = None,
) -> list[pa.RecordBatch]:
    """Convert rows to record batches with codes, in order.

    Without join columns, for a join without equality, there is no code column. The schema is required if it cannot be
    inferred (no rows, or a column with only NULLs). With a seed, the rows are cut at random into batches of 0 to
    ``max_batch_rows`` rows; without one, they are a single batch. ``code_of`` replaces the real code, see
    `colliding_code`.
    """
    whole = _record_batch(rows, schema)
    if on:
        whole = with_codes(whole, on, code_of)
    return [whole] if seed is None else split_at_random(whole, seed, max_batch_rows)


def with_codes(batch: pa.RecordBatch, on: str | Sequence[str], code_of: CodeOf | None = None) -> pa.RecordBatch:
    """Add the codes as the first column, int64."""
    names = [on] if isinstance(on, str) else list(on)
    if code_of is None:
        codes = compute_codes(batch, names)
    else:
        codes = pa.array([code_of(row) for row in batch.to_pylist()], pa.int64())
    return pa.RecordBatch.from_arrays(
        [codes, *batch.columns], schema=batch.schema.insert(0, pa.field(CODE_COLUMN, pa.int64()))
    )


def split_at_random(batch: pa.RecordBatch, seed: int, max_batch_rows: int) -> list[pa.RecordBatch]:
    """Cut the batch into pieces of 0 to ``max_batch_rows`` rows; the same cuts for the same seed."""
    if max_batch_rows < 1:
        raise ValueError(f"max_batch_rows={max_batch_rows}: it must be at least 1.")
    chance, pieces, start = random.Random(seed), [], 0
    while start < batch.num_rows:
        rows = chance.randint(0, max_batch_rows)
        pieces.append(batch.slice(start, rows))
        start += rows
    return pieces or [batch]


def colliding_code(on: str | Sequence[str], distinct_codes: int) -> CodeOf:
    """Codes with only a few distinct values, so that different keys share one.

    Equal keys (by Spark's rules) have equal codes, like real codes. Collisions must be detected by comparing the keys.
    """
    names = [on] if isinstance(on, str) else list(on)

    def code_of(row: Row) -> int | None:
        values = [row[name] for name in names]
        if any(value is None for value in values):
            return None
        # Adding 0.0 turns -0.0 into 0.0: both are the same key.
        same_zero = [value + 0.0 if isinstance(value, float) else value for value in values]
        return zlib.crc32(repr(canonical(same_zero)).encode()) % distinct_codes

    return code_of


def _record_batch(rows: Sequence[Row], schema: pa.Schema | None) -> pa.RecordBatch:
    if not rows and schema is None:
        raise ValueError("The columns cannot be inferred without rows: pass schema=.")
    return pa.RecordBatch.from_pylist([dict(row) for row in rows], schema=schema)
