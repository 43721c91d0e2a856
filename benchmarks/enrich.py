"""Benchmark of `enrich`: one run measures everybody on the same stream, on this machine.

Axes
----
rows        of R, 120 bytes each: 3.5 M and 20 M (``--rows``)
batch       tuples per micro-batch, 16 bytes each: 100 k and 1 M (``--batch``)
exponent    of Zipf's law: 0, 0.5, 1 (``--exponent``)
budget      1, 5, 10 % of R (``--budget``); only dovetail has one
width       columns of the stream: 2; 25 beside, at one relation and exponent
order       hot keys lie anywhere (shuffled); ranked beside, at one point of the grid
io          pages mapped (map); past the page cache (direct) beside, at one point of the grid

Contenders
----------
dovetail    `dovetail.enrich`
merge       Spark's stream-static join, sort-merge
broadcast   the same, R broadcast; only up to ``--broadcast-rows``
duckdb      DuckDB alone, no Spark, joining the same batch with R's Parquet on two threads
lookup      dovetail's operator alone, no Spark, on one core
ceiling     mapInArrow that only puts out rows of the output's width: what any join of whole rows in Python is below
keys        an Arrow UDF of the key alone that only puts out the relation's columns: what a join by keys is below

Bars
----
speed       at 20 M rows at least 20 times Spark's best at 100 k per batch, at least 10 times at 1 M
duckdb      at 20 M rows and 100 k per batch faster than DuckDB alone, Spark's overhead included; the operator alone at
            least 5 times
ceiling     at 3.5 M rows, exponent 1, 5 %, 1 M per batch at least 70 % of the ceiling
keys        at the same point at least 0.85 of the keys-only ceiling, and 1.1 times the ceiling with 2 columns, 1.7
            times with 25; at 100 k per batch 1.1 and 1.4 times
growth      from 3.5 M to 20 M rows at 100 k per batch the time per batch grows by at most 1.3 times

Seconds per micro-batch are medians of Spark's own triggerExecution after four micro-batches to warm up. ``--data``
keeps the tables for the next run. Always ends with exit code 0; bars that were missed say so.
"""

import argparse
import itertools
import json
import os
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from enrich_bench import contenders, data, report
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from dovetail.testing.sessions import local_session

ROW_BYTES = 120
WIDE = 25


