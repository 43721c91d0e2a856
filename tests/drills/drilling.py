"""What the drills share: a flow over a feed, the targets that it may write to, and crashes in this process.

It is loaded by tests and by `other_driver.py`, which runs the same flow in a process of its own.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import dovetail as dt
from dovetail.core import faultpoints
from dovetail.testing.faults import load_program
from dovetail.testing.flows import Feed, published_rows, wait_until
from dovetail.testing.oracle import join_oracle

OTHER = Path(__file__).with_name("other_driver.py")
ROWS_PER_FILE = 10
CITY_OF = [{"k": key, "city": f"c{key % 7}"} for key in range(0, 40, 2)]
COLUMNS = "n bigint, k bigint, city text"

Row = dict[str, Any]


def orders(number: int) -> pa.Table:
    """The content of a file of the feed."""
    numbers = range(number * ROWS_PER_FILE, (number + 1) * ROWS_PER_FILE)
    return pa.table({"n": pa.array(numbers, pa.int64()), "k": pa.array([n * 7 % 40 for n in numbers], pa.int64())})


# ================================================================ targets


@dataclass
class ParquetTarget:
    """A directory of Parquet files."""

    path: Path
    is_fenced = True  # knows which micro-batches of which flow it has, and refuses older copies of a checkpoint

    def sink(self) -> Any:
        return dt.sinks.parquet(self.path)

    def rows(self) -> list[Row]:
        return published_rows(self.path)

    def empty(self) -> None:
        """What an operator does who wants to load again; the directory stays, as do hidden names in it."""
        for file in self.path.glob("*.parquet"):
            file.unlink()

    def described(self) -> dict[str, Any]:
        return {"kind": "parquet", "path": str(self.path)}


@dataclass
class PostgresTarget:
    """A table of a PostgreSQL database."""

    login: Mapping[str, Any]
    table: str
    is_fenced = True

    def sink(self) -> Any:
        return dt.sinks.postgres(self.table, **self.login)

    def rows(self) -> list[Row]:
        found = self.execute(f"SELECT k, n, city FROM {self.table}")
        return [{"k": k, "n": n, "city": city} for k, n, city in found]

    def create(self) -> None:
        self.execute(f"CREATE TABLE {self.table} ({COLUMNS})")

    def empty(self) -> None:
        self.execute(f"TRUNCATE {self.table}")

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        import psycopg

        login = {"dbname" if name == "database" else name: value for name, value in self.login.items()}
        with psycopg.connect(**login, autocommit=True) as connection:
            cursor = connection.execute(statement)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def described(self) -> dict[str, Any]:
        return {"kind": "postgres", "login": dict(self.login), "table": self.table}


@dataclass
class FunctionTarget:
    """What `foreach_batch` is documented to be exact with: a function that does nothing for a number it has done."""

    path: Path
    is_fenced = False  # the flow cannot look into it

    def sink(self) -> Any:
        return dt.sinks.foreach_batch(self.take)

    def take(self, df: Any, batch: int) -> None:
        self.path.mkdir(exist_ok=True)
        rows, done = df.toArrow(), self.path / f"{batch:08d}.parquet"
        with open(self.path / "calls", "a") as calls:
            calls.write(f"{batch} {' '.join(map(str, sorted(rows['n'].to_pylist())))}\n")
        if not done.exists():
            pq.write_table(rows, self.path / ".draft")
            os.rename(self.path / ".draft", done)

    def calls(self) -> list[str]:
        """A line per call: the batch and the rows' numbers."""
        return (self.path / "calls").read_text().splitlines()

    def rows(self) -> list[Row]:
        return published_rows(self.path)

    def empty(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def described(self) -> dict[str, Any]:
        return {"kind": "foreach_batch", "path": str(self.path)}


IDENTITY = ("flow_id", "batch", "attempt", "sequence")


@dataclass
class KafkaTarget:
    """A topic. Its rows are those that a reader has who leaves out records whose headers it has seen."""

    servers: str
    topic: str
    spark: Any = None
    is_fenced = False

    def sink(self) -> Any:
        return dt.sinks.kafka(self.servers, self.topic)

    def records(self) -> list[tuple[tuple[str, ...], Row]]:
        """Every record: what it is known by, and its row."""
        reader = self.spark.read.format("kafka").option("kafka.bootstrap.servers", self.servers)
        found = reader.option("subscribe", self.topic).option("includeHeaders", "true").load().collect()
        records = []
        for record in found:
            headers = {header["key"]: bytes(header["value"]).decode() for header in record["headers"]}
            row = json.loads(record["value"])
            shown = {"k": row["k"], "n": row["n"], "city": row.get("city")}
            records.append((tuple(headers[name] for name in IDENTITY), shown))
        return records

    def rows(self) -> list[Row]:
        return list(dict(self.records()).values())

    def described(self) -> dict[str, Any]:
        return {"kind": "kafka", "servers": self.servers, "topic": self.topic}


def target_of(described: Mapping[str, Any]) -> Any:
    """The target that ``described`` describes."""
    if described["kind"] == "postgres":
        return PostgresTarget(described["login"], described["table"])
    if described["kind"] == "kafka":
        return KafkaTarget(described["servers"], described["topic"])
    return IN_DIRECTORIES[described["kind"]](Path(described["path"]))


LAKE = load_program(Path(__file__).with_name("lake_targets.py"))
IN_DIRECTORIES: Mapping[str, Any] = {
    "parquet": ParquetTarget,
    "foreach_batch": FunctionTarget,
    "delta": LAKE.DeltaTarget,
    "iceberg": LAKE.IcebergTarget,
}


# ================================================================ the flow


def flow_on(spark: Any, root: Path) -> Any:
    """A join with state in two shards; one file of the feed is a micro-batch."""
    if not (root / "cities").exists():
        dt.Relation.build(pa.Table.from_pylist(CITY_OF), root / "cities", on="k", shards=2)
    source = spark.readStream.schema("n long, k long").option("maxFilesPerTrigger", 1).parquet(str(root / "feed"))
    return dt.stream(source, "drill").enrich(
        dt.Relation.open(root / "cities"), on="k", how="left", strategy="mesh", budget="400kB", max_delay="1 hour"
    )


@dataclass
class Drill:
    """A flow, its feed and its target, as an operator has them."""

    spark: Any
    root: Path
    target: Any
    feed: Feed = field(init=False)
    checkpoint: Path = field(init=False)

    def __post_init__(self) -> None:
        self.feed, self.checkpoint = Feed(self.root / "feed"), self.root / "checkpoint"

    def give(self, files: int = 1) -> None:
        """Add micro-batches to the feed."""
        for _ in range(files):
            self.feed.add(orders(len(self.feed.files())))

    def run(self, checkpoint: Path | None = None) -> None:
        """Take all there is, and end; raises what the flow ended with."""
        where = self.checkpoint if checkpoint is None else checkpoint
        query = flow_on(self.spark, self.root).write(
            self.target.sink(), checkpoint=where, trigger="available-now", keep_commits=3
        )
        query.awaitTermination()

    def run_elsewhere(self, checkpoint: Path) -> None:
        """Take all there is with a checkpoint and a target of their own."""
        Drill(self.spark, self.root, ParquetTarget(checkpoint.with_suffix(".out"))).run(checkpoint)

    def copy(self, name: str, of: Path | None = None) -> Path:
        """A copy of the checkpoint beside it."""
        where = self.root / name
        shutil.copytree(self.checkpoint if of is None else of, where)
        return where

    def expected(self) -> list[Row]:
        """What the target must have when everything given is through; computed without Dovetail."""
        return join_oracle(self.feed.rows(), CITY_OF, on=["k"], how="left")

    def repeated(self) -> list[int]:
        """Rows that the target has more than once."""
        return [n for n, times in Counter(row["n"] for row in self.target.rows()).items() if times > 1]


# ================================================================ crashes in this process


class Crashed(BaseException):
    """Raised at a fault point: nothing after it happens, as in a process that is killed."""


class _Hook:
    """Takes the place of what the environment arms."""

    def __init__(self, act: Callable[[str], None]) -> None:
        self.passed = act


@contextmanager
def fault_hook(act: Callable[[str], None]) -> Iterator[None]:
    """Call ``act`` with the name of every fault point that this process reaches."""
    before, faultpoints._ARMED = faultpoints._ARMED, _Hook(act)  # type: ignore[assignment]
    try:
        yield
    finally:
        faultpoints._ARMED = before


@contextmanager
def crash_at(point: str) -> Iterator[None]:
    """Let the flow of this process die at a fault point, the first time it is reached; fails if it never is."""
    died = False

    def act(name: str) -> None:
        nonlocal died
        # Nothing of a dead process goes on, whatever its error handling would like to do.
        if died or name == point:
            died = True
            raise Crashed(point)

    with fault_hook(act):
        try:
            yield
        except Crashed:
            return
    raise AssertionError(f"the flow did not reach {point}")


def lose_locks(checkpoint: Path) -> None:
    """Do what a file system without locks does: a second process gets a lock that the first one holds as well."""
    lock = checkpoint / "dovetail" / "runner.lock"
    held = os.open(lock, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass
    else:
        raise AssertionError(f"nobody holds {lock}: the drill would not show what it is for")
    finally:
        os.close(held)
    lock.unlink()


# ================================================================ a second driver


class OtherDriver:
    """A process with a Spark of its own; see `other_driver.py`."""

    def __init__(self, scratch: Path, jars: str = "") -> None:
        environment = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
        self._log, self._awake = scratch / "log", scratch / "awake"
        command = [sys.executable, str(OTHER), str(scratch), jars]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        assert self._line() == "ready"

    def start(self, drill: Drill, checkpoint: Path, suspend_at: str = "", kill_at: str = "") -> None:
        """Begin to run the flow of a drill."""
        self._awake.unlink(missing_ok=True)
        task = {
            "root": str(drill.root),
            "checkpoint": str(checkpoint),
            "target": drill.target.described(),
            "suspend_at": suspend_at,
            "kill_at": kill_at,
            "wake": str(self._awake),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task).encode() + b"\n")
        self._process.stdin.flush()

    def wait_until_suspended(self) -> None:
        """Wait until the process stands still."""
        assert self._line() == "suspended"
        stat = Path(f"/proc/{self._process.pid}/stat")
        wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", "the driver to stand still")

    def wake(self) -> None:
        """Let it go on: SIGCONT for the driver and its JVM."""
        self._awake.touch()
        os.killpg(self._process.pid, signal.SIGCONT)

    def end(self) -> dict[str, Any]:
        """Wait for the end of the run: its error, if there was one."""
        return dict(json.loads(self._line()))

    def wait_until_killed(self) -> None:
        """Wait until it has died as it was told to."""
        assert self._process.wait(300) == -signal.SIGKILL, self._log.read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """Kill it, with its JVM."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode().strip()
        assert line, self._log.read_text(errors="replace")[-3000:]
        return line
