"""A join of three streams on Spark: ours, Spark's own chain of stream-stream joins, Flink's, and no join at all.

Sections (``--sections``, all by default)
-----------------------------------------
- ``join``. *Rows* per stream and micro-batch: 100,000 and 300,000 (``--rows``). *Plan*: ``dovetail`` (`multi_join`;
  its sink is ``noop``; its state is durable in every micro-batch); ``spark``, a chain of two stream-stream joins with
  the default state store, and ``spark-rocksdb`` with RocksDB and its changelog, the latter also with
  ``stateFormatVersion`` 4 (``--spark-plans``; those that are less than half as fast as Spark's best are not run again
  with more rows); ``ceiling``: the union of the three streams, a shuffle by key, ``mapInArrow`` that gives rows
  of the result's width, an observation, and the ``noop`` sink; ``ceiling-uncounted``, beside it without a bar: the same
  with ``spark.sql.execution.arrow.maxBytesPerBatch`` lifted, as flows lift it where it cannot matter.
- ``small``. Ten rows per stream and micro-batch, against the same flow without any row.
- ``growth``. 100,000 rows per stream and micro-batch with a window of 1 and of 30 seconds: about 1 and 10 million rows
  of state.
- ``flink``. Flink's chain of joins and its operator for several inputs (see ``multiway_flink.py``), on ``--flink-rows``
  rows per stream, with heap state and no checkpoints, against ours at 300,000 rows per micro-batch. PyFlink is
  installed into an environment of its own, ``build/flink`` (``--flink-python`` takes another interpreter that has it).

Every key comes once per stream; event time advances by a second per micro-batch, and rows join that are at most two
seconds apart, so that state is that of the last five or so micro-batches. Times are medians of Spark's own
``triggerExecution`` over the micro-batches after the first six. Every plan runs in a session of its own, one after the
other; ratios are of one run.

Bars
----
- at 100,000: at least 0.7 of the ceiling and 5 times Spark's best;
- at 300,000: at least 8 times Spark's best, with at most a third of its state bytes, and 2 times Flink's best;
- ten rows: at most 1.5 times an empty micro-batch; with 10 million rows of state: 0.7 of the throughput with 1 million.

``--quick`` takes 100,000 rows and 8 micro-batches of the section ``join``. Exit status 0 whatever the outcome.
``--out`` is where ``bench-multiway.json`` and the plot go; sections that are not run keep what the file says of them.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console
from rich.table import Table

STREAMS = ("a", "b", "c")
WARM_UP = 6
FLINK = "apache-flink==2.3.0"
# By state store and version of its format; version 4 keeps its state in RocksDB only.
SPARK_PLANS = ("spark-default-2", "spark-rocksdb-2", "spark-rocksdb-4")
UNCOUNTED = {"spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1)}
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"


def session(**conf: str) -> Any:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[2]").appName("bench-multiway")
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "OFF",
        "spark.driver.memory": "8g",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
        **conf,
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def stream(spark: Any, name: str, rows: int) -> Any:
    """So many rows a micro-batch, a second apart; 0: none, although the source goes on."""
    from pyspark.sql import functions as F

    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", max(1, rows))
    return (
        source.option("advanceMillisPerBatch", 1000)
        .load()
        .where(F.lit(True) if rows else F.col("value") < 0)
        .select(
            F.pmod(F.xxhash64("value"), F.lit(10**12)).alias("k"),
            F.col("value").alias(f"v{name}"),
            F.col("timestamp").alias(f"t{name}"),
        )
        .withWatermark(f"t{name}", "2 seconds")
    )


def run_dovetail(rows: int, batches: int, checkpoint: str, window_s: int = 2) -> tuple[list[int], int, int]:
    """Times, bytes of state, and rows of state."""
    import dovetail as dt

    spark = session()
    flow = dt.multi_join(
        {name: stream(spark, name, rows) for name in STREAMS},
        on="k",
        window=f"{window_s} seconds",
        time={name: f"t{name}" for name in STREAMS},
        budget="4GB",
    )
    query = flow.write(dt.sinks.noop(), checkpoint=checkpoint)
    # Only when as much leaves the window as comes is the state as large as it gets: the window, the two seconds that
    # rows may be late, and as long again until half of a chunk has expired.
    times = watch(query, batches, warm_up=max(WARM_UP, window_s + 4))
    progress = query.progress
    query.stop()
    assert progress is not None
    assert not rows or progress.operators[0].totals.output_rows > 0
    return times, _state_bytes(Path(checkpoint)), sum(progress.operators[0].state_rows.values())


def _state_bytes(checkpoint: Path) -> int:
    """Bytes of the files that the last commit names."""
    last = max((checkpoint / "dovetail" / "commits").glob("[0-9]*.json"))
    shards = json.loads(last.read_text())["operators"]["1-multi_join"]
    return sum(file["bytes"] for shard in shards for file in shard["files"])


def run_spark(rows: int, batches: int, checkpoint: str, provider: str, state_format: str) -> tuple[list[int], int]:
    from pyspark.sql import functions as F

    conf = {"spark.sql.streaming.join.stateFormatVersion": state_format}
    if provider == "rocksdb":
        conf["spark.sql.streaming.stateStore.providerClass"] = ROCKSDB
        conf["spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled"] = "true"
    spark = session(**conf)
    a, b, c = (stream(spark, name, rows) for name in STREAMS)

    def near(left: str, right: str) -> Any:
        return F.expr(f"{right} between {left} - interval 2 seconds and {left} + interval 2 seconds")

    b, c = b.withColumnRenamed("k", "kb"), c.withColumnRenamed("k", "kc")
    # One event time goes on: Spark refuses a second join of rows that have two.
    plain_time = F.expr("tb + interval 0 seconds")
    two = a.join(b, (F.col("k") == F.col("kb")) & near("ta", "tb")).drop("kb").withColumn("tb", plain_time)
    three = two.join(c, (F.col("k") == F.col("kc")) & near("ta", "tc")).drop("kc")
    query = three.writeStream.format("noop").option("checkpointLocation", checkpoint).start()
    times = watch(query, batches)
    operators = query.lastProgress["stateOperators"]
    query.stop()
    return times, sum(operator["memoryUsedBytes"] for operator in operators)


def run_ceiling(rows: int, batches: int, checkpoint: str, **conf: str) -> tuple[list[int], int]:
    from pyspark.sql import functions as F

    spark = session(**conf)
    parts = [stream(spark, n, rows).select("k", F.col(f"v{n}").alias("v"), F.col(f"t{n}").alias("t")) for n in STREAMS]
    union = parts[0].union(parts[1]).union(parts[2])

    def widen(arrived: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in arrived:
            # A third as many rows, each of the result's width.
            third = batch.slice(0, batch.num_rows // len(STREAMS))
            k, v, t = third.columns
            yield pa.RecordBatch.from_arrays([k, v, t, v, t, v, t], names=["k", "va", "ta", "vb", "tb", "vc", "tc"])

    schema = "k long, va long, ta timestamp, vb long, tb timestamp, vc long, tc timestamp"
    mapped = union.repartition(2, "k").mapInArrow(widen, schema).observe("seen", F.count(F.lit(1)).alias("rows"))
    query = mapped.writeStream.format("noop").option("checkpointLocation", checkpoint).start()
    times = watch(query, batches)
    query.stop()
    return times, 0


def watch(query: Any, batches: int, warm_up: int = WARM_UP) -> list[int]:
    """Milliseconds of the micro-batches after the first few."""
    give_up_at = time.monotonic() + 600
    while (query.lastProgress or {"batchId": -1})["batchId"] < warm_up + batches:
        if query.exception() is not None:
            raise query.exception()
        if time.monotonic() > give_up_at:
            break
        time.sleep(0.1)
    progress = [p for p in query.recentProgress if p["batchId"] >= warm_up and p["numInputRows"]]
    return sorted(int(p["durationMs"]["triggerExecution"]) for p in progress)


def run_one(plan: str, rows: int, batches: int, window_s: int) -> None:
    """Run one plan in this process, and print what was measured as JSON."""
    state_rows = 0
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = f"{directory}/checkpoint"
        if plan == "dovetail":
            times, state, state_rows = run_dovetail(rows, batches, checkpoint, window_s)
        elif plan == "ceiling":
            times, state = run_ceiling(rows, batches, checkpoint)
        elif plan == "ceiling-uncounted":
            times, state = run_ceiling(rows, batches, checkpoint, **UNCOUNTED)
        else:
            _, provider, state_format = plan.split("-")
            times, state = run_spark(rows, batches, checkpoint, provider, state_format)
    told = {"plan": plan, "rows": rows, "times_ms": times, "state_bytes": state, "state_rows": state_rows}
    print(json.dumps(told), flush=True)


def measure(plan: str, rows: int, batches: int, window_s: int = 2) -> dict[str, Any]:
    """Run one plan in a process of its own."""
    command = [sys.executable, __file__, "--one", plan, "--rows", str(rows), "--batches", str(batches)]
    command += ["--window-s", str(window_s)]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise SystemExit(f"{plan} at {rows:,} rows failed:\n{done.stderr[-3000:]}")
    measured: dict[str, Any] = json.loads(lines[-1])
    times = measured["times_ms"]
    measured["median_ms"] = times[len(times) // 2]
    measured["tuples_per_s"] = len(STREAMS) * rows / measured["median_ms"] * 1000
    return measured


# -------------------------------------------------------------------- sections

Section = dict[str, Any]


class Bars:
    """What a section is held to."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def verdict(self, what: str, value: float, bar: float, is_least: bool = True) -> str:
        """A bar, and whether it was met; noted for the JSON."""
        is_met = value >= bar if is_least else value <= bar
        self.found.append({"bar": what, "value": value, "least" if is_least else "most": bar, "met": is_met})
        return f"{'>=' if is_least else '<='} {bar}: {'met' if is_met else 'NOT met'}"

    def section(self, measured: list[dict[str, Any]]) -> Section:
        """What goes into the JSON."""
        return {"measured": measured, "bars": self.found}


