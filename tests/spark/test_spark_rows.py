"""The rows that a running write shows, by Spark's own counts."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession

from dovetail.cli.row_rates import RowsDone
from dovetail.cli.spark_rows import watching_rows
from dovetail.testing.flows import wait_until


def test_rows_that_were_read_are_those_to_be_sorted(spark: SparkSession, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    path = str(gate)

    def held(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        while not Path(path).exists():
            time.sleep(0.02)
        yield from batches

    seen: list[RowsDone] = []
    job = spark.range(1000, numPartitions=3).repartition(2).mapInArrow(held, "id long")
    with watching_rows(spark, seen.append), ThreadPoolExecutor(1) as other:
        collecting = other.submit(job.collect)
        try:
            wait_until(lambda: RowsDone(1000, 0, 1000) in seen, "the rows of the first stage")
        finally:
            gate.touch()
        assert len(collecting.result()) == 1000
    assert all(done.read <= 1000 for done in seen)