@dataclass(frozen=True)
class Point:
    rows: int
    batch: int
    exponent: float
    order: str = "shuffled"
    width: int = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[3_500_000, 20_000_000])
    parser.add_argument("--batch", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--exponent", type=float, nargs="+", default=[0.0, 0.5, 1.0])
    parser.add_argument("--budget", type=float, nargs="+", default=[1.0, 5.0, 10.0], help="per cent of R")
    parser.add_argument("--batches", type=int, default=12, help="micro-batches to measure")
    parser.add_argument("--most-seconds", type=float, default=90.0, help="for one contender at one point")
    parser.add_argument("--broadcast-rows", type=int, default=3_500_000)
    parser.add_argument("--only", nargs="+", default=None, help="these contenders only")
    parser.add_argument("--no-beside", action="store_true", help="leave out ranked keys and direct reads")
    parser.add_argument("--no-wide", action="store_true", help="leave out the stream of 25 columns")
    parser.add_argument("--quick", action="store_true", help="a small relation, a few micro-batches: does it run?")
    parser.add_argument("--data", default=None, metavar="DIR", help="keep the tables there")
    parser.add_argument("--out", default="artifacts", metavar="DIR", help="where the JSON and the plot go")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.batch, arguments.exponent = [200_000], [20_000], [1.0]
        arguments.budget, arguments.batches = [5.0], 3
    scratch = Path(tempfile.mkdtemp(prefix="dovetail-bench-"))
    directory = scratch if arguments.data is None else Path(arguments.data)
    spark = local_session(scratch, {"spark.driver.memory": "8g"})
    try:
        figures = measure(spark, directory, arguments)
    finally:
        spark.stop()
        shutil.rmtree(scratch, ignore_errors=True)
    out = Path(arguments.out)
    out.mkdir(exist_ok=True)
    bars = report.bars(figures)
    document = {"cpus": os.cpu_count(), "figures": [asdict(figure) for figure in figures], "bars": bars}
    (out / "bench-enrich.json").write_text(json.dumps(document, indent=1))
    report.plot(figures, out / "bench-enrich.png")
    print(report.table(figures))
    for bar in bars:
        print(f"{'met' if bar['met'] else 'MISSED':8} {bar['bar']}: {bar['value']:.2f} (at least {bar['least']:.2f})")
    sys.exit(0)


def measure(spark: SparkSession, directory: Path, arguments: argparse.Namespace) -> list[report.Figure]:
    """Everybody at every point; dovetail at every budget."""
    figures: list[report.Figure] = []
    grid = [Point(*axes) for axes in itertools.product(arguments.rows, arguments.batch, arguments.exponent)]
    for point in grid:
        figures += at_point(spark, directory, point, arguments, arguments.budget, "map")
    for batch in () if arguments.no_wide else arguments.batch:
        wide = Point(min(arguments.rows), batch, max(arguments.exponent), width=WIDE)
        budgets = [5.0] if 5.0 in arguments.budget else arguments.budget[-1:]
        figures += at_point(spark, directory, wide, arguments, budgets, "map", ["ceiling", "keys", "dovetail"])
    if not arguments.no_beside:
        largest = Point(max(arguments.rows), min(arguments.batch), max(arguments.exponent), "ranked")
        figures += at_point(spark, directory, largest, arguments, arguments.budget[-1:], "map", ["dovetail"])
        largest = Point(largest.rows, largest.batch, largest.exponent)
        figures += at_point(spark, directory, largest, arguments, arguments.budget[-1:], "direct", ["dovetail"])
    return figures


def at_point(
    spark: SparkSession,
    directory: Path,
    point: Point,
    arguments: argparse.Namespace,
    budgets: list[float],
    io: str,
    only: list[str] | None = None,
) -> list[report.Figure]:
    parquet = data.make_parquet(directory, point.rows)
    relation = data.make_relation(spark, directory, point.rows)
    axes = (point.rows, point.batch, point.exponent, point.order)
    stream = data.stream_of(spark, *axes, width=point.width)
    table = spark.read.parquet(str(parquet))
    tuples = data.batch_of(spark, *axes)
    if (point.batch, io) == (min(arguments.batch), "map") and point.width == 2:  # once for each distribution of keys
        contenders.check_same_rows(spark, relation, parquet, tuples)
    batches, most = arguments.batches, arguments.most_seconds
    chosen = only or arguments.only
    runs: list[tuple[str, float | None, contenders.Contender]] = [
        ("ceiling", None, lambda: contenders.batch_seconds(contenders.ceiling(stream), batches, most)),
        ("keys", None, lambda: contenders.batch_seconds(contenders.keys_ceiling(stream), batches, most)),
    ]
    for budget in budgets:
        enriched = contenders.enriched(stream, relation, int(point.rows * ROW_BYTES * budget / 100), io)
        runs.append(("dovetail", budget, lambda df=enriched: contenders.batch_seconds(df, batches, most)))  # type: ignore[misc]
    runs += [
        ("lookup", None, lambda: contenders.lookup_seconds(relation, tuples, batches)),
        ("duckdb", None, lambda: contenders.duckdb_seconds(parquet, tuples, 3)),
        ("merge", None, lambda: contenders.batch_seconds(contenders.sort_merge(stream, table), 2, most)),
    ]
    if point.rows <= arguments.broadcast_rows:
        runs.append(("broadcast", None, lambda: contenders.batch_seconds(contenders.broadcast(stream, table), 2, most)))
    figures = []
    for name, percent, run in runs:
        if chosen is not None and name not in chosen:
            continue
        try:
            seconds = run()
        except StreamingQueryException as error:
            if name not in ("merge", "broadcast"):
                raise
            print(f"{name} failed at {point}: {str(error).splitlines()[0][:200]}", flush=True)
            continue
        figure = report.Figure(
            name,
            point.rows,
            point.batch,
            point.exponent,
            point.order,
            io,
            percent,
            contenders.median(seconds),
            seconds,
            point.width,
        )
        print(report.line(figure), flush=True)
        figures.append(figure)
    return figures


if __name__ == "__main__":
    main()
