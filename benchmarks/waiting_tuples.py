"""Few waiting tuples through `auto`: what an offer and a drain take against a bare lookup, and a full window's rate.

Axes: tuples that wait together (100, 1,000, 10,000, 100,000), one relation of mapped rows of 120 bytes, one budget.
Prints one table per run; ratios count, times do not: the machine is shared.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

import dovetail as dt
from dovetail.joins import AutoJoin, LookupJoin, MeshJoin, SemiStreamOperator, join_spec

_SCHEMA = pa.schema({"__code": pa.int64(), "k": pa.int64(), "v": pa.int64()})
_SEED = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--budget", default="32MB")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    random = np.random.default_rng(_SEED)
    print(f"seed {_SEED}, {options.rows:,} rows, budget {options.budget}")
    with tempfile.TemporaryDirectory() as scratch:
        keys = np.arange(options.rows)
        table = pa.table({"k": keys, "sk": keys, "pay": pa.array(np.char.zfill(keys.astype("U100"), 100))})
        relation = dt.Relation.build(table, f"{scratch}/r", on="k", shards=1)
        figures = []
        for tuples in (100, 1_000, 10_000, 100_000):
            batches = [_batch(random.integers(0, options.rows, tuples)) for _ in range(options.rounds)]
            lookup_ms = _median_ms(lambda: LookupJoin(join_spec(relation, _SCHEMA, budget=options.budget)), batches)
            auto_ms = _median_ms(lambda: AutoJoin(join_spec(relation, _SCHEMA, budget=options.budget)), batches)
            figures.append({"tuples": tuples, "lookup_ms": lookup_ms, "auto_ms": auto_ms, "ratio": auto_ms / lookup_ms})
            print(f"{tuples:>8,} tuples: lookup {lookup_ms:8.2f} ms, auto {auto_ms:8.2f} ms, {auto_ms / lookup_ms:.2f}")
        rates = {}
        for name, kind in {"mesh": MeshJoin, "auto": AutoJoin}.items():
            rates[name] = _full_window_rate(kind(join_spec(relation, _SCHEMA, budget=options.budget)), random)
            print(f"full window, {name}: {rates[name]:,.0f} tuples/s")
    if options.json is not None:
        options.json.write_text(json.dumps({"waiting": figures, "full_window": rates}, indent=1))
    sys.exit(0)


def _batch(codes: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> pa.RecordBatch:
    return pa.record_batch({"__code": codes, "k": codes, "v": codes}, schema=_SCHEMA)


def _median_ms(make: Callable[[], SemiStreamOperator], batches: list[pa.RecordBatch]) -> float:
    """Median of an offer and a drain; the operator is warm, as that of a running stream."""
    join = make()
    taken = []
    for batch in batches:
        began = time.perf_counter()
        deque(join.offer(batch), maxlen=0)
        deque(join.drain(), maxlen=0)
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken[2:])


def _full_window_rate(join: SemiStreamOperator, random: np.random.Generator) -> float:
    """Tuples per second while the window is full, over three cycles after the first."""
    rows = join.spec.shard.num_rows
    served, began = 0, 0.0
    while join.metrics.relation_rows_read < 4 * rows:
        if not began and join.metrics.relation_rows_read >= rows:
            began, served = time.perf_counter(), join.metrics.tuples_left
        deque(join.offer(_batch(random.integers(0, rows, 65_536))), maxlen=0)
        if join.metrics.stream_tuples_in > 60 * rows:
            break
    return (join.metrics.tuples_left - served) / (time.perf_counter() - began) if began else float("nan")


if __name__ == "__main__":
    main()
