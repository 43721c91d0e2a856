"""The services, the Spark session that has their connectors, and drivers to kill."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from dovetail.testing.faults import load_program, run_driver
from dovetail.testing.sessions import SHORT_LIVED, local_session

_SERVERS = load_program(Path(__file__).with_name("servers.py"))
postgres, kafka, connector_jars = _SERVERS.postgres, _SERVERS.kafka, _SERVERS.connector_jars
certificates = _SERVERS.certificates


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, connector_jars: list[str]) -> Iterator[SparkSession]:
    """The session of this suite, which has the connectors."""
    scratch = tmp_path_factory.mktemp("spark")
    session = local_session(
        scratch, {**SHORT_LIVED, "spark.jars": ",".join(connector_jars), "spark.log.level": "ERROR"}
    )
    yield session
    session.stop()


@dataclass
class Driver:
    """A program with a flow in it, killed where or when a test says."""

    program: Path
    arguments: list[str]
    log: Path
    begin: int = 0

    def run(
        self,
        point: str | None = None,
        kill_after_s: float | None = None,
        while_running: Callable[[], None] | None = None,
    ) -> int:
        """See `run_driver`."""
        self.begin = self.log.stat().st_size if self.log.exists() else 0
        command = [sys.executable, str(self.program), *self.arguments]
        return run_driver(command, self.log, point, kill_after_s, while_running)

    def said(self) -> str:
        """The end of what it has printed in its last run."""
        return self._printed()[-3000:]

    def wait_until_started(self) -> None:
        """Wait until its flow runs."""
        give_up_at = time.monotonic() + 300
        while "started" not in self._printed():
            assert time.monotonic() < give_up_at, f"the flow does not start: {self.said()}"
            time.sleep(0.05)

    def _printed(self) -> str:
        return self.log.read_bytes()[self.begin :].decode(errors="replace")


@pytest.fixture(scope="session")
def make_driver() -> type[Driver]:
    return Driver


@pytest.fixture(scope="session")
def service_kills() -> int:
    """How often the end-to-end test kills its driver: few in CI, as often as ``DOVETAIL_FAULT_ROUNDS`` says."""
    return int(os.environ.get("DOVETAIL_FAULT_ROUNDS", "3"))
