"""Flows whose workers die, whose shuffle files vanish, whose disk is full, that are stopped in mid-job."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

from dovetail import Relation
from dovetail.core.errors import StateError
from dovetail.spark import sinks
from dovetail.spark.flow.query import FlowQuery
from dovetail.spark.steps.stream import Flow, stream
from dovetail.testing.flows import Feed, published_rows, unnamed_state_files, wait_until
from dovetail.testing.oracle import join_oracle
from dovetail.testing.rows import assert_same_rows

SEED = 77_003
KEYS, ROWS_PER_FILE = 600, 100
CITIES = [{"k": key, "city": f"c{key % 11}"} for key in range(0, KEYS, 2)]
MAYORS = [{"city": f"c{number}", "mayor": f"m{number}"} for number in range(8)]


class Town:
    """A feed, two relations, and a flow that joins the first with the others, one after the other."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark, self.root = spark, root
        self.feed = Feed(root / "feed")
        self.cities = Relation.build(pa.Table.from_pylist(CITIES), root / "cities", on="k", shards=5)
        # More shards than task slots, in both: a shuffle file that vanishes in mid-job must still have readers to come.
        self.mayors = Relation.build(pa.Table.from_pylist(MAYORS), root / "mayors", on="city", shards=5)
        self.checkpoint, self.target = root / "checkpoint", root / "out"

    def add(self, files: int) -> None:
        for _ in range(files):
            first = ROWS_PER_FILE * len(self.feed.files())
            numbers = list(range(first, first + ROWS_PER_FILE))
            self.feed.add(pa.table({"n": numbers, "k": [n * 37 % KEYS for n in numbers]}))

    def flow(self, before: Any = None, between: Any = None, after: Any = None, in_place: bool = False) -> Flow:
        reader = self.spark.readStream.schema("n long, k long").option("maxFilesPerTrigger", 1)
        flow = stream(reader.parquet(str(self.feed.directory)), "town")
        flow = flow if before is None else flow.transform(before)
        options = {"how": "left", "strategy": "mesh", "budget": "600kB", "max_delay": "1 hour"}
        flow = flow.enrich(self.cities, on="k", **({"how": "left"} if in_place else options))
        flow = flow if between is None else flow.transform(between)
        flow = flow.enrich(self.mayors, on="city", **options)
        return flow if after is None else flow.transform(after)

    def start(self, flow: Flow, trigger: str | None = None) -> FlowQuery:
        return flow.write(sinks.parquet(self.target), checkpoint=self.checkpoint, trigger=trigger)

    def finish(self, flow: Flow) -> None:
        """Let the flow come to its end, and compare."""
        query = self.start(flow, "available-now")
        query.awaitTermination()
        assert query.progress.pending == 0
        first = join_oracle(self.feed.rows(), CITIES, on=["k"], how="left")
        oracle = join_oracle(first, MAYORS, on=["city"], how="left")
        assert_same_rows(published_rows(self.target), oracle, "the flow's rows")
        assert unnamed_state_files(self.checkpoint) == set()


@pytest.fixture
def town(spark: SparkSession, tmp_path: Path) -> Town:
    return Town(spark, tmp_path)


def taken(query: FlowQuery) -> int:
    return 0 if query.progress is None else query.progress.operators[0].totals.stream_tuples_in