def section_join(console: Console, options: argparse.Namespace) -> Section:
    """Ours against the ceiling and Spark's own."""
    bars = Bars()
    sparks = list(options.spark_plans)
    results = []
    for rows in options.rows:
        table = Table(title=f"Three streams, {rows:,} rows each per micro-batch")
        for column in ("plan", "median ms", "tuples/s", "state bytes", "ours / theirs", "bar"):
            table.add_column(column, justify="left" if column == "plan" else "right")
        plans = ("dovetail", "ceiling", "ceiling-uncounted", *sparks)
        measured = [measure(plan, rows, options.batches) for plan in plans]
        results += measured
        ours = measured[0]
        best = max(measured[-len(sparks) :], key=lambda m: float(m["tuples_per_s"]))
        sparks = [m["plan"] for m in measured[-len(sparks) :] if m["tuples_per_s"] > best["tuples_per_s"] / 2]
        for each in measured:
            ratio = ours["tuples_per_s"] / each["tuples_per_s"]
            told = ""
            if each is best:
                told = bars.verdict(f"times Spark's best at {rows:,}", ratio, 5.0 if rows < 300_000 else 8.0)
            elif each["plan"] == "ceiling" and rows < 300_000:
                told = bars.verdict(f"of the ceiling at {rows:,}", ratio, 0.7)
            table.add_row(
                each["plan"],
                f"{each['median_ms']:,}",
                f"{each['tuples_per_s']:,.0f}",
                f"{each['state_bytes']:,}" if each["state_bytes"] else "",
                "" if each is ours else f"{ratio:.2f}",
                told,
            )
        console.print(table)
        share = ours["state_bytes"] / best["state_bytes"]
        told = "" if rows < 300_000 else bars.verdict(f"of Spark's state bytes at {rows:,}", share, 0.333, False)
        console.print(f"state: ours / that of {best['plan']} = {share:.2f} {told}")
    return bars.section(results)


