"""A relation that a pipeline builds from a small file equals the one that a Spark job writes."""

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import dovetail as dt
from dovetail.pipeline.small_tables import read_if_small

SCHEMA = "id bigint, name string, at timestamp, price decimal(12,3), day date, tags array<string>, `a.b` int"
ROWS = 500


@pytest.mark.parametrize("key", ["id", "name", "at", "price", "day"])
def test_relation_is_that_of_a_spark_job(spark: SparkSession, tmp_path: Path, key: str) -> None:
    rows = spark.range(ROWS).selectExpr(
        "id",
        "if(id % 7 = 0, NULL, concat('n', id)) name",
        "timestamp_seconds(id * 100000) at",
        "cast(id / 7 as decimal(12,3)) price",
        "date_add(date'2020-01-01', cast(id as int)) day",
        "array('x', cast(id as string)) tags",
        "cast(id as int) `a.b`",
    )
    rows.write.parquet(str(tmp_path / "rows"))
    read = spark.read.schema(SCHEMA).parquet(str(tmp_path / "rows"))
    small = read_if_small(read)
    assert isinstance(small, pa.Table)
    assert read_if_small(read, most_bytes=100) is read
    here = dt.Relation.build(small, tmp_path / "here", on=key, shards=3)
    there = dt.Relation.build(read, tmp_path / "there", on=key, shards=3)
    assert here.to_df(spark).dtypes == there.to_df(spark).dtypes
    assert [s.as_dict() for s in here.stats.shards] == [s.as_dict() for s in there.stats.shards]
    order = ["id", "a.b"]
    assert sorted(map(str, here.to_df(spark).collect())) == sorted(map(str, there.to_df(spark).collect())), order
