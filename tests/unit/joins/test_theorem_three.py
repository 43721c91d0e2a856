"""SSBJ's Theorem 3: as the rate grows, the join becomes a hash join in memory by itself; uniform stream, 100 k rows.

Compiled kernels make this a matter of seconds. Without them, or with all codes in four hash buckets, R is smaller.
"""

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numba
import numpy as np
import pyarrow as pa
import pytest

from dovetail.joins import BalancedJoin, join_spec
from dovetail.relation import Relation

IS_FULL_SIZE = not numba.config.DISABLE_JIT and "DOVETAIL_FORCE_BUCKETS" not in os.environ
RELATION_ROWS = 100_000 if IS_FULL_SIZE else 400
STEPS_PER_CYCLE = 10
CYCLES = 30 if IS_FULL_SIZE else 15
SCHEMA = pa.schema({"__code": pa.int64(), "k": pa.int64(), "t": pa.int64()})


@pytest.fixture(scope="module")
def relation(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    keys = np.arange(RELATION_ROWS)
    table = pa.table({"k": keys, "a": keys * 2, "b": keys * 3})
    path: Path = tmp_path_factory.mktemp("theorem") / "r"
    return Relation.build(table, path, on="k", shards=1)


def run(relation: Relation, tuples_per_row_and_cycle: float) -> BalancedJoin:
    """Offer so many tuples per relation row and cycle, a step after each tenth of a cycle."""
    budget = 80_000_000 if IS_FULL_SIZE else 400_000
    spec = join_spec(relation, SCHEMA, budget=budget, block_rows=RELATION_ROWS // STEPS_PER_CYCLE)
    operator = BalancedJoin(spec, objective="memory")
    generator = np.random.default_rng(5)
    tuples_per_step = int(tuples_per_row_and_cycle * RELATION_ROWS / STEPS_PER_CYCLE)
    for _ in range(CYCLES * STEPS_PER_CYCLE):
        codes = generator.integers(0, RELATION_ROWS, tuples_per_step)
        batch = pa.record_batch({"__code": codes, "k": codes, "t": codes}, schema=SCHEMA)
        consume(operator.offer(batch))
        consume(operator.step())
    return operator


def consume(batches: Iterator[pa.RecordBatch]) -> None:
    deque(batches, maxlen=0)


def hit_share_of_a_cycle(operator: BalancedJoin) -> float:
    """The share of every key once that the cache answers now."""
    before = operator.metrics.cache_hits
    codes = np.arange(RELATION_ROWS)
    consume(operator.offer(pa.record_batch({"__code": codes, "k": codes, "t": codes}, schema=SCHEMA)))
    share = (operator.metrics.cache_hits - before) / RELATION_ROWS
    consume(operator.drain())
    assert operator.metrics.output_rows == operator.metrics.stream_tuples_in
    return share


def test_balanced_becomes_a_hash_join_in_memory_as_the_rate_grows(relation: Relation) -> None:
    print("seed 5")
    slow, fast = run(relation, 0.1), run(relation, 3.0)
    assert hit_share_of_a_cycle(slow) < (0.05 if IS_FULL_SIZE else 0.5)
    assert fast.pending == 0
    assert len(fast.cache) == RELATION_ROWS
    reads = fast.metrics.relation_rows_read
    assert hit_share_of_a_cycle(fast) == 1.0
    assert (fast.pending, fast.metrics.relation_rows_read) == (0, reads)


def test_share_that_the_cache_answers_grows_with_the_rate(relation: Relation) -> None:
    shares = [hit_share_of_a_cycle(run(relation, rate)) for rate in (0.25, 1.0, 2.0)]
    print("seed 5; hit shares at 0.25, 1 and 2 tuples per row and cycle:", shares)
    assert shares == sorted(shares)
    assert shares[0] < (0.2 if IS_FULL_SIZE else 0.6)
    assert shares[-1] > 0.9
