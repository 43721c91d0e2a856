"""A standalone cluster of two workers, each a process of its own: the same results, also when one of them is killed."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest

from dovetail.testing.faults import load_program
from dovetail.testing.flows import Feed, published_rows, unnamed_state_files, wait_until
from dovetail.testing.oracle import join_oracle
from dovetail.testing.rows import assert_same_rows

PROGRAM = Path(__file__).with_name("cluster_driver.py")


DRIVER = load_program(PROGRAM)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Cluster:
    """A master and its workers, every one in a session of its own so that it can be ended with all its children."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root, self._stack = root, stack
        self.master = f"spark://127.0.0.1:{free_port()}"
        self.workers: list[subprocess.Popen[bytes]] = []

    def start(self, workers: int) -> None:
        port = self.master.rpartition(":")[2]
        arguments = ["--host", "127.0.0.1", "--port", port, "--webui-port", "0"]
        self._daemon("master", "org.apache.spark.deploy.master.Master", *arguments)
        wait_until(
            lambda: "MasterWebUI" in self.log("master") or "I have been elected" in self.log("master"), "a master"
        )
        for number in range(workers):
            self.workers.append(
                self._daemon(
                    f"worker-{number}",
                    "org.apache.spark.deploy.worker.Worker",
                    *["--host", "127.0.0.1", "--webui-port", "0", "--cores", "1", "--memory", "768m"],
                    *["--work-dir", str(self.root / f"work-{number}"), self.master],
                )
            )
        for number in range(workers):
            wait_until(lambda: "Successfully registered" in self.log(f"worker-{number}"), "a worker to register")  # noqa: B023

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text(errors="replace")

    def kill_worker(self, number: int) -> None:
        """SIGKILL, for the worker and its executor."""
        os.killpg(self.workers[number].pid, signal.SIGKILL)
        assert self.workers[number].wait() == -signal.SIGKILL

    def _daemon(self, name: str, *arguments: str) -> "subprocess.Popen[bytes]":
        environment = os.environ | {
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "PYSPARK_PYTHON": sys.executable,
        }
        import pyspark

        program = Path(pyspark.__file__).parent / "bin" / "spark-class"
        return self._stack.enter_context(_running([str(program), *arguments], self.root / f"{name}.log", environment))

    @contextmanager
    def driver(self, root: Path) -> Iterator["Driver"]:
        environment = os.environ | {"SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
        # The workers' start is what takes time here, not what they compute.
        environment["NUMBA_DISABLE_JIT"] = "1"
        command = [sys.executable, str(PROGRAM), self.master, str(root)]
        with _running(command, root / "driver.log", environment, talks=True) as process:
            driver = Driver(process, root)
            assert driver.says() == "ready", driver.log()
            yield driver


class Driver:
    """An application on the cluster, told line by line what to run."""

    def __init__(self, process: "subprocess.Popen[bytes]", root: Path) -> None:
        self._process, self._root = process, root

    def start(self, what: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n".encode())
        self._process.stdin.flush()

    def says(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().strip()

    def finish(self) -> list[str]:
        """Everything it says until it is done."""
        said = []
        while (line := self.says()) != "done":
            assert line, self.log()
            said.append(line)
        return said

    def log(self) -> str:
        return (self._root / "driver.log").read_text(errors="replace")[-4000:]


@contextmanager
def _running(
    command: list[str], log: Path, environment: dict[str, str], talks: bool = False
) -> Iterator["subprocess.Popen[bytes]"]:
    with open(log, "ab") as file:
        pipe: int | IO[bytes] = subprocess.PIPE if talks else file
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=pipe,
            stderr=file,
            env=environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        # The session that was started here, and nothing else.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path_factory.mktemp("cluster"), stack)
        cluster.start(workers=2)
        yield cluster


def joined_once(feed: Feed) -> list[dict[str, object]]:
    return join_oracle(feed.rows(), DRIVER.CITY_OF, on=["k"], how="left")


def test_flow_whose_workers_do_not_share_its_directories_is_refused_before_anything_counts(
    cluster: Cluster, tmp_path: Path
) -> None:
    DRIVER.build(tmp_path)
    feed = Feed(tmp_path / "feed")
    feed.add(DRIVER.orders(0))
    with cluster.driver(tmp_path) as driver:
        driver.start("unshared")
        told = [json.loads(line) for line in driver.finish()]
    assert [case["case"] for case in told] == ["plain", "in place", "with state", "checkpoint", "foreach_batch"]
    for case in told:
        assert case["error"] == "StateError", case
        assert "must be directories that the driver and all workers mount" in case["text"], case
        assert "not committed" in case["text"] or "Nothing was committed" in case["text"], case
        assert case["commits"] == 0, case
    for out in tmp_path.glob("*-out"):
        assert published_rows(out) == []


def test_enrich_and_a_flow_give_the_same_rows_with_a_worker_killed_in_mid_stream(
    cluster: Cluster, tmp_path: Path
) -> None:
    """One application for all, because starting one is what takes time; the kill comes last."""
    DRIVER.build(tmp_path)
    feed = Feed(tmp_path / "feed")
    for number in range(3):
        feed.add(DRIVER.orders(number))
    with cluster.driver(tmp_path) as driver:
        driver.start("enrich")
        driver.finish()
        for strategy in ("auto", "mesh"):
            for kind in ("batch", "stream"):
                assert_same_rows(
                    published_rows(tmp_path / f"{kind}-{strategy}"), joined_once(feed), f"{kind} {strategy}"
                )
        driver.start("flow")
        driver.finish()
        twice = join_oracle(joined_once(feed), DRIVER.MAYOR_OF, on=["city"], how="left")
        assert_same_rows(published_rows(tmp_path / "out"), twice, "the flow")
        for number in range(3, 15):
            feed.add(DRIVER.orders(number))
        driver.start("flow")
        for _ in range(3):
            assert driver.says().startswith("batch"), driver.log()
        time.sleep(0.3)
        cluster.kill_worker(0)
        assert len(driver.finish()) > 0
    twice = join_oracle(joined_once(feed), DRIVER.MAYOR_OF, on=["city"], how="left")
    assert_same_rows(published_rows(tmp_path / "out"), twice, "the flow that lost a worker")
    assert unnamed_state_files(tmp_path / "checkpoint") == set()
