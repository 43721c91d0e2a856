"""Times the operators themselves on a small relation in memory: a step, a tuple, a result, a hit.

The kernels are only part of it: a step is some hundred calls of Python, numpy and Arrow around them, and a result is
copied out of the window and the block, column by column. The models' factors include all of that.
"""

import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dovetail.joins import SemiStreamOperator

__all__ = ["OperatorTimes", "measure_operators"]

_STREAM_SCHEMA = pa.schema({"__code": pa.int64(), "k": pa.int64(), "v": pa.int64(), "q": pa.int32()})
_BUDGET_BYTES = 64_000_000
_STEPS = 128
_SMALL_BLOCK_ROWS = 16
_FEW_TUPLES = 64
_VISITED_ROWS = 256  # rows per index visit


@dataclass(frozen=True)
class OperatorTimes:
    """Seconds of a step with almost no work, and per entering tuple, result, and cache hit."""

    step_s: float
    index_step_s: float  # of a step that finds its block by the index
    append_s: float
    removal_s: float  # the additional cost of leaving from the middle rather than by age
    output_s: float
    hit_s: float
    lookup_call_s: float
    lookup_s: float


def measure_operators(rows: int, repeats: int) -> OperatorTimes:
    """Run MESHJOIN, HYBRIDJOIN and SSBJ on a relation of `rows` rows of 120 bytes, with a window of as many tuples."""
    # Imported here: the operators import the cost models, and only measuring needs the operators.
    from dovetail.joins import BalancedJoin, HybridJoin, LookupJoin, MeshJoin, join_spec
    from dovetail.relation import Relation

    generator = np.random.Generator(np.random.PCG64(11))
    with tempfile.TemporaryDirectory(prefix="dovetail-calibrate-") as scratch:
        keys = np.arange(0, 2 * rows, 2)
        table = pa.table({"k": keys, "sk": keys, "pay": ["x" * 100] * rows})
        relation = Relation.build(table, f"{scratch}/r", on="k", shards=1)
        matched, unmatched = (_batch(generator.permutation(keys) + odd) for odd in (0, 1))

        mesh = MeshJoin(join_spec(relation, _STREAM_SCHEMA, budget=_BUDGET_BYTES))
        hybrid = HybridJoin(join_spec(relation, _STREAM_SCHEMA, budget=_BUDGET_BYTES, block_rows=rows))
        visits = max(2, rows // _VISITED_ROWS)
        visiting = HybridJoin(join_spec(relation, _STREAM_SCHEMA, budget=_BUDGET_BYTES, block_rows=-(-rows // visits)))
        add_s, removal_s, index_step_s, output_s = [], [], [], []
        for _ in range(repeats + 1):
            add_s.append(_seconds(lambda: _consume(mesh.offer(matched))))
            with_output_s = _seconds(lambda: _consume(mesh.drain()))
            _consume(mesh.offer(unmatched))
            output_s.append(max(0.0, with_output_s - _seconds(lambda: _consume(mesh.drain()))))
            _consume(hybrid.offer(matched))
            in_one_step_s = _seconds(lambda: _consume(hybrid.drain()))
            removal_s.append(max(0.0, in_one_step_s - with_output_s))
            _consume(visiting.offer(matched))
            steps_before = visiting.metrics.disk_steps
            in_steps_s = _seconds(lambda: _consume(visiting.drain()))
            steps = visiting.metrics.disk_steps - steps_before
            index_step_s.append(max(0.0, in_steps_s - in_one_step_s) / max(1, steps - 1))

        # The window holds as many tuples as there are rows: per step, as many enter and leave as rows are read.
        few = min(rows, _SMALL_BLOCK_ROWS)
        spec = join_spec(relation, _STREAM_SCHEMA, budget=_BUDGET_BYTES, block_rows=few, chunk_rows=few)
        stepping, steps = MeshJoin(spec), min(rows // few, _STEPS)
        _consume(stepping.offer(matched))
        parts = [matched.slice(start, few * steps) for start in range(0, rows, few * steps)]
        step_s = []
        for part in (parts * (repeats + 1))[: repeats + 1]:
            step_s.append(_seconds(partial(_offer, stepping, part)) * few / part.num_rows)

        # Two batch sizes separate the cost of a batch from that of a tuple.
        looking, few_tuples = (
            LookupJoin(join_spec(relation, _STREAM_SCHEMA, budget=_BUDGET_BYTES)),
            min(rows, _FEW_TUPLES),
        )
        small_s = [
            _seconds(lambda: _consume(looking.offer(matched.slice(0, few_tuples)))) for _ in range(4 * repeats + 1)
        ]
        large_s = [_seconds(lambda: _consume(looking.offer(matched))) for _ in range(repeats + 1)]

        cached = BalancedJoin(join_spec(relation, _STREAM_SCHEMA, budget=_BUDGET_BYTES), switching_factor=1e-3)
        for _ in range(40):
            if len(cached.cache or ()) >= rows:
                break
            _consume(cached.offer(matched))
            _consume(cached.drain())
        hit_s = [_seconds(lambda: _consume(cached.offer(matched))) for _ in range(repeats + 1)]
    # The first round compiles the kernels and touches the memory.
    append_s, per_output_s = statistics.median(add_s[1:]) / rows, statistics.median(output_s[1:]) / rows
    return OperatorTimes(
        step_s=max(0.0, statistics.median(step_s[1:]) - few * (append_s + per_output_s)),
        index_step_s=statistics.median(index_step_s[1:]),
        append_s=append_s,
        removal_s=statistics.median(removal_s[1:]) / rows,
        output_s=per_output_s,
        hit_s=statistics.median(hit_s[1:]) / rows,
        lookup_call_s=statistics.median(small_s[1:]),
        lookup_s=max(0.0, statistics.median(large_s[1:]) - statistics.median(small_s[1:])) / rows,
    )


def _batch(codes: NDArray[np.int64]) -> pa.RecordBatch:
    columns = [pa.array(codes), pa.array(codes), pa.array(codes), pa.array(codes.astype(np.int32))]
    return pa.RecordBatch.from_arrays(columns, schema=_STREAM_SCHEMA)


def _offer(join: "SemiStreamOperator", batch: pa.RecordBatch) -> None:
    _consume(join.offer(batch))


def _consume(batches: Iterator[pa.RecordBatch]) -> None:
    deque(batches, maxlen=0)


def _seconds(action: Callable[[], object]) -> float:
    # CPU time: other load on the machine does not count.
    began = time.process_time()
    action()
    return time.process_time() - began
