"""Build a relation with Spark, change it, and look rows up in it without Spark.

Run it with ``make demo``; ``make demo ARGS="--rows 2000000"`` builds a larger one. It needs no service, and
removes what it wrote unless ``--path`` says where to keep it.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console
from rich.table import Table

import dovetail as dt
from dovetail.kernels.spark_hash import shard_of_codes
from dovetail.memory import format_bytes
from dovetail.relation.format import RelationStats, ShardStats
from dovetail.relation.keys import compute_codes

LOG_SETTINGS = Path(__file__).with_name("log4j2.properties")
console = Console(highlight=False)


def start_spark() -> SparkSession:
    """Start Spark in this process: two cores, loopback only, no pages and no chatter."""
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    session: SparkSession = (
        SparkSession.builder.master("local[2]")
        .appName("dovetail-demo")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={LOG_SETTINGS.as_uri()}")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    return session


def customers(spark: SparkSession, first: int, count: int, segment: str) -> DataFrame:
    """Make `count` customers, numbered from `first`, all of one segment."""
    number = F.col("id")
    return spark.range(first, first + count).select(
        number.alias("customer_id"),
        F.concat(F.lit("Customer "), number).alias("name"),
        F.lit(segment).alias("segment"),
        (F.pmod(F.xxhash64(number), F.lit(1_000_000)) / 100).cast("decimal(10,2)").alias("balance"),
        F.date_add(F.lit("2015-01-01"), F.pmod(number, F.lit(3650)).cast("int")).alias("since"),
        F.array(F.lit("newsletter"), F.concat(F.lit("region-"), F.pmod(number, F.lit(7)))).alias("tags"),
    )


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Say what is being done, and then how long it took."""
    started = time.perf_counter()
    with console.status(what):
        yield
    console.print(f"[green]✓[/] {what} [dim]({time.perf_counter() - started:.2f} s)[/]")


def look_up(relation: dt.Relation, keys: npt.NDArray[np.int64], columns: list[str]) -> pa.Table:
    """Fetch the rows of these keys through the index: each shard is asked for its own keys, all at once."""
    codes = compute_codes(pa.table({relation.key[0]: keys}), relation.key).to_numpy()
    shard_of_key = shard_of_codes(codes, relation.num_shards)
    batches = []
    for shard_number in np.unique(shard_of_key):
        shard = relation.shard(int(shard_number), columns=columns)
        _, positions = shard.lookup(codes[shard_of_key == shard_number])
        batches.append(shard.gather(positions))
    return pa.Table.from_batches(batches)


def show_shards(relation: dt.Relation) -> None:
    table = Table(title="The relation", title_justify="left")
    for heading in ("shard", "rows", "bytes", "distinct codes", "most rows of a code"):
        table.add_column(heading, justify="right")
    lines: list[tuple[str, ShardStats | RelationStats]] = [("all", relation.stats)]
    lines[:0] = [(str(number), stats) for number, stats in enumerate(relation.stats.shards)]
    for name, stats in lines:
        table.add_row(
            name,
            f"{stats.rows:,}",
            format_bytes(stats.bytes),
            f"{stats.distinct_codes:,}",
            str(stats.max_multiplicity),
            style="bold" if name == "all" else "",
        )
    console.print(table)


def show_versions(relation: dt.Relation) -> None:
    table = Table(title="Its versions: old ones stay readable until they are vacuumed", title_justify="left")
    for heading in ("version", "made by", "at", "rows", "bytes"):
        table.add_column(heading, justify="left" if heading in ("made by", "at") else "right")
    for info in relation.versions():
        table.add_row(str(info.version), info.operation, info.created_at, f"{info.rows:,}", format_bytes(info.bytes))
    console.print(table)


def show_rows(title: str, rows: pa.Table) -> None:
    table = Table(*rows.column_names, title=title, title_justify="left")
    for row in rows.sort_by(rows.column_names[0]).to_pylist():
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)


def run(path: Path, rows: int) -> None:
    """Walk through the life of one relation."""
    console.rule(f"A relation of {rows:,} customers")
    with timed("Start Spark"):
        spark = start_spark()
        spark.range(1).count()

    with timed(f"Build: route {rows:,} rows to 4 shards, sort, write rows and index"):
        first = dt.Relation.build(customers(spark, 0, rows, "basic"), path, on=["customer_id"], shards=4)
    show_shards(first)
    console.print(
        f"Held in memory to find any row: {format_bytes(first.index_bytes)} of index, "
        f"{first.index_bytes / first.stats.bytes:.2%} of the relation's bytes"
    )

    changed = max(1, rows // 100)
    with timed(f"Upsert {changed:,} customers who became premium"):
        second = first.upsert(customers(spark, 0, changed, "premium"))
    with timed("Delete the last customer"):
        keys = customers(spark, rows - 1, 1, "basic").select("customer_id")
        third = second.delete(keys)
    spark.stop()

    console.rule("From here on without Spark")
    relation = dt.Relation.open(path)
    show_versions(relation)
    columns = ["customer_id", "name", "segment", "balance", "since"]
    asked = np.array([0, changed - 1, changed, rows - 1], dtype=np.int64)
    show_rows(f"Customers {asked.tolist()} now", look_up(third, asked, columns))
    then = dt.Relation.open(path, version=first.version)
    show_rows("The same at the first version", look_up(then, asked, columns))

    wanted = np.random.default_rng(seed=1).integers(0, rows - 1, size=100_000)
    look_up(relation, wanted[:10], columns)  # maps the files, so that the next line measures lookups alone
    started = time.perf_counter()
    found = look_up(relation, wanted, columns)
    seconds = time.perf_counter() - started
    console.print(
        f"Looked up {len(wanted):,} random customers: {found.num_rows:,} rows in {seconds:.2f} s, "
        f"[bold]{found.num_rows / seconds:,.0f} rows/s[/]"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200_000, help="customers to build (default: 200000)")
    parser.add_argument("--path", type=Path, help="where to keep the relation (default: a temporary directory)")
    arguments = parser.parse_args()
    if arguments.rows < 10:
        parser.error("--rows: at least 10 are needed to show anything")
    if arguments.path is not None:
        run(arguments.path, arguments.rows)
        return
    with tempfile.TemporaryDirectory(prefix="dovetail-demo-") as scratch:
        run(Path(scratch) / "customers", arguments.rows)


if __name__ == "__main__":
    main()
