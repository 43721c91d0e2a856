"""Running the real command, and relations to run it on."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dovetail as dt

UNSET = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "CLICOLOR_FORCE", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
COMMAND = [sys.executable, "-m", "dovetail.cli.main"]


@dataclass(frozen=True)
class Finished:
    """A command that has run."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on standard output; fails if there is anything else."""
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        assert set(self.document) == {"error"}
        assert set(self.document["error"]) == {"class", "message", "hint"}
        return self.document["error"]


Run = Callable[..., Finished]


@pytest.fixture(scope="session")
def environment() -> Callable[..., dict[str, str]]:
    """The environment of a terminal that nobody has configured, with changes."""
    return plain_environment


@pytest.fixture(scope="session")
def customers() -> Callable[..., pa.Table]:
    """Rows of the relation that these tests use: from an id, how many, in which city."""
    return customer_rows


@pytest.fixture(scope="session")
def command() -> list[str]:
    """What starts the real command."""
    return COMMAND


def plain_environment(**changes: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in UNSET} | changes


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the command in a process of its own, in an empty directory."""

    def run_command(*arguments: object, **changes: str) -> Finished:
        finished = subprocess.run(
            [*COMMAND, *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env=plain_environment(**changes),
            stdin=subprocess.DEVNULL,
        )
        return Finished(finished.returncode, finished.stdout, finished.stderr)

    return run_command


@pytest.fixture
def run_here(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command in this process: the same code, without the second or so that a process takes to start."""
    from dovetail.cli.main import main

    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def run_command(*arguments: object) -> Finished:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Finished(code, out, err)

    return run_command


def customer_rows(first: int, count: int, city: str = "Rome") -> pa.Table:
    ids = list(range(first, first + count))
    return pa.table({"id": pa.array(ids, pa.int64()), "city": [city] * count, "tags": [["a", "b"]] * count})


@pytest.fixture
def relation(tmp_path: Path) -> dt.Relation:
    """A relation of 4 shards with three versions, made without Spark."""
    first = dt.Relation.build(customer_rows(0, 100), tmp_path / "customers", on="id", shards=4)
    return first.upsert(customer_rows(50, 100, "Oslo")).delete(pa.table({"id": [0, 1]}))
