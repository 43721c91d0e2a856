"""The alternatives to Dovetail: each batch of the stream joined with the whole relation, by current engines.

All are measured in CPU seconds, including those of a JVM: this excludes the number of threads and other load on the
machine. The relation is a Parquet file in the page cache, read again for every batch.

Flink does not join batches: it loads the relation once, keeps all of it in its heap, and joins a stream of uniform keys
with it. The cost of loading is excluded by taking the difference of a long and a short stream. It needs a separate
interpreter, because PyFlink requires older packages: ``DOVETAIL_FLINK_PYTHON`` names it.
"""

import os
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dovetail.core.errors import InternalError
from dovetail.core.memory import Budget
from dovetail.joins import OPERATORS, join_spec
from dovetail_lab.measure import consume
from dovetail_lab.subjects import Stream, Subject

__all__ = ["peer_rates"]

_WARM, _MEASURED = 1, 3
_TICKS = os.sysconf("SC_CLK_TCK")
_PIPE = subprocess.PIPE
_FLINK_PYTHON = "DOVETAIL_FLINK_PYTHON"
_FLINK_TUPLES = (500_000, 2_500_000)
_FLINK_HEAP = {"JAVA_TOOL_OPTIONS": "-Xmx10g"}


def peer_rates(
    subject: Subject, stream: Callable[[], Stream], batch_rows: int, budget: Budget, directory: Path, with_spark: bool
) -> dict[str, list[float]]:
    """Tuples per CPU second of each engine, one per repeat; engines that are not installed are left out."""
    parquet = _parquet_of(subject, directory)
    source = stream()
    tuples = pa.Table.from_batches([source.next(batch_rows)]).drop_columns(["__code"])
    rates = {f"Dovetail, auto, {budget.total_bytes / 1e6:.0f} MB": _dovetail(subject, stream, batch_rows, budget)}
    for name, make in (("DuckDB", _duckdb), ("Polars", _polars)):
        try:
            join = make(parquet, tuples)
        except ImportError:
            continue
        rates[name] = [batch_rows / seconds for seconds in _timed(join, time.process_time)]
    if with_spark:
        rates |= {name: [batch_rows / s for s in seconds] for name, seconds in _spark(parquet, tuples).items()}
        if _FLINK_PYTHON in os.environ:
            # Once: it takes minutes, mostly to load the relation twice.
            rates["Flink, all of R in its heap"] = [_flink(subject.rows)]
    return rates


def _parquet_of(subject: Subject, directory: Path) -> Path:
    path = directory / f"peers-{subject.rows}.parquet"
    if not path.exists():
        draft = path.with_suffix(f".{os.getpid()}")
        columns = [*subject.relation.key, *subject.columns]
        shard = subject.relation.shard(0, columns=columns)
        with pq.ParquetWriter(draft, shard.schema, compression="none", use_dictionary=False) as writer:
            for block in shard.blocks(1 << 20):
                writer.write_batch(block.rows)
        draft.replace(path)
    return path


def _timed(join: Callable[[], int], clock: Callable[[], float]) -> list[float]:
    taken = []
    for _ in range(_WARM + _MEASURED):
        began = clock()
        join()
        taken.append(clock() - began)
    return taken[_WARM:]


def _dovetail(subject: Subject, stream: Callable[[], Stream], batch_rows: int, budget: Budget) -> list[float]:
    """The operator with a warm cache, each batch drained: complete when it ends, like the others."""
    spec = join_spec(subject.relation, subject.stream_schema, budget=budget, select=subject.columns, io="map")
    operator, source = OPERATORS["auto"](spec), stream()
    rates = []
    for _ in range(12):
        batch = source.next(batch_rows)
        began = time.process_time()
        consume(operator.offer(batch))
        consume(operator.drain())
        rates.append(batch_rows / (time.process_time() - began))
    return rates[-_MEASURED:]


def _duckdb(parquet: Path, tuples: pa.Table) -> Callable[[], int]:
    import duckdb

    connection = duckdb.connect()
    connection.execute("set threads = 2")
    connection.register("stream", tuples)
    query = f"select s.k, s.v, s.q, r.sk, r.pay from stream s join read_parquet('{parquet}') r on s.k = r.k"

    def join() -> int:
        rows: int = connection.sql(query).to_arrow_table().num_rows
        return rows

    return join


def _polars(parquet: Path, tuples: pa.Table) -> Callable[[], int]:
    import polars

    stream = polars.from_arrow(tuples).lazy()

    def join() -> int:
        joined = stream.join(polars.scan_parquet(parquet), on="k", how="inner").collect()
        return len(joined)

    return join


def _spark(parquet: Path, tuples: pa.Table) -> dict[str, list[float]]:
    """Spark's own joins: sort-merge, and with the relation broadcast."""
    from pyspark.sql import functions

    from dovetail.cli.session import spark_session

    taken = {}
    with spark_session("local[2]", {"spark.driver.memory": "4g", "spark.sql.shuffle.partitions": "2"}) as spark:
        process = getattr(spark.sparkContext._gateway, "proc", None)
        if process is None:
            raise InternalError("The JVM that Spark runs in was not started by this process.")
        stream, table = spark.createDataFrame(tuples), spark.read.parquet(str(parquet))
        joins = {"Spark, sort-merge": table.hint("merge"), "Spark, broadcast": functions.broadcast(table)}
        for name, other in joins.items():
            joined = stream.join(other, "k")

            def run(joined: Any = joined) -> int:
                joined.write.format("noop").mode("overwrite").save()
                return 0

            taken[name] = _timed(run, partial(_cpu_seconds, process.pid))
    return taken


def _flink(rows: int) -> float:
    """Tuples per CPU second of a regular join, without the time to load the relation."""
    seconds, environment = [], {**os.environ, **_FLINK_HEAP}
    for tuples in _FLINK_TUPLES:
        program = str(Path(__file__).with_name("flink_join.py"))
        command = [os.environ[_FLINK_PYTHON], program, str(rows), str(tuples)]
        with subprocess.Popen(command, stdin=_PIPE, stdout=_PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            assert process.stdin is not None
            is_ready = any(line.strip() == "ready" for line in iter(process.stdout.readline, ""))
            seconds.append(_cpu_seconds(process.pid))
            process.stdin.close()
        if not is_ready:
            raise InternalError(f"{' '.join(command)} ended with {process.returncode}; see its output.")
    return (_FLINK_TUPLES[1] - _FLINK_TUPLES[0]) / (seconds[1] - seconds[0])


def _cpu_seconds(process: int) -> float:
    """CPU time of a process and of its children, ended and running."""
    total, parents = 0.0, {process}
    processes = sorted(int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())
    for number in processes:
        try:
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(") ")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if number in parents or int(fields[1]) in parents:
            parents.add(number)
            total += sum(int(field) for field in fields[11:15]) / _TICKS
    return total
