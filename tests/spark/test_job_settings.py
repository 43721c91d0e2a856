"""Settings for the time of one job: only where they change nothing but its speed, and put back whatever happens."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import types as T

import dovetail as dt
from dovetail.spark.flow.job_settings import job_settings, set_for_a_while, stream_settings
from dovetail.testing.flows import published_rows

ADAPTIVE = "spark.sql.adaptive.enabled"
ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
NARROW = T.StructType().add("k", "long").add("at", "timestamp")
WITH_TEXT = T.StructType().add("k", "long").add("name", "string")
IN_ARRAY = T.StructType().add("all", T.ArrayType(T.LongType()))


@pytest.mark.parametrize(
    ("schemas", "conf", "is_lifted"),
    [
        ([NARROW], {}, True),
        ([], {}, True),
        ([NARROW, WITH_TEXT], {}, False),
        ([IN_ARRAY], {}, False),
        ([NARROW], {ROWS: "0"}, False),  # as many rows as there are
        ([NARROW], {ROWS: "10000", BYTES: "190001b"}, True),
        ([NARROW], {ROWS: "10000", BYTES: "190000"}, False),
        ([NARROW], {BYTES: "1g"}, False),  # not read: it stays
    ],
)
def test_limit_of_bytes_is_lifted_only_where_rows_cannot_reach_it(
    spark: SparkSession, schemas: list[T.StructType], conf: dict[str, str], is_lifted: bool
) -> None:
    with set_for_a_while(spark, conf):
        settings = job_settings(spark, schemas, stages_in_jvm=True)
        assert BYTES not in job_settings(spark, schemas, stages_in_jvm=False)
    assert settings.pop(ADAPTIVE) == "false"
    assert settings == ({BYTES: str(2**31 - 1)} if is_lifted else {})


def test_settings_are_put_back_after_a_failure(spark: SparkSession) -> None:
    before = spark.conf.get(BYTES)

    def fail() -> None:
        with set_for_a_while(spark, {BYTES: "5m"}):
            raise ValueError(spark.conf.get(BYTES))

    with pytest.raises(ValueError, match=r"^5m$"):
        fail()
    assert spark.conf.get(BYTES) == before


def test_flow_without_any_step_copies_its_input(spark: SparkSession, tmp_path: Path) -> None:
    spark.range(5).write.parquet(str(tmp_path / "feed"))
    source = spark.readStream.schema("id long").parquet(str(tmp_path / "feed"))
    query = dt.stream(source, "copy").write(
        dt.sinks.parquet(tmp_path / "out"), checkpoint=tmp_path / "checkpoint", trigger="available-now"
    )
    query.awaitTermination()
    assert query.exception() is None
    assert sorted(row["id"] for row in published_rows(tmp_path / "out")) == list(range(5))


def test_branches_without_rows_are_pruned_only_where_the_input_has_no_state(spark: SparkSession) -> None:
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    plain = rows.withWatermark("timestamp", "1 second").where("value > 3").selectExpr("value AS k", "timestamp")
    assert list(stream_settings(plain).values()) == ["true"]
    assert list(stream_settings(plain.union(plain)).values()) == ["true"]
    for stateful in (plain.dropDuplicates(["k"]), plain.groupBy("k").count(), plain.join(plain.select("k"), "k")):
        assert stream_settings(stateful) == {}
    (name,) = stream_settings(plain)
    before = spark.conf.get(name)
    with set_for_a_while(spark, stream_settings(plain)):
        assert spark.conf.get(name) == "true"
    assert spark.conf.get(name) == before
