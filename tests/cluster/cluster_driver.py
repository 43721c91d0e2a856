"""The driver of an application on a cluster: ``cluster_driver.py MASTER ROOT``, told on stdin what to run.

``enrich`` joins the files in ROOT/feed as a batch and as a stream, into ROOT/batch-* and ROOT/stream-*; ``flow`` lets a
flow join them into ROOT/out, and prints a line for every micro-batch; ``unshared`` runs flows whose checkpoint or
target is another directory for each process, and prints a line of JSON for each.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

import dovetail as dt

KEYS, ROWS_PER_FILE = 400, 50
CITY_OF = [{"k": key, "city": f"c{key % 7}"} for key in range(0, KEYS, 2)]
MAYOR_OF = [{"city": f"c{number}", "mayor": f"m{number}"} for number in range(5)]


def orders(number: int) -> pa.Table:
    """The content of a file of the feed."""
    numbers = list(range(number * ROWS_PER_FILE, (number + 1) * ROWS_PER_FILE))
    return pa.table({"n": numbers, "k": pa.array([n * 31 % KEYS if n % 13 else None for n in numbers], pa.int64())})


def build(root: Path) -> None:
    """Build both relations."""
    dt.Relation.build(pa.Table.from_pylist(CITY_OF), root / "cities", on="k", shards=2)
    dt.Relation.build(pa.Table.from_pylist(MAYOR_OF), root / "mayors", on="city", shards=2)


def session(master: str, root: Path) -> SparkSession:
    """One core and one executor on each of two workers."""
    return (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "OFF")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.executor.cores", "1")
        .config("spark.executor.memory", "512m")
        .config("spark.cores.max", "2")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.local.dir", str(root / "local"))
        # A lost executor is noticed in seconds, not minutes.
        .config("spark.network.timeout", "60s")
        .config("spark.executor.heartbeatInterval", "2s")
        .config("spark.shuffle.io.maxRetries", "1")
        .config("spark.shuffle.io.retryWait", "500ms")
        .getOrCreate()
    )


def source(spark: SparkSession, root: Path) -> DataFrame:
    """The feed as a stream."""
    return spark.readStream.schema("n long, k long").option("maxFilesPerTrigger", 1).parquet(str(root / "feed"))


def run_enrich(spark: SparkSession, root: Path) -> None:
    """Join the feed as a batch and as a stream."""
    cities = dt.Relation.open(root / "cities")
    feed = spark.read.schema("n long, k long").parquet(str(root / "feed"))
    for strategy in ("auto", "mesh"):
        joined = dt.enrich(feed, cities, on="k", how="left", budget="2MB", strategy=strategy)
        joined.write.parquet(str(root / f"batch-{strategy}"))
        streamed = dt.enrich(source(spark, root), cities, on="k", how="left", budget="2MB", strategy=strategy)
        writer = streamed.writeStream.option("checkpointLocation", str(root / f"stream-{strategy}.checkpoint"))
        query = writer.trigger(availableNow=True).start(str(root / f"stream-{strategy}"), format="parquet")
        query.awaitTermination()


def run_flow(spark: SparkSession, root: Path) -> None:
    """Let a flow of two joins run until all that is in the feed has come out."""
    options: dict[str, Any] = {"how": "left", "budget": "800kB", "max_delay": "1 second"}
    flow = (
        dt.stream(source(spark, root), "cluster")
        .enrich(dt.Relation.open(root / "cities"), on="k", strategy="mesh", **options)
        .enrich(dt.Relation.open(root / "mayors"), on="city", **options)
    )
    offered = ROWS_PER_FILE * len(list((root / "feed").glob("[0-9]*.parquet")))
    query = flow.write(dt.sinks.parquet(root / "out"), checkpoint=root / "checkpoint")
    told = -1
    while query.isActive:
        progress = query.progress
        if progress is not None and progress.batch > told:
            told = progress.batch
            print(f"batch {told}", flush=True)
            if progress.operators[0].totals.stream_tuples_in == offered and progress.pending == 0:
                query.stop()
                return
        time.sleep(0.02)
    query.awaitTermination()


# A path that every process understands in its own way, as hosts do with a directory that they do not share.
PRIVATE = Path("/proc/self/cwd")


def run_unshared(spark: SparkSession, root: Path) -> None:
    """Run flows whose directories are not shared; nothing of them may count."""
    cities = dt.Relation.open(root / "cities")
    plain = dt.stream(source(spark, root), "unshared")
    in_place = plain.enrich(cities, on="k", how="left")
    with_state = plain.enrich(cities, on="k", how="left", strategy="mesh", budget="800kB", max_delay="1 hour")
    parquet, function = dt.sinks.parquet, dt.sinks.foreach_batch(lambda rows, batch: None)
    cases = [
        ("plain", plain, parquet(PRIVATE / "plain-out"), root / "plain"),
        ("in place", in_place, parquet(PRIVATE / "in-place-out"), root / "in-place"),
        ("with state", with_state, parquet(PRIVATE / "with-state-out"), root / "with-state"),
        ("checkpoint", with_state, parquet(root / "checkpoint-out"), PRIVATE / "unshared-checkpoint"),
        ("foreach_batch", plain, function, PRIVATE / "foreach-batch"),
    ]
    for name, flow, sink, checkpoint in cases:
        error: BaseException | None = None
        try:
            flow.write(sink, checkpoint=checkpoint, trigger="available-now").awaitTermination()
        except Exception as failure:  # noqa: BLE001 -- the test says which it may be
            error = failure
        commits = len(list((checkpoint / "dovetail" / "commits").glob("*.json")))
        kind = "nothing" if error is None else type(error).__name__
        print(json.dumps({"case": name, "error": kind, "text": str(error), "commits": commits}), flush=True)


def main(master: str, root: Path) -> None:
    """Do what stdin says, line by line."""
    os.chdir(root)
    spark = session(master, root)
    print("ready", flush=True)
    for line in sys.stdin:
        {"enrich": run_enrich, "flow": run_flow, "unshared": run_unshared}[line.strip()](spark, root)
        print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
