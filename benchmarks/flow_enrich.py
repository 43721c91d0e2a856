"""`flow.enrich` that lets nothing wait, against `dt.enrich`: both into Parquet, in one run, in turns.

Axes
----
batch       tuples per micro-batch, 16 bytes each: 10 and 100,000 (``--batch``)
rows        of the relation, 120 bytes each (``--rows``)

Contenders
----------
enrich      `dovetail.enrich` into Spark's own Parquet sink
flow        `flow.enrich` without ``max_delay`` into `dt.sinks.parquet`, committed and published exactly once
sharded     the same with ``strategy="balanced"``: rows are shuffled to shards that have state (``--beside``)
keyed       `flow.surrogate_key` over the same tuples (``--beside``)

Bars
----
flow at most 1.4 times enrich at 10 tuples per micro-batch, and 1.25 times at 100,000.

A turn is one query of ``--warm-up`` micro-batches that do not count and ``--batches`` that do; the contenders take
turns, ``--turns`` times. The figure is the median of Spark's own triggerExecution over all turns. ``--parts`` says
which of Spark's phases it goes to. Always ends with exit code 0; a bar that was missed says so.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from enrich_bench import data
from pyspark.sql import DataFrame, SparkSession

import dovetail as dt
from dovetail.testing.sessions import local_session

BARS = {10: 1.4, 100_000: 1.25}
Start = Callable[[DataFrame, dt.Relation, Path], Any]


def enrich(stream: DataFrame, relation: dt.Relation, root: Path) -> Any:
    """Without a flow."""
    writer = dt.enrich(stream, relation, on="k").writeStream.format("parquet").option("path", str(root / "out"))
    return writer.option("checkpointLocation", str(root / "checkpoint")).trigger(processingTime="0 seconds").start()


def flow(stream: DataFrame, relation: dt.Relation, root: Path) -> Any:
    """In a flow, by index."""
    return _write(dt.stream(stream, "bench").enrich(relation, on="k"), root)


def sharded(stream: DataFrame, relation: dt.Relation, root: Path) -> Any:
    """In a flow, on shards."""
    return _write(dt.stream(stream, "bench").enrich(relation, on="k", strategy="balanced"), root)


def keyed(stream: DataFrame, relation: dt.Relation, root: Path) -> Any:
    """In a flow that keeps a relation."""
    return _write(dt.stream(stream, "bench").surrogate_key("number", root / "keys", on="k"), root)


def _write(described: Any, root: Path) -> Any:
    return described.write(dt.sinks.parquet(root / "out"), checkpoint=root / "checkpoint")


def turn(start: Start, stream: DataFrame, relation: dt.Relation, batches: int, warm_up: int) -> list[dict[str, int]]:
    """The phases of each micro-batch of one query, in milliseconds; those that warm it up left out."""
    root = Path(tempfile.mkdtemp(prefix="dovetail-turn-"))
    query = start(stream, relation, root)
    try:
        while (query.lastProgress or {"batchId": -1})["batchId"] < warm_up + batches:
            if not query.isActive:
                query.awaitTermination()
            time.sleep(0.05)
        found = {p["batchId"]: p["durationMs"] for p in query.recentProgress if p["numInputRows"]}
    finally:
        query.stop()
        shutil.rmtree(root, ignore_errors=True)
    return [dict(phases) for batch, phases in sorted(found.items()) if warm_up <= batch < warm_up + batches]


def measure(
    spark: SparkSession, directory: Path, given: argparse.Namespace, contenders: dict[str, Start]
) -> list[dict[str, Any]]:
    """Every contender at every size."""
    relation = data.make_relation(spark, directory, given.rows)
    figures = []
    for batch in given.batch:
        stream = data.stream_of(spark, given.rows, batch, 1.0, "shuffled")
        taken: dict[str, list[dict[str, int]]] = {name: [] for name in contenders}
        for _ in range(given.turns):
            for name, start in contenders.items():
                taken[name] += turn(start, stream, relation, given.batches, given.warm_up)
        for name, phases in taken.items():
            names = sorted({phase for one in phases for phase in one})
            medians = {phase: statistics.median(one.get(phase, 0) for one in phases) for phase in names}
            all_ms = [one["triggerExecution"] for one in phases]
            figures.append(
                {"contender": name, "batch": batch, "ms": medians["triggerExecution"], "phases": medians, "all": all_ms}
            )
    return figures


def shown(figures: list[dict[str, Any]], parts: bool) -> str:
    """A table, and how the flow does against the bars."""
    lines = [f"{'batch':>9}  {'contender':<10} {'ms':>7} {'times enrich':>13}  micro-batches"]
    for figure in figures:
        base = next(f["ms"] for f in figures if (f["contender"], f["batch"]) == ("enrich", figure["batch"]))
        ratio = figure["ms"] / base
        bar = BARS.get(figure["batch"]) if figure["contender"] == "flow" else None
        verdict = "" if bar is None else f"  {'met' if ratio <= bar else 'MISSED'} (at most {bar:g})"
        name, count = figure["contender"], len(figure["all"])
        lines.append(f"{figure['batch']:>9,}  {name:<10} {figure['ms']:>7.0f} {ratio:>13.2f}  {count}{verdict}")
        if parts:
            lines += [f"{'':>22}{phase:<18} {ms:>6.0f}" for phase, ms in figure["phases"].items()]
    return "\n".join(lines)


def main() -> None:
    """Measure, print one table, and keep the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=list(BARS))
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--batches", type=int, default=8, help="micro-batches of a turn that count")
    parser.add_argument("--warm-up", type=int, default=5, help="micro-batches of a turn that do not")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--beside", action="store_true", help="also the sharded way and surrogate keys")
    parser.add_argument("--parts", action="store_true", help="also Spark's phases of a micro-batch")
    parser.add_argument("--data", default=None, metavar="DIR", help="keep the relation there")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    contenders: dict[str, Start] = {"enrich": enrich, "flow": flow}
    if given.beside:
        contenders |= {"sharded": sharded, "keyed": keyed}
    scratch = Path(tempfile.mkdtemp(prefix="dovetail-bench-"))
    spark = local_session(scratch, {"spark.driver.memory": "2g"})
    try:
        figures = measure(spark, scratch if given.data is None else Path(given.data), given, contenders)
    finally:
        spark.stop()
        shutil.rmtree(scratch, ignore_errors=True)
    print(shown(figures, given.parts))
    if given.json is not None:
        given.json.write_text(json.dumps({"cpus": os.cpu_count(), "rows": given.rows, "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
