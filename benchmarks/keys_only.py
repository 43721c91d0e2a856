"""What it costs to take rows, or only keys, to Python and back; nothing is looked up.

Ways
----
nothing     no Python
rows        whole rows by mapInArrow
struct      the key by an Arrow UDF; a struct comes back, rows without a mark in it are filtered out
list        the key by an Arrow UDF; a list of structs comes back and is inlined: what `enrich` does

The stream has 2 columns, and ``--longs`` and ``--texts`` more; 108 bytes are added to a row. Processor milliseconds of
the JVM and its workers together, so that a busy machine can measure too; medians, the ways in turns.
"""

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.functions import arrow_udf

from dovetail.testing.sessions import local_session

WARM_UP = 2
MOST_ROWS = 65_536
TICK_MS = 1_000 // os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure, and print a line per way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--longs", type=int, nargs="+", default=[0, 18])
    parser.add_argument("--texts", type=int, nargs="+", default=[0, 5])
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="dovetail-keys-only-"))
    spark = local_session(scratch, {"spark.driver.memory": "2g"})
    try:
        for longs, texts in zip(given.longs, given.texts, strict=True):
            measure(spark, given.rows, longs, texts, given.rounds)
    finally:
        spark.stop()
        shutil.rmtree(scratch, ignore_errors=True)


def measure(spark: SparkSession, rows: int, longs: int, texts: int, rounds: int) -> None:
    """All ways with one stream."""
    ways = ways_of(stream_of(spark, rows, longs, texts))
    taken: dict[str, list[int]] = {name: [] for name in ways}
    for _ in range(WARM_UP + rounds):
        for name, df in ways.items():
            before = processor_ms()
            df.write.format("noop").mode("overwrite").save()
            taken[name].append(processor_ms() - before)
    for name, all_ms in taken.items():
        median = statistics.median(all_ms[WARM_UP:])
        print(f"{rows:,} rows of {2 + longs + texts:>2} columns  {name:<8} {median:>7,.0f} ms of processor", flush=True)


def stream_of(spark: SparkSession, rows: int, longs: int, texts: int) -> DataFrame:
    """A key without order, a number, and more columns."""
    number = F.col("id")
    return spark.range(rows, numPartitions=2).select(
        F.pmod(F.xxhash64(number), F.lit(3_500_000)).alias("k"),
        number.alias("v"),
        *((number + place).alias(f"c{place}") for place in range(longs)),
        *(F.concat(F.lit("order-"), number.cast("string")).alias(f"s{place}") for place in range(texts)),
    )


def ways_of(stream: DataFrame) -> dict[str, DataFrame]:
    """The same rows by every way; the functions are inside, because workers cannot import this file."""
    most = MOST_ROWS

    def rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        pay = pa.array(["x" * 100] * most)
        for batch in batches:
            columns = [*batch.columns, batch.column(0), pay.slice(0, batch.num_rows)]
            yield pa.RecordBatch.from_arrays(columns, names=[*batch.schema.names, "sk", "pay"])

    def struct(keys: Iterator[pa.Array]) -> Iterator[pa.Array]:
        pay, mark = pa.array(["x" * 100] * most), pa.array([True] * most)
        for column in keys:
            columns = [column, pay.slice(0, len(column)), mark.slice(0, len(column))]
            yield pa.StructArray.from_arrays(columns, names=["sk", "pay", "mark"])

    def lists(keys: Iterator[pa.Array]) -> Iterator[pa.Array]:
        pay, offsets = pa.array(["x" * 100] * most), pa.array(np.arange(most + 1), pa.int32())
        for column in keys:
            element = pa.StructArray.from_arrays([column, pay.slice(0, len(column))], names=["sk", "pay"])
            yield pa.ListArray.from_arrays(offsets.slice(0, len(column) + 1), element)

    added = [T.StructField("sk", T.LongType()), T.StructField("pay", T.StringType())]
    marked = arrow_udf(struct, "struct<sk:bigint,pay:string,mark:boolean>")
    listed = arrow_udf(lists, "array<struct<sk:bigint,pay:string>>")
    return {
        "nothing": stream,
        "rows": stream.mapInArrow(rows, T.StructType([*stream.schema, *added])),
        "struct": stream.select("*", marked("k").alias("r")).where("r.mark").select(*stream.columns, "r.sk", "r.pay"),
        "list": stream.select("*", F.inline(listed("k"))),
    }


def processor_ms() -> int:
    """What this process's descendants have taken so far, those that ended included."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        pid = int(path.parent.name)
        children.setdefault(int(fields[1]), []).append(pid)
        ticks[pid] = sum(map(int, fields[11:15]))
    total, waiting = 0, list(children.get(os.getpid(), []))
    while waiting:
        pid = waiting.pop()
        total += ticks[pid]
        waiting += children.get(pid, [])
    return total * TICK_MS


if __name__ == "__main__":
    main()
