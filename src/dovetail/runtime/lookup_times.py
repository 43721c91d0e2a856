"""Measures how long lookups in a relation take.

The cost of a lookup depends on the relation: the width of its rows, how much of it fits the processor's caches, and
whether its pages are in memory. So `explain` looks some rows up instead of using constants.
"""

import statistics
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dovetail.core.arrays import Int64Array
from dovetail.joins import LookupJoin
from dovetail.joins.explaining import BATCH_ROWS
from dovetail.joins.protocol import CODE_COLUMN
from dovetail.runtime.join_recipe import JoinRecipe

__all__ = ["LookupTimes", "measure_lookups"]

_SIZES = (30_000, 1_000)  # the larger one first: it also maps pages, which workers have had mapped for long
_ROUNDS = 5
_SEED = 1


@dataclass(frozen=True)
class LookupTimes:
    """Seconds per batch of lookups and per tuple, and the number of tuples measured."""

    batch_s: float
    tuple_s: float
    tuples: int

    def seconds(self, tuples: float) -> float:
        """The predicted time of one task for this many tuples."""
        return max(1.0, tuples / BATCH_ROWS) * self.batch_s + tuples * self.tuple_s


def measure_lookups(join: LookupJoin, recipe: JoinRecipe) -> LookupTimes:
    """Look up random rows of a relation in batches of two sizes."""
    shard, random = join.spec.shard, np.random.default_rng(_SEED)
    if shard.num_rows == 0:
        return LookupTimes(0.0, 1e-7, 0)
    medians, asked = [], 0
    for size in _SIZES:
        seconds = []
        for _ in range(_ROUNDS):
            batch = _batch(join, recipe, random.integers(0, shard.num_rows, min(size, shard.num_rows)))
            began = time.perf_counter()
            deque(join.offer(batch), maxlen=0)
            seconds.append(time.perf_counter() - began)
            asked += batch.num_rows
        medians.append((batch.num_rows, statistics.median(seconds)))
    (many, many_s), (few, few_s) = medians
    if many <= few:
        return LookupTimes(0.0, few_s / max(1, few), asked)
    tuple_s = max(1e-9, (many_s - few_s) / (many - few))
    return LookupTimes(max(0.0, few_s - few * tuple_s), tuple_s, asked)


def _batch(join: LookupJoin, recipe: JoinRecipe, positions: Int64Array) -> pa.RecordBatch:
    """Stream tuples that ask for the rows at these positions; irrelevant columns are NULL."""
    shard, schema = join.spec.shard, join.spec.stream_schema
    rows = shard.gather(positions)
    known = {CODE_COLUMN: pa.array(shard.codes_at(positions))}
    known |= {ours: rows.column(theirs) for ours, theirs in recipe.on if theirs in rows.schema.names}
    columns = [
        known[field.name].cast(field.type) if field.name in known else _filler(field.type, positions.size)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _filler(kind: pa.DataType, count: int) -> pa.Array:
    """Values of a column that is only carried along: numbers if possible, else NULL."""
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return pa.array(np.zeros(count), pa.float64()).cast(kind)
    return pa.nulls(count, kind)
