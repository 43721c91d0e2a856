"""A Spark driver or its workers killed while they write a relation: whatever outlives them damages nothing."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from dovetail.testing.faults import python_program

SEED = 8_675
WORKER_POINTS = ["relation.segment.batch", "relation.segment.rows_durable", "relation.segment.durable"]

DRIVER = """
import importlib.util, json, os, sys
from pyspark.sql import SparkSession
from dovetail import Relation
spec = importlib.util.spec_from_file_location("victims", sys.argv[1])
victims = importlib.util.module_from_spec(spec)
spec.loader.exec_module(victims)
spark = (
    SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").config("spark.log.level", "OFF")
    .config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1")
    .config("spark.ui.showConsoleProgress", "false").config("spark.sql.shuffle.partitions", "2")
    .config("spark.local.dir", sys.argv[2]).getOrCreate()
)
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    # Only the Python workers see this: the driver read its own environment when it started.
    spark.sparkContext.environment.update(request["worker_env"])
    df = spark.createDataFrame(victims.pa.Table.from_pylist(
        victims.rows_of(request["operation"], request["seed"]), schema=victims.SCHEMA))
    print("started", flush=True)
    try:
        if request["operation"] == "build":
            Relation.build(df, request["root"], on="k", shards=victims.SHARDS, mode="overwrite")
        else:
            getattr(Relation.open(request["root"]), request["operation"])(df)
        print("done", flush=True)
    except Exception as error:
        print("failed " + type(error).__name__, flush=True)
    for name in request["worker_env"]:
        del spark.sparkContext.environment[name]
"""


class Driver:
    """A Spark driver in a process of its own, told what to write line by line."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def start(self, root: Path, operation: str, seed: int, **worker_env: str) -> None:
        request = {"root": str(root), "operation": operation, "seed": seed, "worker_env": worker_env}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        assert self.says() == "started"

    def says(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        """The driver alone: its JVM and the workers of that are left to themselves."""
        self._process.kill()
        assert self._process.wait() == -signal.SIGKILL


@contextmanager
def spark_driver(victims: ModuleType, scratch: Path) -> Iterator[Driver]:
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    with open(scratch / "stderr", "ab") as log:
        process = subprocess.Popen(
            python_program(DRIVER, str(victims.__file__), str(scratch)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            driver = Driver(process)
            assert driver.says() == "ready", (scratch / "stderr").read_text()
            yield driver
        finally:
            # The session that was started here, and nothing else; the JVM of a killed driver may have ended by itself.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_killed_spark_workers_and_drivers_leave_the_last_version_whole(
    tale: Any, victims: ModuleType, tmp_path: Path, fault_rounds: int
) -> None:
    print("seed", SEED)
    chance = random.Random(SEED)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for round_number in range(max(1, fault_rounds // 10)):
        with spark_driver(victims, scratch) as driver:
            started = time.monotonic()
            operation = "build" if round_number == 0 else "upsert"
            driver.start(tale.root, operation, round_number)
            assert driver.says() == "done"
            tale.learn(operation, round_number, must_have_happened=True)
            took = time.monotonic() - started
            # A worker dies with its shard half written: the job fails, and the driver lives to write again.
            point = chance.choice(WORKER_POINTS)
            driver.start(tale.root, "upsert", 100 + round_number, DOVETAIL_FAULT_POINT=point)
            assert driver.says().startswith("failed"), point
            assert not tale.learn("upsert", 100 + round_number)
            # The driver dies at a random moment; its JVM and workers may go on for a while.
            driver.start(tale.root, "upsert", 300 + round_number)
            time.sleep(chance.random() * took / 2)
            driver.kill()
            tale.learn("upsert", 300 + round_number)
            # The lock died with the driver: the next writer does not wait for what is left of it.
            tale.do("upsert", 400 + round_number)
        tale.check_whole()
        tale.check_vacuum_leaves_only_what_is_named(keep=2)
