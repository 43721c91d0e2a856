"""A Spark of its own whose Python workers are measured: one case per line of stdin, what came of it per line of stdout.

Workers are found through /proc, as children of this process's ``pyspark.daemon``. A worker's floor is what the largest
has after a tiny query of the same kind, which has loaded everything; what is told of a case is the most that a worker
had above that, sampled from a thread while the case ran.
"""

import json
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import dovetail as dt
from dovetail.relation import Relation
from dovetail.testing.sessions import SHORT_LIVED, local_session

_SAMPLE_SECONDS = 0.01


def workers() -> dict[int, int]:
    """Anonymous bytes of every Python worker of this process, by its number."""
    parents: dict[int, int] = {}
    daemons = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if b"pyspark.daemon" in (process / "cmdline").read_bytes():
                daemons.add(int(process.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = {}
    for number in daemons:
        if parents[number] in daemons and _descends(number, os.getpid(), parents):
            found[number] = anonymous_bytes(number)
    return found


def _descends(number: int, ancestor: int, parents: dict[int, int]) -> bool:
    while number > 1:
        if number == ancestor:
            return True
        number = parents.get(number, 0)
    return False


def anonymous_bytes(pid: int) -> int:
    """What a process allocated and touched; 0 if it has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


class Watch:
    """Samples the workers while a case runs."""

    def __init__(self) -> None:
        self.most, self.samples, self._is_done = 0, 0, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while not self._is_done.wait(_SAMPLE_SECONDS):
            self.most = max(self.most, *workers().values(), 0)
            self.samples += 1

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()


# ================================================================ the cases: all tuples have the hot key


def tuples(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(0, count, 1, 2).select(F.lit(0).cast("long").alias("id"), F.col("id").alias("t"))


def feed_of(place: Path, tables: list[pa.Table]) -> str:
    """A directory that a stream reads, a file in each micro-batch."""
    place.mkdir()
    for number, table in enumerate(tables):
        pq.write_table(table, place / f"{number}.parquet")
        os.utime(place / f"{number}.parquet", (1_600_000_000 + number,) * 2)
    return str(place)


def totals(rows: DataFrame) -> list[int]:
    """How many rows there are, and the sum of the documents' lengths."""
    found = rows.agg(F.count("*"), F.sum(F.octet_length("pay"))).collect()[0]
    return [int(found[0]), int(found[1] or 0)]


def enrich(spark: SparkSession, request: dict[str, Any], place: Path) -> list[int]:
    rows = tuples(spark, request["tuples"])
    return totals(dt.enrich(rows, request["relation"], on="id", budget=request["budget"], strategy=request["strategy"]))


def _flow_rows(spark: SparkSession, request: dict[str, Any], place: Path) -> DataFrame:
    count = request["tuples"]
    table = pa.table({"id": np.zeros(count, np.int64), "t": np.arange(count)})
    directory = feed_of(place / "feed", [table])
    return spark.readStream.schema("id long, t long").parquet(directory)


def flow(spark: SparkSession, request: dict[str, Any], place: Path) -> list[int]:
    """The same through a flow; what is written has the documents' lengths only, so that the sink takes no time."""
    rows = dt.stream(_flow_rows(spark, request, place), "memory")
    joined = rows.enrich(request["relation"], on="id", budget=request["budget"], strategy=request["strategy"])
    return _written(spark, joined, place)


def wait_for(spark: SparkSession, request: dict[str, Any], place: Path) -> list[int]:
    rows = dt.stream(_flow_rows(spark, request, place), "memory")
    return _written(spark, rows.wait_for(request["relation"], on="id", deadline="1 hour"), place)


def waiting(spark: SparkSession, request: dict[str, Any], place: Path) -> list[int]:
    """Wide tuples that find nothing, and wait; what they had is counted when their time is up."""
    count, size = request["tuples"], request["text_bytes"]
    table = pa.table({"id": np.arange(count) + 1_000_000, "text": [f"{number:0{size}d}" for number in range(count)]})
    source = spark.readStream.schema("id long, text string").parquet(feed_of(place / "feed", [table]))
    for deadline in ("1 hour", "0 seconds"):
        rows = dt.stream(source, "memory").wait_for(request["relation"], on="id", deadline=deadline)
        if deadline == "1 hour":
            first = _written(spark, rows, place, text="text")
            assert first == [0, 0], first
        else:
            pq.write_table(table.slice(0, 0), place / "feed" / "more.parquet")
            found = _written(spark, rows, place, text="text")
    return found


def upsert(spark: SparkSession, request: dict[str, Any], place: Path) -> list[int]:
    """Wide rows into a kept relation: new ones, and then the same keys again."""
    count, size = request["tuples"], request["text_bytes"]
    tables = [
        pa.table({"id": np.arange(count), "pay": [f"{number + change:0{size}d}" for number in range(count)]})
        for change in range(2)
    ]
    source = spark.readStream.schema("id long, pay string").option("maxFilesPerTrigger", 1)
    rows = dt.stream(source.parquet(feed_of(place / "feed", tables)), "memory")
    kept = rows.upsert(place / "kept", on="id", budget=request["budget"], shards=2)
    return _written(spark, kept, place)


def _written(spark: SparkSession, flow: Any, place: Path, text: str = "pay") -> list[int]:
    shorter = flow.transform(lambda rows: rows.select(F.octet_length(text).alias("length")))
    sink = dt.sinks.parquet(place / "out")
    query = shorter.write(sink, checkpoint=place / "checkpoint", trigger="available-now")
    assert query.awaitTermination(300)
    found = spark.read.schema("length int").parquet(str(place / "out")).agg(F.count("*"), F.sum("length")).collect()[0]
    return [int(found[0]), int(found[1] or 0)]


CASES: dict[str, Callable[[SparkSession, dict[str, Any], Path], list[int]]] = {
    case.__name__: case for case in (enrich, flow, wait_for, waiting, upsert)
}


def main() -> None:
    """Serve requests until stdin ends."""
    scratch = Path(tempfile.mkdtemp(prefix="dovetail-memory-"))
    ids = np.arange(100)
    small = Relation.build(pa.table({"id": ids, "n": ids, "pay": ["x"] * 100}), scratch / "small", on="id", shards=2)
    settings = {**SHORT_LIVED, "spark.driver.memory": "3g", "spark.sql.execution.arrow.maxRecordsPerBatch": "1000"}
    spark = local_session(scratch, settings)
    spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    warmed: dict[str, int] = {}
    try:
        print(json.dumps({"ready": True}), flush=True)
        for number, line in enumerate(sys.stdin):
            request = json.loads(line)
            case = CASES[request["case"]]
            if request["case"] not in warmed:
                place = scratch / f"warm-{number}"
                place.mkdir()
                tiny = {"tuples": 100, "text_bytes": 10, "relation": str(small.path), "budget": 16_000_000}
                case(spark, {**request, **tiny}, place)
                warmed[request["case"]] = max(workers().values())
            # Workers end with a task that failed; the next ones begin with what those had that were new.
            floor = max([*workers().values(), warmed[request["case"]]])
            place = scratch / f"case-{number}"
            place.mkdir()
            result: dict[str, Any] = {}
            began = time.monotonic()
            with Watch() as watch:
                try:
                    result["found"] = case(spark, request, place)
                except Exception as error:  # noqa: BLE001 -- the test says which one it should be
                    result["error"] = {"class": type(error).__name__, "text": str(error)[-6_000:]}
                    result["trace"] = traceback.format_exc()[-3_000:]
            shutil.rmtree(place, ignore_errors=True)
            result |= {"floor": floor, "above": watch.most - floor, "samples": watch.samples}
            print(json.dumps({**result, "seconds": time.monotonic() - began}), flush=True)
    finally:
        spark.stop()
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
