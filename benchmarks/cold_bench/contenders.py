"""Who looks up: each runs alone in a process within the memory limit and reports seconds and bytes read per batch."""

import contextlib
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cold_bench.data import Int64Array, keys_of_batch, rocksdb_options, stored
from dovetail import Relation

_SCHEMA = pa.schema({"__code": pa.int64(), "k": pa.int64(), "v": pa.int64()})
_THREADS = 2

LookUp = Callable[[Int64Array], tuple[float, int]]
"""Seconds of a micro-batch, and the sum of the surrogate keys that it found: all contenders must agree."""


@dataclass(frozen=True)
class Work:
    """What one child process does."""

    contender: str
    path: str
    rows: int
    tuples: int
    batches: int
    limit_bytes: int
    exponents: tuple[float, ...]


@dataclass(frozen=True)
class Figure:
    """The batches of one contender and one distribution; medians are of the second half."""

    contender: str
    exponent: float
    tuples: int
    seconds: list[float]
    read_bytes: list[int]
    cpu_seconds: list[float]  # of all its processes
    distinct: int
    checksum: int
    anonymous_bytes: int

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds[len(self.seconds) // 2 :])

    @property
    def median_cpu_s(self) -> float:
        return statistics.median(self.cpu_seconds[len(self.cpu_seconds) // 2 :])

    @property
    def median_read_bytes(self) -> float:
        return statistics.median(self.read_bytes[len(self.read_bytes) // 2 :])


def run(work: Work) -> None:
    """In the child: open, look all batches up and print the figures as JSON."""
    opened = _OPENERS[work.contender](work)
    figures = []
    for exponent in work.exponents:
        seconds, read, cpu, checksum, distinct = [], [], [], 0, 0
        for number in range(work.batches):
            keys = keys_of_batch(work.rows, work.tuples, exponent, number)
            distinct = int(np.unique(keys).size)
            before = _used()
            taken, found = opened(keys)
            after = _used()
            seconds.append(taken)
            read.append(after[0] - before[0])
            cpu.append(after[1] - before[1])
            checksum ^= found
        anonymous_bytes = _anonymous_bytes()
        figure = Figure(work.contender, exponent, work.tuples, seconds, read, cpu, distinct, checksum, anonymous_bytes)
        figures.append(asdict(figure))
    json.dump(figures, sys.stdout)


def _processes() -> list[Path]:
    """This process and all below it: Spark's driver and its Python workers, too."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(status.parent.name))
    found = [os.getpid()]
    for number in found:
        found += children.get(number, [])
    return [Path("/proc") / str(number) for number in found]


def _used() -> tuple[int, float]:
    """Bytes read from the device and seconds of processor time, of all these processes."""
    read_bytes, ticks = 0, 0
    for process in _processes():
        with contextlib.suppress(OSError):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
            read_bytes += int((process / "io").read_text().partition("\nread_bytes: ")[2].split()[0])
    return read_bytes, ticks / os.sysconf("SC_CLK_TCK")


def _anonymous_bytes() -> int:
    """Of all these processes."""
    total = 0
    for process in _processes():
        with contextlib.suppress(OSError):
            lines = (process / "status").read_text().splitlines()
            total += next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")), 0)
    return total


# -------------------------------------------------------------------- Dovetail


def _open_join(work: Work, kind: str) -> LookUp:
    from dovetail.core.memory import Budget
    from dovetail.joins import AutoJoin, LookupJoin
    from dovetail.joins.calibration import host_costs
    from dovetail.joins.explaining import expect_read_costs
    from dovetail.joins.spec import JoinSpec

    relation = Relation.open(work.path)
    reader = relation.reader(["sk", "pay"])
    budget = Budget(max(64 << 20, relation.stats.bytes // 20))
    spec = JoinSpec(reader, _SCHEMA, (("k", "k"),), budget=budget)
    expect_read_costs(reader, host_costs())
    # As a task of `enrich` does, and as a shard of a flow does.
    join = LookupJoin(spec, sweeps=True) if kind == "lookup" else AutoJoin(spec)
    together = 1 << 20 if kind == "lookup" else 65_536

    def look_up(keys: Int64Array) -> tuple[float, int]:
        batch = pa.record_batch({"__code": keys, "k": keys, "v": keys}, schema=_SCHEMA)
        began = time.monotonic()
        found, rows = 0, 0
        for start in range(0, len(keys), together):
            for result in join.offer(batch.slice(start, together)):
                found, rows = found + _sum(result), rows + result.num_rows
        for result in join.drain():
            found, rows = found + _sum(result), rows + result.num_rows
        assert rows == len(keys)
        return time.monotonic() - began, found

    return look_up


def _sum(result: pa.RecordBatch) -> int:
    return int(result.column("sk").to_numpy().sum())


# -------------------------------------------------------------------- peers


def _open_duckdb(work: Work) -> LookUp:
    import duckdb

    connection = duckdb.connect()
    connection.execute(f"set threads = {_THREADS}")
    connection.execute(f"set memory_limit = '{work.limit_bytes * 6 // 10 >> 20}MB'")
    connection.execute("set preserve_insertion_order = false")
    query = f"select s.k, r.sk, r.pay from stream s join read_parquet('{work.path}/*.parquet') r on s.k = r.k"

    def look_up(keys: Int64Array) -> tuple[float, int]:
        connection.register("stream", pa.table({"k": keys}))
        began = time.monotonic()
        joined = connection.sql(query).to_arrow_table()
        taken = time.monotonic() - began
        assert joined.num_rows == len(keys)
        return taken, int(joined.column("sk").to_numpy().sum())

    return look_up


def _session(work: Work, share: float) -> Any:
    """Spark with so much of the limit for its heap."""
    from pyspark.sql import SparkSession

    settings = {
        "spark.driver.memory": f"{int(work.limit_bytes * share) >> 20}m",
        "spark.sql.shuffle.partitions": "8",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    return SparkSession.builder.master(f"local[{_THREADS}]").config(map=settings).getOrCreate()


def _joined_by(spark: Any, join: Callable[[Any], Any]) -> LookUp:
    def look_up(keys: Int64Array) -> tuple[float, int]:
        stream = spark.createDataFrame(pa.table({"k": keys})).repartition(_THREADS).cache()
        stream.count()
        began = time.monotonic()
        joined = join(stream).selectExpr("count(*)", "sum(sk)", "max(pay)").collect()[0]
        taken = time.monotonic() - began
        stream.unpersist()
        assert joined[0] == len(keys)
        return taken, int(joined[1])

    return look_up


def _open_spark(work: Work) -> LookUp:
    spark = _session(work, 0.6)
    relation = spark.read.parquet(work.path)
    return _joined_by(spark, lambda stream: stream.join(relation, "k"))


def _open_enrich(work: Work) -> LookUp:
    """What a user of `dovetail.enrich` gets by default; only the budget is given."""
    import dovetail as dt

    spark = _session(work, 0.25)
    relation = Relation.open(work.path)
    budget = relation.stats.bytes // 20
    return _joined_by(spark, lambda stream: dt.enrich(stream, relation, budget=budget))


def _by_key(get: Callable[[list[bytes]], list[bytes]]) -> LookUp:
    """Each distinct key once, on two threads, in the order of the store; only the store's calls are timed."""
    pool = ThreadPoolExecutor(_THREADS)

    def look_up(keys: Int64Array) -> tuple[float, int]:
        distinct, counts = np.unique(keys, return_counts=True)
        asked = [stored(key) for key in distinct.tolist()]
        parts = [asked[len(asked) * part // _THREADS : len(asked) * (part + 1) // _THREADS] for part in range(_THREADS)]
        began = time.monotonic()
        found = list(pool.map(get, parts))
        taken = time.monotonic() - began
        surrogates = np.array([int.from_bytes(value[:8], "big") for part in found for value in part])
        return taken, int((surrogates * counts).sum())

    return look_up


def _open_lmdb(work: Work) -> LookUp:
    import lmdb

    environment = lmdb.open(work.path, readonly=True, lock=False, readahead=False)

    def get(keys: list[bytes]) -> list[bytes]:
        with environment.begin() as transaction:
            return [value for _, value in transaction.cursor().getmulti(keys)]

    return _by_key(get)


def _open_rocksdb(work: Work) -> LookUp:
    from rocksdict import AccessType, Rdict

    options = rocksdb_options(work.limit_bytes * 3 // 10)
    database: Any = Rdict(work.path, options, access_type=AccessType.read_only())
    return _by_key(lambda keys: database.get(keys))


_OPENERS: dict[str, Callable[[Work], LookUp]] = {
    "lookup": lambda work: _open_join(work, "lookup"),
    "auto": lambda work: _open_join(work, "auto"),
    "enrich": _open_enrich,
    "duckdb": _open_duckdb,
    "lmdb": _open_lmdb,
    "rocksdb": _open_rocksdb,
    "spark": _open_spark,
}
DATA_OF = {
    "lookup": "relation",
    "auto": "relation",
    "enrich": "relation",
    "duckdb": "parquet",
    "lmdb": "lmdb",
    "rocksdb": "rocksdb",
    "spark": "parquet",
}


# -------------------------------------------------------------------- the device


def device_reads_per_s(
    directory: Path, depths: tuple[int, ...] = (1, 4, 16, 64), reads: int = 8_000
) -> dict[int, float]:
    """Random reads of 4 KiB per second past the page cache, by so many threads, from the largest file."""
    file = max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    pages = file.stat().st_size // 4096
    descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)
    rates = {}
    try:
        for depth in depths:
            buffers = [mmap.mmap(-1, 4096) for _ in range(depth)]
            count = max(200, reads * min(depth, 16) // 16)
            offsets = np.random.default_rng(depth).integers(0, pages, count) * 4096

            def read(part: int, buffers: list[mmap.mmap] = buffers, offsets: Int64Array = offsets) -> None:
                for offset in offsets[part :: len(buffers)].tolist():
                    os.preadv(descriptor, [buffers[part]], offset)

            with ThreadPoolExecutor(depth) as pool:
                began = time.monotonic()
                list(pool.map(read, range(depth)))
                rates[depth] = count / (time.monotonic() - began)
    finally:
        os.close(descriptor)
    return rates
