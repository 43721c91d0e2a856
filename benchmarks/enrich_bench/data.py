"""The relation as Parquet and as a relation, and the stream: made once per directory, the same for everybody."""

import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from dovetail import Relation
from dovetail_lab.workloads.tables import relation_batches

SHARDS = 8
_PARQUET_FILES = 8
_FACTOR = 1_190_494_759  # a prime: multiplying by it permutes the keys of any relation that is not a multiple of it


def parquet_path(directory: Path, rows: int) -> Path:
    return directory / f"table-{rows}"


def relation_path(directory: Path, rows: int) -> Path:
    return directory / f"relation-{rows}"


def make_parquet(directory: Path, rows: int) -> Path:
    """R as Parquet: 120 bytes a row, keys 0 to rows - 1 in no order."""
    path = parquet_path(directory, rows)
    if path.exists():
        return path
    draft = path.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    writer: pq.ParquetWriter | None = None
    for number, batch in enumerate(relation_batches(rows)):
        if number % max(1, math.ceil(rows / 65_536 / _PARQUET_FILES)) == 0:
            if writer is not None:
                writer.close()
            writer = pq.ParquetWriter(draft / f"part-{number:05d}.parquet", batch.schema)
        keys = (batch.column("k").to_numpy() - 1) * _FACTOR % rows
        shuffled = batch.set_column(0, "k", pa.array(keys))
        assert writer is not None
        writer.write_batch(shuffled)
    assert writer is not None
    writer.close()
    draft.rename(path)
    return path


def make_relation(spark: SparkSession, directory: Path, rows: int) -> Relation:
    """R as a relation, built by Spark from the Parquet."""
    path = relation_path(directory, rows)
    if path.exists():
        return Relation.open(path)
    draft = path.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)
    Relation.build(spark.read.parquet(str(make_parquet(directory, rows))), draft, on="k", shards=SHARDS)
    draft.rename(path)
    return Relation.open(path)


def key_column(value: Column, rows: int, exponent: float, order: str) -> Column:
    """The key of the tuple with this number: Zipf's law by inversion, hot keys first or anywhere."""
    uniform = (F.abs(F.xxhash64(value)) / F.lit(2.0**63)).cast("double")
    if exponent == 1.0:
        rank = F.pow(F.lit(float(rows)), uniform) - 1.0
    else:
        rank = F.pow(uniform, F.lit(1.0 / (1.0 - exponent))) * F.lit(float(rows))
    number = F.least(F.floor(rank).cast("long"), F.lit(rows - 1))
    return F.pmod(number * F.lit(_FACTOR), F.lit(rows)) if order == "shuffled" else number


def stream_of(spark: SparkSession, rows: int, batch: int, exponent: float, order: str, width: int = 2) -> DataFrame:
    """A stream of 16-byte tuples, so many per micro-batch; with `width` more columns, a fifth of all are texts."""
    numbers = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", batch).load()
    key = key_column(F.col("value"), rows, exponent, order).alias("k")
    value, texts = F.col("value"), width // 5
    longs = [(value + number).alias(f"c{number}") for number in range(width - 2 - texts)]
    words = [F.concat(F.lit("order-"), value.cast("string")).alias(f"s{number}") for number in range(texts)]
    return numbers.select(key, value.alias("v"), *longs, *words)


def batch_of(spark: SparkSession, rows: int, batch: int, exponent: float, order: str) -> pa.Table:
    """One micro-batch of the same stream, for those who join without Spark."""
    numbers = spark.range(batch).select(
        key_column(F.col("id"), rows, exponent, order).alias("k"), F.col("id").alias("v")
    )
    table = numbers.toArrow()
    assert np.unique(table["k"].to_numpy()).size > 1
    return table
