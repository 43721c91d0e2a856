"""Runs a query on an engine in a process of its own, and compares its results with the oracle's before it is timed."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import duckdb

from nexmark_bench import data
from nexmark_bench.queries import Query
from nexmark_bench.usage import kill_tree

FLINK = "apache-flink==2.3.0"
# What the engines are called in the table, and whether Flink runs them.
ENGINES = {
    "dovetail": False,
    "spark": False,
    "spark-rocksdb": False,
    "flink": True,
    "flink-multi": True,
    "flink-rocksdb": True,
}
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Setting:
    """What is the same for every engine of a run."""

    events: Path  # the directory with ``all`` and ``prefix``
    directory: Path  # of side inputs
    flink_python: Path | None
    heap: str = "4g"
    files_per_batch: int = 4
    checkpoint_ms: int = 3_000  # Flink's; the others write a checkpoint in every micro-batch
    side_rows: dict[str, int] = field(default_factory=lambda: {"q13": 10_000, "q13-large": 20_000_000})
    most_seconds: float = 300.0


def replace_events(setting: Setting, events: Path) -> Setting:
    """The same with another data set."""
    return replace(setting, events=events)


class FailedRunError(Exception):
    """An engine that did not come to its end."""


def flink_python(given: Path | None) -> Path:
    """An interpreter that has PyFlink: the one given, or that of an environment made once in ``build/flink``."""
    if given is not None:
        return given
    directory = data.ROOT / "build" / "flink"
    python = directory / "bin" / "python"
    if not (directory / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", FLINK], check=True)
        (directory / "ready").touch()
    return python


@contextmanager
def running(
    setting: Setting, query: Query, engine: str, mode: str, directory: Path, **more: Any
) -> Iterator[subprocess.Popen[str]]:
    """The process of an engine; what it started is gone afterwards."""
    is_flink = ENGINES[engine]
    rows = setting.side_rows.get(query.name, 0)
    job = {
        "query": query.name,
        "engine": engine,
        "mode": mode,
        "events": str(setting.events.resolve()),
        "schemas": {kind: {name: str(each) for name, each in of.items()} for kind, of in data.SCHEMAS.items()},
        "heap": setting.heap,
        "scratch": str(directory / "scratch"),
        "checkpoint": str(directory / "checkpoint"),
        "output": str(directory / "rows"),
        "files_per_batch": setting.files_per_batch,
        "checkpoint_ms": setting.checkpoint_ms,
        "state_backend": "rocksdb" if engine == "flink-rocksdb" else "hashmap",
        "is_multi": engine == "flink-multi",
        "jars": [str(data.JARS / "flink-sql-parquet-2.3.0.jar")],
        "large_rows": setting.side_rows["q13-large"],
        "side": str(data.make_side_input(setting.directory, rows).resolve()) if query.side else "",
        "relation": str((setting.directory / f"relation-{rows}").resolve()),
        **more,
    }
    path = directory / "job.json"
    path.write_text(json.dumps(job))
    environment = {**os.environ, "PYTHONPATH": ""}
    if is_flink:
        environment |= {"HADOOP_CLASSPATH": _hadoop(), "JAVA_TOOL_OPTIONS": f"-Xmx{setting.heap}"}
        command = [str(flink_python(setting.flink_python)), str(_HERE / "on_flink.py"), str(path)]
    else:
        command = [sys.executable, str(_HERE / "on_spark.py"), str(path)]
    with (directory / f"{mode}.log").open("a") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
        try:
            yield process
        finally:
            kill_tree(process.pid)
            process.wait()


def measure_rate(setting: Setting, query: Query, engine: str) -> dict[str, Any]:
    """Compare an engine's results on the first slices, then time it over all."""
    with tempfile.TemporaryDirectory(prefix="nexmark-") as scratch:
        directory = Path(scratch)
        with running(setting, query, engine, "rate", directory) as process, _limit(process, setting.most_seconds):
            answers = _answers(process)
            _next(answers, directory)
            compared = compare(setting, query, directory / "rows")
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            largest = _Largest(directory / "checkpoint")
            with largest if ENGINES[engine] and query.is_stateful else _nothing():
                told = _next(answers, directory)
            if ENGINES[engine]:
                told["state_bytes"] = largest.bytes
        rows = data.rows_of(setting.events, "all")
        events = sum(sum(rows[kind]) for kind in query.inputs)
        return {
            "query": query.name,
            "engine": engine,
            "events": events,
            "compared_rows": compared,
            **told,
            "events_per_s_core": events / told["seconds"] / (os.cpu_count() or 1),
            "events_per_cpu_s": events / told["cpu_seconds"],
            "load": os.getloadavg()[0],
        }


