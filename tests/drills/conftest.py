"""Targets to write to, and the second driver."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark.sql import SparkSession

from dovetail.testing.faults import load_program

DRILLING = load_program(Path(__file__).with_name("drilling.py"))
postgres = load_program(Path(__file__).parents[1] / "services" / "servers.py").postgres


@pytest.fixture(scope="session")
def drilling() -> ModuleType:
    return DRILLING


@pytest.fixture(scope="session")
def drill_rounds() -> int:
    """How often long drills are repeated: once in CI, more with ``make test-drills``."""
    return int(os.environ.get("DOVETAIL_DRILL_ROUNDS", "1"))


@pytest.fixture
def drill(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Any:
    """A drill with the target that the test's parameter names; see `targets`."""
    kind = request.param
    if kind == "postgres":
        server = request.getfixturevalue("postgres")
        login = {name: value for name, value in server.login().items() if name != "dbname"}
        target = DRILLING.PostgresTarget({**login, "database": "postgres"}, f"t_{tmp_path.name.lower()}")
        target.create()
    else:
        target = DRILLING.IN_DIRECTORIES[kind](tmp_path / "out")
    return DRILLING.Drill(spark, tmp_path, target)


@pytest.fixture(scope="session")
def other_driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    other = DRILLING.OtherDriver(tmp_path_factory.mktemp("other"))
    yield other
    other.close()


@pytest.fixture
def doomed_driver(tmp_path: Path) -> Iterator[Any]:
    """A driver for one test, which will not survive it."""
    (tmp_path / "doomed").mkdir()
    doomed = DRILLING.OtherDriver(tmp_path / "doomed")
    yield doomed
    doomed.close()
