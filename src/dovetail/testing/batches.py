"""Stream batches from plain rows: with the code column that operators expect, cut at random places.

Examples
--------
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

#: Gives a row's code, or ``None`` where its key has a NULL.
CodeOf = Callable[[Row], int | None]


def stream_batches(
    rows: Sequence[Row],
    on: str | Sequence[str],
    schema: pa.Schema | None = None,
    seed: int | None = None,
    max_batch_rows: int = 8,
    code_of: CodeOf | None = None,
) -> list[pa.RecordBatch]:
    """Record batches of the rows in their order, each with its codes.

    Parameters
    ----------
    rows
        The stream, oldest first.
    on
        The join columns on the stream's side. Empty for a join without equality: there is no code column then.
    schema
        Types of the columns; needed where the rows do not tell (no row, or a column of NULLs only).
    seed
        Cut into batches of 0 to ``max_batch_rows`` rows at random, an empty batch now and then; ``None``
        gives one batch.
    max_batch_rows
        Most rows of a batch that was cut.
    code_of
        The code of a row instead of the real one, such as `colliding_code`.

    Examples
    --------
    >>> rows = [{"k": k} for k in range(10)]
    >>> [batch.num_rows for batch in stream_batches(rows, on="k", seed=1, max_batch_rows=4)]
    [1, 4, 0, 2, 0, 3]
    """
    whole = _record_batch(rows, schema)
    if on:
        whole = with_codes(whole, on, code_of)
    return [whole] if seed is None else split_at_random(whole, seed, max_batch_rows)


def with_codes(batch: pa.RecordBatch, on: str | Sequence[str], code_of: CodeOf | None = None) -> pa.RecordBatch:
    """The batch with its codes as an int64 column in front.

    Examples
    --------
    >>> with_codes(pa.record_batch({"k": [5]}), on="k").column("__code").to_pylist()
    [5]
    """
    names = [on] if isinstance(on, str) else list(on)
    if code_of is None:
        codes = compute_codes(batch, names)
    else:
        codes = pa.array([code_of(row) for row in batch.to_pylist()], pa.int64())
    return pa.RecordBatch.from_arrays(
        [codes, *batch.columns], schema=batch.schema.insert(0, pa.field(CODE_COLUMN, pa.int64()))
    )


def split_at_random(batch: pa.RecordBatch, seed: int, max_batch_rows: int) -> list[pa.RecordBatch]:
    """The batch cut into pieces of 0 to ``max_batch_rows`` rows; the same cuts for the same seed.

    Examples
    --------
    >>> pieces = split_at_random(pa.record_batch({"k": list(range(5))}), seed=3, max_batch_rows=2)
    >>> [piece.column("k").to_pylist() for piece in pieces]
    [[], [0, 1], [2, 3], [], [4]]
    """
    if max_batch_rows < 1:
        raise ValueError(f"max_batch_rows={max_batch_rows}: a batch has room for at least one row.")
    chance, pieces, start = random.Random(seed), [], 0
    while start < batch.num_rows:
        rows = chance.randint(0, max_batch_rows)
        pieces.append(batch.slice(start, rows))
        start += rows
    return pieces or [batch]


def colliding_code(on: str | Sequence[str], distinct_codes: int) -> CodeOf:
    """Codes of which there are only a few, so that different keys share one.

    Equal keys (by Spark's rules) have equal codes, as with real ones; matches must then be told from
    collisions by the keys themselves.

    Examples
    --------
    >>> code_of = colliding_code("k", distinct_codes=2)
    >>> sorted({code_of({"k": k}) for k in "abcdefgh"}), code_of({"k": None})
    ([0, 1], None)
    """
    names = [on] if isinstance(on, str) else list(on)

    def code_of(row: Row) -> int | None:
        values = [row[name] for name in names]
        if any(value is None for value in values):
            return None
        # Adding 0.0 turns -0.0 into 0.0, which are one key.
        same_zero = [value + 0.0 if isinstance(value, float) else value for value in values]
        return zlib.crc32(repr(canonical(same_zero)).encode()) % distinct_codes

    return code_of


def _record_batch(rows: Sequence[Row], schema: pa.Schema | None) -> pa.RecordBatch:
    if not rows and schema is None:
        raise ValueError("Without rows there is nothing to tell the columns by: pass schema=.")
    return pa.RecordBatch.from_pylist([dict(row) for row in rows], schema=schema)
