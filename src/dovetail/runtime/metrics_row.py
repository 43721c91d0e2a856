"""What a task did, as one more row of its results.

An additional column is NULL in every real row. In the task's last row it is a struct of counters, and the other columns
are never shown.
"""

import pyarrow as pa

from dovetail.core.metrics import OperatorMetrics

__all__ = ["COUNTERS", "METRICS_COLUMN", "metrics_row", "without_metrics"]

METRICS_COLUMN = "__metrics"
COUNTERS = (
    "stream_tuples_in",
    "null_key_tuples",
    "matched_tuples",
    "unmatched_tuples",
    "output_rows",
    "cache_hits",
    "negative_hits",
    "pairs_rejected",
)
_TYPE = pa.struct([*((name, pa.int64()) for name in COUNTERS), ("relation_version", pa.int64())])


def without_metrics(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Real rows, with a NULL metrics column."""
    return _with(batch, pa.nulls(batch.num_rows, _TYPE))


def metrics_row(row: pa.RecordBatch, metrics: OperatorMetrics, version: int) -> pa.RecordBatch:
    """A row of the results' types, turned into one that reports what a task did."""
    counters = {name: getattr(metrics, name) for name in COUNTERS} | {"relation_version": version}
    return _with(row, pa.array([counters], _TYPE))


def _with(batch: pa.RecordBatch, column: pa.Array) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([*batch.columns, column], names=[*batch.schema.names, METRICS_COLUMN])
