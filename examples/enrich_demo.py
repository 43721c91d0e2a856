"""Join a stream of orders with a large table of customers: with Spark's own join, then with Dovetail's.

Run it with ``make demo``; ``make demo ARGS="--customers 3500000"`` shows how the gap grows with the table. It needs no
service, and removes what it wrote.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table

import dovetail as dt
from dovetail.core.memory import format_bytes
from dovetail.testing.flows import Feed
from dovetail.testing.sessions import local_session
from dovetail_lab.workloads import Zipf

LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
SPARK_SETTINGS = {
    "spark.driver.memory": "4g",
    "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={LOG_SETTINGS.as_uri()}",
}
SEED = 7
console = Console(highlight=False)


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Say what is being done, and then how long it took."""
    started = time.perf_counter()
    with console.status(what):
        yield
    console.print(f"[green]✓[/] {what} [dim]({time.perf_counter() - started:.1f} s)[/]")


def customers(spark: SparkSession, count: int) -> DataFrame:
    """Make the table: about 120 bytes a row."""
    number = F.col("id")
    return spark.range(1, count + 1).select(
        number.alias("customer_id"),
        F.sha2(number.cast("string"), 256).alias("name"),
        F.concat(F.lit("segment-"), F.pmod(number, F.lit(9))).alias("segment"),
        (F.pmod(F.xxhash64(number), F.lit(1_000_000)) / 100).cast("decimal(10,2)").alias("balance"),
    )


def feed_orders(directory: Path, files: int, per_file: int, count: int) -> None:
    """Write the stream: one file per micro-batch, keys by Zipf's law, some of customers that do not exist."""
    feed, keys = Feed(directory), Zipf(count + count // 50, exponent=1.0, order="shuffled", seed=SEED)
    for number in range(files):
        first = number * per_file
        ids = pa.array(range(first, first + per_file), pa.int64())
        feed.add(pa.table({"order_id": ids, "customer_id": keys.sample(per_file)}))


def run_stream(joined: DataFrame, checkpoint: Path) -> tuple[list[int], dict[str, Any]]:
    """Run a streaming query over all files; gives the milliseconds of each micro-batch and a summary of all rows."""
    summary: dict[str, Any] = {"rows": 0, "matched": 0, "digest": 0}

    def add(rows: DataFrame, _: int) -> None:
        whole = F.coalesce(F.sum(F.xxhash64(*rows.columns).cast("decimal(38,0)")), F.lit(0)).alias("digest")
        found = rows.agg(F.count(F.lit(1)).alias("rows"), F.count("segment").alias("matched"), whole).first()
        for name in summary:
            summary[name] += int(found[name])

    query = (
        joined.writeStream.foreachBatch(add)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return [int(p["durationMs"]["triggerExecution"]) for p in query.recentProgress if p["numInputRows"]], summary


def run(root: Path, count: int, files: int, per_file: int) -> None:
    """Join one stream twice."""
    console.rule(f"{files * per_file:,} orders, {per_file:,} at a time, joined with {count:,} customers")
    with timed("Start Spark"):
        spark = local_session(settings=SPARK_SETTINGS)
        spark.range(1).count()
    with timed(f"Write {count:,} customers as Parquet, for Spark's own join"):
        customers(spark, count).write.parquet(str(root / "customers.parquet"))
    table = spark.read.parquet(str(root / "customers.parquet"))
    with timed("Build a relation of the same rows, for Dovetail"):
        relation = dt.Relation.build(table, root / "customers", on="customer_id", shards=2)
    console.print(
        f"  {format_bytes(relation.stats.bytes)} on disk, {format_bytes(relation.index_bytes)} of index in memory"
    )
    feed_orders(root / "orders", files, per_file, count)
    orders = (
        spark.readStream.schema("order_id long, customer_id long")
        .option("maxFilesPerTrigger", 1)
        .parquet(str(root / "orders"))
    )

    spark.conf.set("spark.sql.autoBroadcastJoinThreshold", "-1")
    with timed('Spark:    orders.join(customers, on="customer_id", how="left")'):
        theirs, expected = run_stream(orders.join(table, on="customer_id", how="left"), root / "spark")
    ours_df = dt.enrich(orders, relation, on="customer_id", how="left", budget="64MB")
    with timed('Dovetail: dt.enrich(orders, customers, on="customer_id", how="left")'):
        ours, found = run_stream(ours_df, root / "dovetail")

    report = Table(title="Milliseconds per micro-batch", title_justify="left")
    for heading in ("", "first", "median of the others", "orders/s"):
        report.add_column(heading, justify="right" if heading else "left")
    for name, times in (("Spark's join", theirs), ("Dovetail", ours)):
        median = statistics.median(times[1:])
        report.add_row(name, f"{times[0]:,}", f"{median:,.0f}", f"{per_file / median * 1000:,.0f}")
    console.print(report)
    same = "the same rows, by count and by digest" if found == expected else "[red]DIFFERENT ROWS[/]"
    faster = statistics.median(theirs[1:]) / statistics.median(ours[1:])
    console.print(f"Both gave {found['rows']:,} rows, {found['matched']:,} of them matched: {same}.")
    console.print(f"[bold]Dovetail was {faster:.1f} times as fast.[/] Spark reads all customers for every micro-batch.")
    spark.stop()
    if found != expected:
        raise SystemExit(1)


def main() -> None:
    """Read the options, and run in a directory that goes afterwards."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--customers", type=int, default=1_000_000, help="rows of the table (default: 1000000)")
    parser.add_argument("--batches", type=int, default=6, help="micro-batches (default: 6)")
    parser.add_argument("--orders", type=int, default=50_000, help="orders per micro-batch (default: 50000)")
    options = parser.parse_args()
    if min(options.customers, options.orders) < 10 or options.batches < 2:
        parser.error("at least 10 customers, 10 orders and 2 micro-batches are needed to show anything")
    with tempfile.TemporaryDirectory(prefix="dovetail-demo-") as scratch:
        run(Path(scratch), options.customers, options.batches, options.orders)


if __name__ == "__main__":
    main()