def section_small(console: Console, options: argparse.Namespace) -> Section:
    """Ten rows against none."""
    bars = Bars()
    ten, none = (measure("dovetail", rows, 3 * options.batches) for rows in (10, 0))
    ratio = ten["median_ms"] / none["median_ms"]
    console.print(
        f"ten rows per stream: {ten['median_ms']} ms a micro-batch, none: {none['median_ms']} ms, ratio {ratio:.2f} "
        f"({bars.verdict('times an empty micro-batch', ratio, 1.5, is_least=False)})"
    )
    return bars.section([ten, none])


def section_growth(console: Console, options: argparse.Namespace) -> Section:
    """A little state against much."""
    bars = Bars()
    rows = options.growth_rows
    small, large = (measure("dovetail", rows, options.batches, window_s) for window_s in options.growth_windows)
    ratio = large["tuples_per_s"] / small["tuples_per_s"]
    for each in (small, large):
        console.print(
            f"{each['state_rows']:,} rows of state, {each['state_bytes']:,} bytes: {each['median_ms']:,} ms a "
            f"micro-batch, {each['tuples_per_s']:,.0f} tuples/s"
        )
    told = bars.verdict("of the throughput with little state", ratio, 0.7)
    console.print(f"throughput with much state / with little = {ratio:.2f} ({told})")
    return bars.section([small, large])


