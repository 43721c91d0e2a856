"""The rows that a running write shows, by Spark's own counts."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

from dovetail.cli.row_rates import RowsDone
from dovetail.cli.spark_rows import watching_rows
from dovetail.testing.flows import wait_until

Batches = Iterator[pa.RecordBatch]


def held_until(gate: Path, partition: int | None = None) -> Callable[[Batches], Batches]:
    """Lets rows pass once there is a file; of one partition, or of all."""
    path = str(gate)

    def held(batches: Batches) -> Batches:
        context = TaskContext.get()
        assert context is not None
        while partition in (None, context.partitionId()) and not Path(path).exists():
            time.sleep(0.02)
        yield from batches

    return held


def test_rows_that_were_read_are_those_to_be_sorted(spark: SparkSession, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    seen: list[RowsDone] = []
    # Whoever watches looks every half a second, so each stage lasts until it was seen.
    read = spark.range(1000, numPartitions=2).mapInArrow(held_until(first, partition=1), "id long")
    job = read.repartition(2).mapInArrow(held_until(second), "id long")
    with watching_rows(spark, seen.append), ThreadPoolExecutor(1) as other:
        collecting = other.submit(job.collect)
        try:
            wait_until(lambda: RowsDone(500) in seen, "the rows of the first task")
            first.touch()
            wait_until(lambda: RowsDone(1000, 0, 1000) in seen, "the rows of the first stage")
        finally:
            first.touch()
            second.touch()
        assert len(collecting.result()) == 1000
    assert all(done.read <= 1000 for done in seen)
