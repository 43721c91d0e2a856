"""Nexmark: joins of an auction site's events, on Dovetail, on Spark alone and on Flink.

Data
----
Apache Beam's generator (from Maven) writes ``--events`` events once, at 100 a second of event time, as Parquet
files; every engine reads these files. They are kept below ``--data``.

Queries (``--queries``)
-----------------------
q3 (auction and person), q8 (the same within windows of 10 seconds, a result per auction, as in Beam), q13 (bids with a
side input of 10,000 rows), q13-large (the same with ``--large-rows``, not of the suite), q20 (bid with auction),
q4-join (the join below q4 and q6). Only the inputs of a query are read, and only their rows count as its events.

Engines (``--engines``)
-----------------------
dovetail         `multi_join`, written to ``noop``, with defaults; `enrich` for side inputs
spark            Spark's stream-stream join, default state store; a join with the Parquet file for side inputs
spark-rocksdb    the same with RocksDB and its changelog; not for side inputs, which have no state
flink            Flink 2.3 SQL, state on the heap; a join with the version valid at the time for side inputs
flink-multi      the same with MultiJoin; not for side inputs, where it has none
flink-rocksdb    the same with RocksDB; only q13-large, whose state is large

Every engine has two cores, the same heap, checkpoints on (Spark and Dovetail in every micro-batch, Flink every three
seconds), and a sink that discards. Each run is a process of its own: it writes the results over the first sixth of the
slices, which warms it up and is compared row by row with DuckDB's; only then the query over all slices is timed, from
its start to its end. Spark and Dovetail read the same number of files per micro-batch: six micro-batches in all.

Measured
--------
events per second and core; events per second of CPU (of all of an engine's processes), which other load on the
machine disturbs less; bytes of state: the files that Dovetail's last commit names, what Spark's operators report,
Flink's largest checkpoint. Then, for ``--live-query``, at ``--rate`` events per second: p50 and p99 from an event's
arrival to its result, and after a SIGKILL, seconds until the first result and until results are as fast as before.

Bars
----
At least 2.5 times Spark's best and 1.5 times Flink's best on q3, q8, q13-large and q20. Exit status 0 whatever the
outcome. ``--quick`` takes 400,000 events, three queries and no latencies. The table, ``bench-nexmark.json`` and
``bench-nexmark.png`` go to ``--out``.
"""

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nexmark_bench import data, engines, live, report
from nexmark_bench.queries import queries
from rich.console import Console

Keep = Callable[[str, dict[str, Any]], None]
SLICES, FILES_PER_BATCH, PREFIX_SLICES = 24, 4, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=6_000_000)
    parser.add_argument("--queries", nargs="*", choices=list(queries(1)), default=list(queries(1)))
    parser.add_argument("--engines", nargs="+", choices=list(engines.ENGINES), default=list(engines.ENGINES))
    parser.add_argument("--large-rows", type=int, default=20_000_000)
    parser.add_argument("--rate", type=int, default=10_000, help="events per second; 0: no latencies")
    parser.add_argument("--live-query", choices=list(queries(1)), default="q20")
    parser.add_argument("--live-engines", nargs="+", default=["dovetail", "spark-rocksdb", "flink"])
    parser.add_argument("--heap", default="4g", help="of every JVM")
    parser.add_argument("--most-seconds", type=float, default=300.0, help="for one engine on one query")
    parser.add_argument("--flink-python", type=Path, help="an interpreter that has PyFlink")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, default=data.ROOT / "build" / "nexmark", metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path("artifacts"), metavar="DIR")
    options = parser.parse_args()
    if options.quick:
        options.events, options.large_rows, options.rate = 400_000, 200_000, 0
        options.queries, options.engines = ["q3", "q13", "q20"], ["dovetail", "spark", "flink"]
    if options.rate % 20:
        parser.error("--rate must be a multiple of 20, so that files begin at whole milliseconds.")
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console(width=140)
    data.fetch_jars()
    setting = engines.Setting(
        events=data.make_events(options.data, options.events, SLICES, PREFIX_SLICES),
        directory=options.data,
        flink_python=options.flink_python,
        heap=options.heap,
        files_per_batch=FILES_PER_BATCH,
        side_rows={"q13": 10_000, "q13-large": options.large_rows},
        most_seconds=options.most_seconds,
    )
    results: dict[str, Any] = {
        "cpus": os.cpu_count(),
        "commit": commit(),
        "events": options.events,
        "large_rows": options.large_rows,
        "load_before": os.getloadavg(),
        "build_s": build_relations(setting, options),
        "rates": [],
        "live": [],
    }

    def keep(section: str, figure: dict[str, Any]) -> None:
        """What was measured is in the file, should the run be broken off."""
        results[section].append(figure)
        results.update({"bars": report.bars(results["rates"]), "load_after": os.getloadavg()})
        (options.out / "bench-nexmark.json").write_text(json.dumps(results, indent=1))

    measure_rates(console, setting, options, keep)
    if options.rate:
        measure_live(console, setting, options, keep)
    report.plot(results, options.out / "bench-nexmark.png")
    report.show(console, results)


def build_relations(setting: engines.Setting, options: argparse.Namespace) -> dict[str, float]:
    """Dovetail's side inputs as relations, once; how long that took, if they were not there."""
    took = {}
    for name in set(options.queries) & set(setting.side_rows):
        began = time.monotonic()
        data.make_relation(options.data, setting.side_rows[name])
        took[name] = time.monotonic() - began
    return took


def measure_rates(console: Console, setting: engines.Setting, options: argparse.Namespace, keep: Keep) -> None:
    """Every query on every engine that can tell something about it."""
    every = queries(options.large_rows)
    for name in options.queries:
        for engine in options.engines:
            query = every[name]
            if engine == "flink-rocksdb" and name != "q13-large":
                continue
            if engine == "flink-multi" and query.side:
                continue
            if engine == "spark-rocksdb" and query.side:
                continue
            try:
                figure = engines.measure_rate(setting, query, engine)
                told = f"{figure['events_per_s_core']:,.0f} events/s/core, {figure['events_per_cpu_s']:,.0f} per CPU s"
            except engines.FailedRunError as error:
                figure = {"query": name, "engine": engine, "failed": str(error)}
                told = f"failed: {error}"
            keep("rates", figure)
            console.print(f"{name} on {engine}: {told}", markup=False)


def measure_live(console: Console, setting: engines.Setting, options: argparse.Namespace, keep: Keep) -> None:
    """Latencies and recovery, with a data set of half-second slices."""
    plan = live.Plan(rate=options.rate)
    events = int(plan.chunks * live.CHUNK_S * options.rate)
    chunked = data.make_events(options.data, events, plan.chunks, 1)
    query = queries(options.large_rows)[options.live_query]
    for engine in options.live_engines:
        try:
            figure = live.measure_live(engines.replace_events(setting, chunked), query, engine, plan)
        except engines.FailedRunError as error:
            figure = {"query": query.name, "engine": engine, "failed": str(error)}
        console.print(f"live on {engine}: {figure}", markup=False)
        keep("live", figure)


def commit() -> str:
    """The commit that was measured; "+" for changes that are not committed."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=data.ROOT, capture_output=True, text=True, check=True
    )
    return described.stdout.strip()


if __name__ == "__main__":
    main()
