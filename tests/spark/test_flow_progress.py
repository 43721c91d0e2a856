"""What a flow tells about itself, from two commits in a row."""

import json
from typing import Any

from dovetail.core.metrics import OperatorMetrics
from dovetail.spark.flow.progress import progress_of


def shard(pending: int, oldest_ms: int | None, **counters: int) -> dict[str, Any]:
    return {
        "files": [],
        "report": {
            "pending": pending,
            "oldest_ms": oldest_ms,
            "memory": {"window": 100, "cache": 20},
            "metrics": OperatorMetrics(**counters).as_dict(),
            "version": 3,
        },
    }


def commit(batch: int, time_ms: int, *shards: dict[str, Any]) -> dict[str, Any]:
    return {"batch": batch, "time_ms": time_ms, "operators": {"1-enrich": list(shards)}}


BEFORE = commit(
    6, 10_000, shard(0, None, stream_tuples_in=100, output_rows=90, cache_hits=5), shard(4, 9_000, stream_tuples_in=50)
)
NOW = commit(
    7,
    12_000,
    shard(3, 11_500, stream_tuples_in=400, output_rows=190, cache_hits=155, negative_hits=75),
    shard(2, 9_000, stream_tuples_in=50),
)


def test_rates_and_ratios_are_of_the_last_batch_and_totals_of_all() -> None:
    progress = progress_of(NOW, BEFORE, now_ms=12_700)
    (operator,) = progress.operators
    assert (progress.batch, progress.staleness_ms) == (7, 700)
    assert (operator.tuples_per_second, operator.rows_per_second) == (150.0, 50.0)
    assert (operator.hit_ratio, operator.negative_ratio) == (0.5, 0.25)
    assert (progress.pending, progress.oldest_wait_ms) == (5, 3_000)
    assert operator.memory_bytes == {"window": 200, "cache": 40}
    assert operator.totals.stream_tuples_in == 450
    assert operator.relation_version == 3
    assert json.loads(json.dumps(progress.as_dict()))["operators"][0]["totals"]["cache_hits"] == 155


def test_first_batch_has_totals_but_no_rates() -> None:
    progress = progress_of(BEFORE, None, now_ms=9_000)
    assert progress.operators[0].tuples_per_second == 0.0
    assert progress.operators[0].totals.stream_tuples_in == 150
    assert progress.staleness_ms == 0
    assert progress_of(commit(0, 5, shard(0, None)), None, now_ms=5).oldest_wait_ms is None