def section_flink(console: Console, options: argparse.Namespace) -> Section:
    """Ours against Flink's two plans."""
    bars = Bars()
    ours = measure("dovetail", options.rows[-1], options.batches)
    results = [ours]
    environment = {**os.environ, "JAVA_TOOL_OPTIONS": "-Xmx12g"}
    program = str(Path(__file__).with_name("multiway_flink.py"))
    for plan in ("chain", "multi"):
        command = [str(flink_python(options.flink_python)), program, str(options.flink_rows), plan]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            raise SystemExit(f"Flink failed:\n{done.stderr[-3000:]}")
        results.append(json.loads(lines[-1]))
        console.print(f"{results[-1]['plan']}: {results[-1]['tuples_per_s']:,.0f} tuples/s")
    best = max(float(each["tuples_per_s"]) for each in results[1:])
    ratio = ours["tuples_per_s"] / best
    told = bars.verdict(f"times Flink's best at {ours['rows']:,}", ratio, 2.0)
    console.print(
        f"ours at {ours['rows']:,} rows per stream and micro-batch: {ours['tuples_per_s']:,.0f} tuples/s, "
        f"{ratio:.2f} times Flink's best ({told})"
    )
    return bars.section(results)


def flink_python(given: Path | None) -> Path:
    """An interpreter that has PyFlink: the one given, or that of an environment made here once."""
    if given is not None:
        return given
    directory = Path(__file__).parent.parent / "build" / "flink"
    python = directory / "bin" / "python"
    if not (directory / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", FLINK], check=True)
        (directory / "ready").touch()
    return python


SECTIONS = {"join": section_join, "small": section_small, "growth": section_growth, "flink": section_flink}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 300_000])
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--spark-plans", nargs="+", choices=SPARK_PLANS, default=list(SPARK_PLANS))
    parser.add_argument("--growth-rows", type=int, default=100_000)
    parser.add_argument("--growth-windows", type=int, nargs=2, default=[1, 30], help="seconds")
    parser.add_argument("--flink-rows", type=int, default=3_000_000)
    parser.add_argument("--flink-python", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("artifacts"), metavar="DIR")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--window-s", type=int, default=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_one(options.one, options.rows[0], options.batches, options.window_s)
        return
    if options.quick:
        options.sections, options.rows, options.batches = ["join"], [100_000], 8
        options.spark_plans = options.spark_plans[:1]
    options.out.mkdir(parents=True, exist_ok=True)
    kept = options.out / "bench-multiway.json"
    console = Console(width=120)
    results: dict[str, Section] = json.loads(kept.read_text()) if kept.exists() else {}
    for name in options.sections:
        console.print(f"[bold]{name}[/bold]")
        results[name] = {"cpus": os.cpu_count(), **SECTIONS[name](console, options)}
        kept.write_text(json.dumps(results, indent=1))
    plot(results, options.out / "bench-multiway.png")


def plot(results: dict[str, Section], path: Path) -> None:
    """Tuples per second of everybody, by rows per micro-batch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured = results.get("join", {}).get("measured", [])
    if not measured:
        return
    flink = [each for each in results.get("flink", {}).get("measured", []) if each["plan"].startswith("flink")]
    sizes = sorted({each["rows"] for each in measured})
    plans = list(dict.fromkeys(each["plan"] for each in measured))
    figure, axes = pyplot.subplots(figsize=(9, 4.5))
    width = 0.8 / (len(plans) + len(flink))
    for number, plan in enumerate(plans):
        by_rows = {each["rows"]: each["tuples_per_s"] for each in measured if each["plan"] == plan}
        rates = [by_rows.get(rows, math.nan) for rows in sizes]
        axes.bar([place + number * width for place in range(len(sizes))], rates, width, label=plan)
    for number, each in enumerate(flink, len(plans)):
        axes.bar([len(sizes) - 1 + number * width], [each["tuples_per_s"]], width, label=each["plan"])
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(sizes))], [f"{rows:,}" for rows in sizes])
    axes.set_xlabel("rows per stream and micro-batch (Flink has none: as fast as it can)")
    axes.set_ylabel("tuples/s")
    axes.set_yscale("log")
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
