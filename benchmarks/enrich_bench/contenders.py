"""Who joins the stream: dovetail, Spark's two joins, DuckDB per batch, and the ceiling of what Python can put out."""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.functions import arrow_udf

import dovetail as dt
from dovetail.relation import Relation

_PAYLOAD_BYTES = 100
_WARM_BATCHES = 4


def batch_seconds(df: DataFrame, batches: int, most_seconds: float) -> list[float]:
    """Run a streaming query into nothing and give the seconds of its micro-batches, those that warm it up left out.

    A slow query is stopped when its time is up; then at least its first micro-batch counts.
    """
    with tempfile.TemporaryDirectory() as checkpoint:
        writer = df.writeStream.format("noop").option("checkpointLocation", checkpoint)
        query = writer.trigger(processingTime="0 seconds").start()
        began = time.monotonic()
        done = -1
        while done < _WARM_BATCHES + batches and (done < 0 or time.monotonic() - began < most_seconds):
            time.sleep(0.05)
            if (failure := query.exception()) is not None:
                raise failure
            progress = query.lastProgress
            done = -1 if progress is None else progress["batchId"]
        seconds = {
            progress["batchId"]: progress["durationMs"]["triggerExecution"] / 1e3
            for progress in query.recentProgress
            if progress["numInputRows"]
        }
        query.stop()
    warm = [taken for batch, taken in seconds.items() if batch >= _WARM_BATCHES]
    return warm or [taken for batch, taken in seconds.items() if batch] or list(seconds.values())


def enriched(stream: DataFrame, relation: Relation, budget_bytes: int, io: str) -> DataFrame:
    return dt.enrich(stream, relation, on="k", budget=budget_bytes, io=io)  # type: ignore[arg-type]


def sort_merge(stream: DataFrame, table: DataFrame) -> DataFrame:
    return stream.join(table.hint("merge"), "k")


def broadcast(stream: DataFrame, table: DataFrame) -> DataFrame:
    return stream.join(F.broadcast(table), "k")


def ceiling(stream: DataFrame) -> DataFrame:
    """Whole rows through Python, and columns of the relation's width made of nothing."""
    payload_bytes = _PAYLOAD_BYTES

    def put_out_only(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Rows of the output's width, made of nothing."""
        payload: Any = None
        for batch in batches:
            if payload is None or len(payload) < batch.num_rows:
                payload = pa.array(["x" * payload_bytes] * batch.num_rows)
            columns = [*batch.columns, batch.column(0), payload.slice(0, batch.num_rows)]
            yield pa.RecordBatch.from_arrays(columns, names=[*batch.schema.names, "sk", "pay"])

    # Inside, so that it travels to the workers as it is: they cannot import the benchmark.
    output = [*stream.schema, T.StructField("sk", T.LongType()), T.StructField("pay", T.StringType())]
    return stream.mapInArrow(put_out_only, T.StructType(output))


def keys_ceiling(stream: DataFrame) -> DataFrame:
    """The key through Python; columns of the relation's width, made of nothing, come back as `enrich` returns them."""
    payload_bytes = _PAYLOAD_BYTES

    def put_out_only(keys: Iterator[pa.Array]) -> Iterator[pa.Array]:
        """Lists of one row each, made of nothing."""
        payload: Any = None
        for column in keys:
            if payload is None or len(payload) < len(column):
                payload = pa.array(["x" * payload_bytes] * len(column))
                offsets = pa.array(range(len(column) + 1), pa.int32())
            rows = pa.StructArray.from_arrays([column, payload.slice(0, len(column))], names=["sk", "pay"])
            yield pa.ListArray.from_arrays(offsets.slice(0, len(column) + 1), rows)

    returned = "array<struct<sk:bigint,pay:string>>"
    return stream.select("*", F.inline(arrow_udf(put_out_only, returned)("k")))


def duckdb_seconds(parquet: Path, tuples: pa.Table, repetitions: int) -> list[float]:
    """Seconds of DuckDB for a join of one batch with all of R's Parquet, by itself, on two threads."""
    import duckdb

    connection = duckdb.connect()
    connection.execute("set threads = 2")
    connection.execute("set preserve_insertion_order = false")
    connection.register("stream", tuples)
    query = f"select s.k, s.v, r.sk, r.pay from stream s join read_parquet('{parquet}/*.parquet') r on s.k = r.k"
    taken = []
    for _ in range(repetitions + 1):
        began = time.monotonic()
        joined = connection.sql(query).to_arrow_table()
        taken.append(time.monotonic() - began)
        assert joined.num_rows == tuples.num_rows
    return taken[1:]


def lookup_seconds(relation: Relation, tuples: pa.Table, repetitions: int) -> list[float]:
    """Seconds of the operator by itself, on one core, for the same batch."""

    from dovetail.joins import LookupJoin
    from dovetail.joins.memory_plan import MAX_BATCH_ROWS
    from dovetail.joins.spec import JoinSpec
    from dovetail.runtime.merged_batches import merged_batches

    reader = relation.reader(["sk", "pay"])
    stream = pa.RecordBatchReader.from_batches(tuples.schema, tuples.to_batches())
    batches = [
        batch.add_column(0, "__code", batch.column("k"))
        for batch in merged_batches(iter(stream), MAX_BATCH_ROWS, 1 << 30)
    ]
    spec = JoinSpec(reader, batches[0].schema, (("k", "k"),))
    join = LookupJoin(spec)
    taken = []
    for _ in range(repetitions + 1):
        began = time.monotonic()
        rows = sum(result.num_rows for batch in batches for result in join.offer(batch))
        taken.append(time.monotonic() - began)
        assert rows == tuples.num_rows
    return taken[1:]


def check_same_rows(spark: SparkSession, relation: Relation, parquet: Path, tuples: pa.Table) -> None:
    """Before anything is timed: the join is Spark's join."""
    stream = spark.createDataFrame(tuples.slice(0, 20_000))
    ours, theirs = dt.enrich(stream, relation, on="k"), stream.join(spark.read.parquet(str(parquet)), "k")
    prints = [
        df.select(F.xxhash64("k", "v", "sk", "pay").alias("h")).agg(F.count("*"), F.bit_xor("h")).collect()[0]
        for df in (ours, theirs)
    ]
    assert tuple(prints[0]) == tuple(prints[1]), "enrich and Spark's join differ"


def median(seconds: list[float]) -> float:
    return statistics.median(seconds)


Contender = Callable[[], list[float]]
