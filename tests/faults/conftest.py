"""A nursery of processes to kill, and the check that every fault test ends with."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from dovetail import Relation
from dovetail.core.faultpoints import FAULT_POINT_VARIABLE, FAULT_TRACE_VARIABLE
from dovetail.testing.faults import load_program
from dovetail.testing.rows import assert_same_rows

Row = dict[str, Any]
PROGRAM = Path(__file__).with_name("victims.py")


VICTIMS = load_program(PROGRAM)


class Child:
    """One forked process."""

    def __init__(self, nursery: "Nursery", pid: int, report: Path) -> None:
        self._nursery, self.pid, self._report = nursery, pid, report

    def kill(self) -> None:
        """SIGKILL; the process cannot have been waited for, so the number is still its own."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its exit code, or minus the signal that ended it."""
        return int(self._nursery.ask({"wait": self.pid})["code"])

    @property
    def report(self) -> str:
        """What it wrote about its failure."""
        return self._report.read_text() if self._report.exists() else ""


class Nursery:
    """The process that forks the others."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._count = directory, 0
        disarmed = {k: v for k, v in os.environ.items() if k not in (FAULT_POINT_VARIABLE, FAULT_TRACE_VARIABLE)}
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=disarmed
        )
        assert self._answer() == {"ready": True}

    def start(self, root: Path, operation: str, seed: int, **options: Any) -> Child:
        """Fork a process that does one piece of work."""
        self._count += 1
        report = self._directory / f"report-{self._count}"
        temp = self._directory / f"temp-{self._count}"
        temp.mkdir()
        request = {"root": str(root), "operation": operation, "seed": seed, "report": str(report), "temp": str(temp)}
        return Child(self, self.ask({**request, **options})["pid"], report)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        assert self._process.wait(timeout=60) == 0
        self._process.stdout.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the nursery died"
        return dict(json.loads(line))


class Tale:
    """A relation and what it must hold, version by version, while its writers die."""

    def __init__(self, root: Path, nursery: Nursery) -> None:
        self.root, self.nursery = root, nursery
        self.versions: dict[int, list[Row]] = {}

    def do(self, operation: str, seed: int, check: bool = True) -> float:
        """Let a child do a piece of work to its end; gives the seconds it took. A mere step needs no check."""
        started = time.monotonic()
        child = self.nursery.start(self.root, operation, seed)
        assert child.wait() == VICTIMS.DONE, child.report
        took = time.monotonic() - started
        self.learn(operation, seed, must_have_happened=True, check=check)
        return took

    def learn(self, operation: str, seed: int, must_have_happened: bool = False, check: bool = True) -> bool:
        """Find out whether a piece of work was committed, and check that the relation is whole either way."""
        newest = max(self.versions, default=0)
        found = Relation.open(self.root).version if self._has_versions() else 0
        assert newest <= found <= newest + 1
        happened = found == newest + 1
        if happened:
            self.versions[found] = VICTIMS.after(self.versions.get(newest, []), operation, seed)
        assert happened or not must_have_happened
        if check:
            self.check_whole()
        return happened

    def check_whole(self) -> None:
        """Every version that can be opened holds what it must; every digest is checked, none is trusted."""
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir=self.root.parent) as unmarked:
            patch.setattr(tempfile, "tempdir", unmarked)
            if not self._has_versions():
                assert not self.versions
                return
            newest = Relation.open(self.root)
            listed = [info.version for info in newest.versions()]
            assert listed[-1] == max(self.versions)
            for version in listed:
                relation = Relation.open(self.root, version=version)
                assert_same_rows(relation.to_arrow().to_pylist(), self.versions[version], f"version {version}")
                assert relation.stats.rows == len(self.versions[version])
                for number in range(relation.num_shards):
                    shard = relation.shard(number)
                    codes = np.unique(shard.codes_at(np.arange(shard.num_rows)))
                    assert shard.count(codes).sum() == shard.live_rows

    def check_vacuum_leaves_only_what_is_named(self, keep: int = 1) -> None:
        """Whatever killed writers left behind is gone, and nothing else."""
        Relation.open(self.root).vacuum(keep=keep)
        kept = sorted(self.versions)[-keep:]
        manifests = [Relation.open(self.root, version=version)._manifest for version in kept]
        named = {f"data/{name}" for manifest in manifests for name in manifest.data_files()}
        named |= {f"versions/{version:08d}.json" for version in kept} | {"RELATION", "writer.lock"}
        found = {str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()}
        assert found == named
        self.versions = {version: self.versions[version] for version in kept}
        self.check_whole()

    def _has_versions(self) -> bool:
        return any((self.root / "versions").glob("[0-9]*.json"))


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.close()


@pytest.fixture(scope="session")
def victims() -> ModuleType:
    return VICTIMS


@pytest.fixture
def tale(tmp_path: Path, nursery: Nursery) -> Tale:
    return Tale(tmp_path / "r", nursery)
