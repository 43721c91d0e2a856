"""The bursty stream as a streaming source: the rows of the generator, once each, through restarts and by the clock."""

import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from dovetail.pipeline.checks import check_pipeline
from dovetail.pipeline.loading import parse_pipeline
from dovetail.pipeline.problems import PipelineError
from dovetail.pipeline.runner import plan_pipeline
from dovetail.spark.sources.bursty import register_bursty
from dovetail.testing.flows import published_rows
from dovetail_lab.workloads import BurstyStream

OPTIONS = {"keys": "500", "tuplesPerStep": "3.5", "seed": "7", "objects": "6"}


def expected(steps: int) -> list[tuple[int, int]]:
    stream = BurstyStream(500, tuples_per_step=3.5, objects=6, seed=7)
    batch, _ = stream.batch(stream.arrivals.start(), steps)
    return list(zip(batch["v"].to_pylist(), batch["k"].to_pylist(), strict=True))


def reading(spark: SparkSession, **more: Any) -> Any:
    register_bursty(spark)
    return spark.readStream.format("dovetail.bursty").options(**OPTIONS, **more).load()


def written(spark: SparkSession, path: Path) -> list[tuple[int, int]]:
    return sorted((row.v, row.k) for row in spark.read.parquet(str(path)).collect())


def run_to_end(stream: Any, tmp_path: Path) -> Any:
    query = (
        stream.writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "out"))
    )
    query.awaitTermination()
    return query


def test_restart_goes_on_at_its_offset_with_the_same_stream(spark: SparkSession, tmp_path: Path) -> None:
    run_to_end(reading(spark, steps=900, stepsPerBatch=500), tmp_path)
    assert written(spark, tmp_path / "out") == expected(900)
    second = run_to_end(reading(spark, steps=1500, stepsPerBatch=500), tmp_path)
    assert written(spark, tmp_path / "out") == expected(1500)
    assert '"step": 1500' in second.recentProgress[-1]["sources"][0]["endOffset"].replace('":', '": ').replace(
        "  ", " "
    )


def test_steps_pass_with_the_clock(spark: SparkSession, tmp_path: Path) -> None:
    query = (
        reading(spark, stepMillis=2)
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start(str(tmp_path / "out"))
    )
    deadline = time.monotonic() + 60
    while query.lastProgress is None or query.lastProgress["batchId"] < 1:
        assert time.monotonic() < deadline, "no second micro-batch within a minute"
        assert query.exception() is None
        time.sleep(0.05)
    query.stop()
    rows = written(spark, tmp_path / "out")
    assert rows
    assert rows == expected(100_000)[: len(rows)]


def test_endless_stream_has_no_available_now(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(StreamingQueryException, match="endless stream"):
        run_to_end(reading(spark), tmp_path)


def test_pipeline_reads_it_to_its_end(spark: SparkSession, tmp_path: Path) -> None:
    text = """\
name: bursts
checkpoint: checkpoint
trigger: available-now
sources:
  b: {format: bursty, keys: 500, tuples_per_step: 3.5, seed: 7, step_millis: 0, steps: 900, steps_per_batch: 400}
steps:
  - where: k IS NOT NULL
sink: {format: parquet, path: out}
"""
    (tmp_path / "p.yaml").write_text(text)
    query = plan_pipeline(spark, check_pipeline(*parse_pipeline(tmp_path / "p.yaml"))).start()
    query.awaitTermination()
    stream = BurstyStream(500, tuples_per_step=3.5, seed=7)
    batch, _ = stream.batch(stream.arrivals.start(), 900)
    rows = sorted((row["v"], row["k"]) for row in published_rows(tmp_path / "out"))
    assert rows == list(zip(batch["v"].to_pylist(), batch["k"].to_pylist(), strict=True))
    (tmp_path / "p.yaml").write_text(text.replace(", steps_per_batch: 400", ""))
    with pytest.raises(PipelineError, match=r"p\.yaml:5: .*step_millis: 0 requires steps_per_batch"):
        parse_pipeline(tmp_path / "p.yaml")