class Slow:
    """Lets every task of a stage take a while and say that it runs."""

    def __init__(self, seconds: float, sign: Path) -> None:
        self.seconds, self.sign = seconds, sign

    def __call__(self, df: DataFrame) -> DataFrame:
        return df.mapInArrow(self._wait, df.schema)

    def _wait(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        self.sign.touch()
        time.sleep(self.seconds)
        yield from batches


# ==================================================================== stopped


def test_flow_stopped_in_mid_job_ends_cleanly_and_goes_on(town: Town, fault_rounds: int) -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    sign = town.root / "running"
    flow = town.flow(after=Slow(0.3, sign))
    for _ in range(3 if fault_rounds < 10 else 20):
        town.add(1)
        sign.unlink(missing_ok=True)
        query = town.start(flow)
        wait_until(sign.exists, "a task to run")
        time.sleep(0.3 * chance.random())
        query.stop()
        assert not query.isActive
        assert query.exception() is None
    town.finish(flow)


# ==================================================================== killed workers


def python_workers() -> list[int]:
    """The Python workers of this process's Spark: grandchildren of its JVM, the daemon being the child between."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    jvms = [child for child in parents.get(os.getpid(), []) if b"java" in _command(child)]
    daemons = [d for jvm in jvms for d in parents.get(jvm, []) if b"pyspark.daemon" in _command(d)]
    return [worker for daemon in daemons for worker in parents.get(daemon, [])]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def test_flow_whose_workers_are_killed_loses_and_repeats_nothing(town: Town, fault_rounds: int) -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    sign = town.root / "running"
    flow = town.flow(between=Slow(0.6, sign))
    failed = 0
    for _ in range(2 if fault_rounds < 10 else fault_rounds // 2):
        town.add(1)
        sign.unlink(missing_ok=True)
        query = town.start(flow, "available-now")
        wait_until(sign.exists, "a task to run")
        time.sleep(0.3 * chance.random())
        for worker in python_workers():
            os.kill(worker, signal.SIGKILL)
        try:
            query.awaitTermination()
        except Exception as error:  # noqa: BLE001 -- Spark's own, of many kinds
            print(str(error)[:200])
            failed += 1
    assert failed > 0
    town.finish(flow)


# ==================================================================== lost shuffle files


class Saboteur:
    """Deletes Spark's shuffle files once, from inside a task."""

    def __init__(self, local: Path, done: Path) -> None:
        self.local, self.done = local, done

    def __call__(self, df: DataFrame) -> DataFrame:
        return df.mapInArrow(self._delete, df.schema)

    def _delete(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = list(batches)
        try:
            self.done.touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            for file in self.local.rglob("shuffle_*"):
                file.unlink(missing_ok=True)
        yield from rows


class Witness:
    """Writes down which task of which micro-batch ran."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def __call__(self, df: DataFrame) -> DataFrame:
        return df.mapInArrow(self._note, df.schema)

    def _note(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        with open(self.notes, "a") as notes:
            notes.write(f"{context.getLocalProperty('streaming.sql.batchId')}.{context.partitionId()}\n")
        yield from batches


def test_tasks_in_place_that_run_again_are_counted_once(town: Town) -> None:
    local = Path(town.spark.conf.get("spark.local.dir"))
    done, witness = town.root / "deleted", Witness(town.root / "notes")
    town.add(2)
    flow = town.flow(before=witness, after=Saboteur(local, done), in_place=True)
    query = town.start(flow)
    wait_until(lambda: taken(query) >= 2 * ROWS_PER_FILE or not query.isActive, "the files to be read")
    query.stop()
    assert done.exists()
    assert max(Counter(witness.notes.read_text().split()).values()) > 1, "no task was run again"
    assert taken(query) == 2 * ROWS_PER_FILE
    totals = query.progress.operators[0].totals
    assert (totals.matched_tuples, totals.unmatched_tuples) == (ROWS_PER_FILE, ROWS_PER_FILE)
    town.finish(flow)


@pytest.mark.parametrize("place", ["between", "after"])
def test_shuffle_files_deleted_in_mid_job_lose_and_repeat_nothing(town: Town, place: str) -> None:
    local = Path(town.spark.conf.get("spark.local.dir"))
    done = town.root / "deleted"
    town.add(2)
    witness = Witness(town.root / "notes")
    stages = {"before": witness, "between": Saboteur(local, done)} if place == "between" else {}
    flow = town.flow(**stages) if stages else town.flow(between=witness, after=Saboteur(local, done))
    query = town.start(flow)
    wait_until(lambda: taken(query) == 2 * ROWS_PER_FILE or not query.isActive, "the files to be read")
    query.stop()
    assert done.exists()
    runs = Counter(witness.notes.read_text().split())
    assert max(runs.values()) > 1, "no task was run again: nothing was lost in time"
    town.add(1)
    town.finish(flow)


# ==================================================================== full disks


@pytest.fixture
def state_that_cannot_grow(town: Town) -> Iterator[Path]:
    """Where state goes: a small disk of its own if one can be mounted, else a directory that may be closed."""
    place = town.checkpoint / "dovetail" / "state"
    place.mkdir(parents=True)
    mounting = ["mount", "-t", "tmpfs", "-o", "size=256k", "dovetail-test", str(place)]
    is_mounted = shutil.which("mount") is not None and not subprocess.run(mounting, check=False).returncode
    yield place
    if is_mounted:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_full_disk_is_a_clear_error_and_the_flow_goes_on_when_there_is_room(
    town: Town, state_that_cannot_grow: Path
) -> None:
    flow = town.flow()
    town.add(1)
    query = town.start(flow)
    wait_until(lambda: taken(query) == ROWS_PER_FILE, "the first file")
    assert query.progress.pending > 0
    query.stop()
    shards = [place for place in state_that_cannot_grow.glob("*/*") if place.is_dir()]
    ballast = state_that_cannot_grow / "ballast"
    if os.path.ismount(state_that_cannot_grow):
        with open(ballast, "wb", buffering=0) as file:
            while _wrote(file, 4096) or _wrote(file, 1):
                pass
    else:
        for place in shards:
            place.chmod(0o500)
    town.add(1)
    query = town.start(flow)
    with pytest.raises(StateError, match=r"state cannot be written to .*: .*\. Nothing was lost\. "):
        query.awaitTermination()
    ballast.unlink(missing_ok=True)
    for place in shards:
        place.chmod(0o755)
    town.finish(flow)


def _wrote(file: Any, count: int) -> bool:
    try:
        file.write(b"\1" * count)
    except OSError:
        return False
    return True
