"""Benchmark of the relation: every figure is a ratio of two things measured in this run, on this machine.

Axes
----
rows        3.5 M for build, upsert and scan, 20 M for index lookups (``--rows``, ``--lookup-rows``)
row         120 bytes: a bigint key, a string of 100 characters, a bigint
keys        shuffled on disk before the build; lookups draw Zipf(1) codes with shuffled ranks
shards      8

Bars
----
build       within 1.5 times Spark's own repartition + sort + Parquet write of the same DataFrame
upsert      of 1 % of the rows: well under a build
scan        of a shard within 1.5 times a plain read loop over the same bytes, with and without the page cache
lookup      of 1 M Zipf codes at least as fast as numpy.searchsorted in the whole code array in memory
index       resident bytes below 0.5 % of the relation's bytes

Repetitions are interleaved, medians are compared. The data is made below ``--dir`` and removed at the end.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dovetail import Relation
from dovetail.kernels.spark_hash import shard_of_codes
from dovetail.relation.io import Arena, IoMode, PreadFile
from dovetail.runtime.generator.zipf import Zipf
from dovetail.testing.sessions import local_session

SHARDS = 8
READ_BYTES = 4 * 2**20


@dataclass
class Figure:
    name: str
    ours_s: float
    theirs: str
    theirs_s: float
    bar: str
    is_met: bool

    @property
    def ratio(self) -> float:
        return self.ours_s / self.theirs_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_500_000)
    parser.add_argument("--lookup-rows", type=int, default=20_000_000)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--dir", default=None, help="where to put the data (default: a temporary directory)")
    parser.add_argument("--json", default=None, metavar="FILE", help="write the figures as JSON as well")
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="dovetail-bench-", dir=arguments.dir))
    try:
        figures = measure(arguments, base)
    finally:
        shutil.rmtree(base)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([{**asdict(f), "ratio": f.ratio} for f in figures], indent=1))


def measure(arguments: argparse.Namespace, base: Path) -> list[Figure]:
    spark = local_session(base, {"spark.driver.memory": "6g"})
    figures: list[Figure] = []

    def report(figure: Figure) -> None:
        figures.append(figure)
        verdict = "met" if figure.is_met else "NOT met"
        print(
            f"{figure.name:34} {figure.ours_s:9.3f} s   {figure.theirs:42} {figure.theirs_s:9.3f} s   "
            f"ratio {figure.ratio:6.2f}   bar {figure.bar}: {verdict}",
            flush=True,
        )

    relation = bench_build(spark, arguments, base, report)
    bench_upsert(spark, arguments, base, relation, report)
    bench_scan(arguments, relation, report)
    big = build_big(spark, arguments, base)
    spark.stop()
    bench_lookup(arguments, big, report)
    share = big.index_bytes / big.stats.bytes
    verdict = "met" if share < 0.005 else "NOT met"
    print(
        f"{'resident index':34} {big.index_bytes:,} bytes of {big.stats.bytes:,}: {share:.4%}   bar < 0.5 %: {verdict}"
    )
    return figures


def make_source(spark: Any, rows: int, path: Path) -> Any:
    """Rows of 120 bytes whose order on disk has nothing to do with their keys."""
    from pyspark.sql import functions as F

    digest = F.sha2(F.col("id").cast("string"), 256)
    scattered = F.pmod(F.col("id") * 2_654_435_761 + 12_345, F.lit(rows))
    frame = spark.range(rows, numPartitions=8).select(
        scattered.alias("k"),
        F.concat(digest, F.substring(digest, 1, 36)).alias("pay"),
        (F.col("id") * 7).alias("sk"),
    )
    frame.write.parquet(str(path))
    return spark.read.parquet(str(path))


def bench_build(spark: Any, arguments: argparse.Namespace, base: Path, report: Callable[[Figure], None]) -> Relation:
    source = make_source(spark, arguments.rows, base / "source")
    ours, theirs = [], []
    relation = None
    repetitions = min(3, arguments.repetitions)
    for i in range(repetitions + 1):  # the first round warms both
        parquet, target = base / f"parquet{i}", base / f"relation{i}"
        sorted_rows = source.repartition(SHARDS, "k").sortWithinPartitions("k")
        theirs.append(timed(partial(sorted_rows.write.parquet, str(parquet))))
        shutil.rmtree(parquet)
        ours.append(timed(partial(Relation.build, source, target, on="k", shards=SHARDS)))
        if relation is not None:
            shutil.rmtree(relation.path)
        relation = Relation.open(target)
    mine, spark_s = statistics.median(ours[1:]), statistics.median(theirs[1:])
    report(
        Figure(
            f"build {arguments.rows:,} rows",
            mine,
            "Spark repartition + sort + Parquet",
            spark_s,
            "<= 1.5",
            mine <= 1.5 * spark_s,
        )
    )
    assert relation is not None
    return relation


def bench_upsert(
    spark: Any, arguments: argparse.Namespace, base: Path, relation: Relation, report: Callable[[Figure], None]
) -> None:
    from pyspark.sql import functions as F

    source = spark.read.parquet(str(base / "source"))
    ours, builds = [], []
    for i in range(3):
        changed = source.where(F.pmod(F.xxhash64("k"), F.lit(100)) == i).withColumn("sk", -F.col("sk")).cache()
        changed.count()
        before = bytes_below(relation.path)
        ours.append(timed(partial(relation.upsert, changed)))
        written = bytes_below(relation.path) - before
        builds.append(timed(partial(Relation.build, source, base / f"again{i}", on="k", shards=SHARDS)))
        shutil.rmtree(base / f"again{i}")
        whole = relation.stats.bytes
        print(f"{'  upsert wrote':34} {written:,} bytes for {changed.count():,} rows of a relation of {whole:,} bytes")
    mine, build_s = statistics.median(ours), statistics.median(builds)
    report(Figure("upsert 1 % of the rows", mine, "build of the same relation", build_s, "< 0.5", mine < 0.5 * build_s))


def bench_scan(arguments: argparse.Namespace, relation: Relation, report: Callable[[Figure], None]) -> None:
    relation = Relation.open(relation.path, version=1)
    shard_bytes = relation.stats.shards[0].bytes
    block_rows = 65_536  # as many as a record batch has
    modes: tuple[IoMode, ...] = ("buffered", "direct")
    for io in modes:
        reader = relation.shard(0, io=io)
        files = shard_files(relation)
        consume, arena = [0], Arena()

        def scan(reader: Any = reader, consume: list[int] = consume) -> None:
            for block in reader.blocks(block_rows):
                consume[0] += block.rows.num_rows

        def plain(io: str = io, files: list[str] = files, arena: Arena = arena) -> None:
            for file in files:
                read_all(file, io == "direct", arena)

        ours, theirs = interleaved(scan, plain, arguments.repetitions * 3)
        report(
            Figure(
                f"scan a shard of {shard_bytes // 2**20} MiB, {io}",
                ours,
                f"plain {io} read loop, {READ_BYTES >> 20} MiB a read",
                theirs,
                "<= 1.5",
                ours <= 1.5 * theirs,
            )
        )


def shard_files(relation: Relation) -> list[str]:
    """What a scan of shard 0 reads: the rows and their codes."""
    directory = Path(relation.path) / "data" / "0"
    segment = max(directory.glob("*.rows"), key=lambda file: file.stat().st_size)
    return [str(segment), str(segment.with_suffix(".codes"))]


def read_all(path: str, direct: bool, arena: Arena) -> None:
    file, size = PreadFile(path, arena, direct), os.path.getsize(path)
    for offset in range(0, size, READ_BYTES):
        arena.reset()
        file.read(offset, min(READ_BYTES, size - offset))


def build_big(spark: Any, arguments: argparse.Namespace, base: Path) -> Relation:
    source = make_source(spark, arguments.lookup_rows, base / "big-source")
    relation = Relation.build(source, base / "big", on="k", shards=SHARDS)
    shutil.rmtree(base / "big-source")
    return relation


def bench_lookup(arguments: argparse.Namespace, relation: Relation, report: Callable[[Figure], None]) -> None:
    rows = relation.stats.rows
    queries = Zipf(rows, 1.0, order="shuffled", seed=7).sample(1_000_000) % rows
    whole = np.arange(rows, dtype=np.int64)
    shards = [relation.shard(number, columns=[]) for number in range(SHARDS)]
    of_shard = shard_of_codes(queries, SHARDS)
    routed = [queries[of_shard == number] for number in range(SHARDS)]
    found = sum(len(shard.lookup(codes)[0]) for shard, codes in zip(shards, routed, strict=True))
    assert found == len(queries), "every code of the stream is in the relation"

    def ours() -> None:
        for shard, codes in zip(shards, routed, strict=True):
            shard.lookup(codes)

    mine, theirs = interleaved(ours, lambda: np.searchsorted(whole, queries), arguments.repetitions * 2)
    report(
        Figure(
            f"look up 1 M Zipf codes in {rows:,}",
            mine,
            "numpy.searchsorted, all codes in memory",
            theirs,
            "<= 1.0",
            mine <= theirs,
        )
    )
    one = np.sort(queries)
    routed = [np.sort(codes) for codes in routed]
    mine, theirs = interleaved(ours, lambda: np.searchsorted(whole, one), arguments.repetitions * 2)
    report(Figure("  the same, codes sorted first", mine, "numpy.searchsorted, codes sorted", theirs, "(no bar)", True))


def interleaved(ours: Callable[[], Any], theirs: Callable[[], Any], repetitions: int) -> tuple[float, float]:
    ours()
    theirs()
    pairs = [(timed(ours), timed(theirs)) for _ in range(repetitions)]
    return statistics.median(p[0] for p in pairs), statistics.median(p[1] for p in pairs)


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def bytes_below(path: str) -> int:
    return sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())


if __name__ == "__main__":
    main()
