"""Soak of `enrich`: what its workers and their shared cache hold, sampled through many micro-batches.

Runs a streaming query of at least ``--batches`` micro-batches at each budget, with reads instead of mapped pages so
that the shared cache is at work, with a hot set that moves so that generations follow one another. Twice a second it
adds up

    the anonymous memory of every Python worker (RssAnon of /proc/<pid>/status), and
    the allocated blocks of every cache file, those that are deleted but still mapped included (/proc/<pid>/map_files)

and compares the sum with budget + constant x workers. The constant is what a worker takes whatever the budget: the
interpreter, numpy, pyarrow and compiled kernels, and one batch of 65,536 tuples with its rows on its way through. Ends
with exit code 1 if a sample was above.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from enrich_bench import data
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

import dovetail as dt
from dovetail.testing.sessions import local_session

CONSTANT_BYTES = 256_000_000
_SAMPLE_SECONDS = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_500_000)
    parser.add_argument("--batch", type=int, default=50_000)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--budget", type=float, nargs="+", default=[1.0, 10.0], help="per cent of R")
    parser.add_argument("--data", default=None, metavar="DIR", help="keep the tables there")
    parser.add_argument("--out", default="artifacts", metavar="DIR", help="where the JSON goes")
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="dovetail-soak-"))
    directory = scratch if arguments.data is None else Path(arguments.data)
    spark = local_session(scratch, {"spark.driver.memory": "8g"})
    try:
        results = [soak(spark, directory, scratch, percent, arguments) for percent in arguments.budget]
    finally:
        spark.stop()
        shutil.rmtree(scratch, ignore_errors=True)
    out = Path(arguments.out)
    out.mkdir(exist_ok=True)
    (out / "soak-enrich.json").write_text(json.dumps(results, indent=1))
    sys.exit(0 if all(result["most_over_bytes"] <= 0 for result in results) else 1)


def soak(
    spark: SparkSession, directory: Path, scratch: Path, percent: float, arguments: argparse.Namespace
) -> dict[str, float]:
    rows = arguments.rows
    relation = data.make_relation(spark, directory, rows)
    budget = int(rows * 120 * percent / 100)
    stream = data.stream_of(spark, rows, arguments.batch, 1.0, "shuffled")
    # Every 20 micro-batches other keys are hot.
    epoch = F.floor(F.col("v") / (20 * arguments.batch))
    moving = stream.withColumn("k", F.pmod(F.col("k") + epoch * 7_919, F.lit(rows)))
    enriched = dt.enrich(moving, relation, on="k", budget=budget, io="buffered")
    writer = enriched.writeStream.format("noop").option("checkpointLocation", str(scratch / f"soak-{percent}"))
    query = writer.trigger(processingTime="0 seconds").start()
    samples: list[tuple[int, int, int, int]] = []
    generations: set[str] = set()
    done = -1
    while done < arguments.batches:
        if (failure := query.exception()) is not None:
            raise failure
        samples.append(sample(scratch / "local", generations))
        progress = query.lastProgress
        done = -1 if progress is None else progress["batchId"]
        time.sleep(_SAMPLE_SECONDS)
    query.stop()
    over = [
        anonymous + files - budget - workers * CONSTANT_BYTES for anonymous, files, workers, _ in samples if workers
    ]
    result = {
        "budget_percent": percent,
        "budget_bytes": budget,
        "constant_bytes_per_worker": CONSTANT_BYTES,
        "micro_batches": done,
        "samples": len(samples),
        "generations": len(generations),
        "most_anonymous_bytes": max(s[0] for s in samples),
        "most_anonymous_bytes_of_a_worker": max(s[3] for s in samples),
        "most_cache_file_bytes": max(s[1] for s in samples),
        "most_workers": max(s[2] for s in samples),
        "most_over_bytes": max(over),
    }
    print(json.dumps(result), flush=True)
    return result


def sample(local: Path, generations: set[str]) -> tuple[int, int, int, int]:
    """Anonymous bytes of all workers, allocated bytes of cache files, workers, and anonymous bytes of the largest."""
    anonymous = []
    files: dict[tuple[int, int], int] = {}
    for process in worker_processes():
        try:
            status = (process / "status").read_text()
            mapped = [os.stat(entry) for entry in (process / "map_files").iterdir() if _is_cache_file(entry)]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        anonymous.append(int(fields["RssAnon"].split()[0]) * 1024)
        files.update({(info.st_dev, info.st_ino): info.st_blocks * 512 for info in mapped})
    for path in local.glob("*/dovetail-cache/*/*"):
        try:
            info = path.stat()
        except FileNotFoundError:
            continue
        files[info.st_dev, info.st_ino] = info.st_blocks * 512
        if path.name.startswith("generation-"):
            generations.add(f"{path.parent.name}/{path.name}")
    return sum(anonymous), sum(files.values()), len(anonymous), max(anonymous, default=0)


def _is_cache_file(entry: Path) -> bool:
    try:
        return "dovetail-cache" in os.readlink(entry)
    except OSError:
        return False


def worker_processes() -> list[Path]:
    """The Python workers of this process's Spark: children of its daemon."""
    parents: dict[int, int] = {}
    daemons = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            command = (process / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        number = int(process.name)
        parents[number] = int(fields[1])
        if b"pyspark.daemon" in command:
            daemons.append(number)
    mine = [number for number in daemons if _descends(number, os.getpid(), parents)]
    return [Path(f"/proc/{number}") for number in mine if parents.get(number) in mine]


def _descends(number: int, ancestor: int, parents: dict[int, int]) -> bool:
    while number > 1:
        if number == ancestor:
            return True
        number = parents.get(number, 0)
    return False


if __name__ == "__main__":
    main()