def compare(setting: Setting, query: Query, rows: Path) -> int:
    """The number of results on the first slices, which must be the oracle's, row by row."""
    names = [column.split()[0].strip("`") for column in query.columns.split(", ")]
    with duckdb.connect() as oracle:
        for kind in query.inputs:
            inputs = setting.events / "prefix" / kind / "*.parquet"
            oracle.execute(f"CREATE VIEW {kind} AS SELECT * FROM read_parquet('{inputs}')")
        if query.side:
            side = data.make_side_input(setting.directory, setting.side_rows[query.name])
            oracle.execute(f"CREATE VIEW side AS SELECT * FROM read_parquet('{side}/*.parquet')")
        listed = ", ".join(f'"{name}"' for name in names)
        oracle.execute(f"CREATE TABLE expected AS SELECT {listed} FROM ({query.sql})")
        # Flink's files have no suffix; names that begin so are logs of sinks, and checksums.
        parts = [path for path in rows.rglob("*") if path.is_file() and not is_hidden(path.relative_to(rows))]
        files = [str(path) for path in parts]
        if not files:
            raise SystemExit(f"{query.name}: the engine wrote no results.")
        oracle.execute(f"CREATE TABLE found AS SELECT {listed} FROM read_parquet({files})")
        count = _one(oracle, "SELECT count(*) FROM expected")
        found = _one(oracle, "SELECT count(*) FROM found")
        missing = _one(oracle, "SELECT count(*) FROM (FROM expected EXCEPT ALL FROM found)")
        surplus = _one(oracle, "SELECT count(*) FROM (FROM found EXCEPT ALL FROM expected)")
    if missing or surplus or not count:
        raise FailedRunError(f"other results: {found:,} of {count:,}, {missing:,} missing, {surplus:,} too many")
    return count


def is_hidden(path: Path) -> bool:
    return any(part.startswith(("_", ".")) for part in path.parts)


def _one(oracle: duckdb.DuckDBPyConnection, sql: str) -> int:
    row = oracle.execute(sql).fetchone()
    assert row is not None
    return int(row[0])


def _answers(process: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)


def _next(answers: Iterator[dict[str, Any]], directory: Path) -> dict[str, Any]:
    answer = next(answers, None)
    if answer is None:
        raise FailedRunError(reason_in((directory / "rate.log").read_text(errors="replace")))
    return answer


def reason_in(log: str) -> str:
    """The last line of a log that names an error."""
    lines = [line.strip() for line in log.splitlines() if "Error" in line or "Exception" in line]
    causes = [line for line in lines if line.startswith("Caused by")]
    return (causes or lines or ["killed: it took too long, or more memory than there is"])[-1][:300]


@contextmanager
def _limit(process: "subprocess.Popen[str]", seconds: float) -> Iterator[None]:
    """End the process when it takes longer than that."""
    timer = threading.Timer(seconds, kill_tree, [process.pid])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class _Largest:
    """The bytes of the largest of Flink's checkpoints, which it removes when a job ends."""

    def __init__(self, directory: Path) -> None:
        self.bytes = 0
        self._directory = directory
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.3):
            try:
                self.bytes = max(self.bytes, self._now())
            except FileNotFoundError:
                continue  # removed while it was read: there is a newer one

    def _now(self) -> int:
        total = 0
        for metadata in self._directory.rglob("_metadata"):
            # Files of the job are shared by incremental checkpoints, so they are counted with each.
            job = metadata.parent.parent
            parts = [*metadata.parent.iterdir(), *(job / "shared").glob("*"), *(job / "taskowned").glob("*")]
            total = max(total, sum(path.stat().st_size for path in parts))
        return total


def _hadoop() -> str:
    """Hadoop's classes, which Flink's Parquet format needs and does not bring: Spark has them."""
    import pyspark

    return ":".join(str(path) for path in (Path(pyspark.__file__).parent / "jars").glob("hadoop-client-*.jar"))
