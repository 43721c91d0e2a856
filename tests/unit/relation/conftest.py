"""Shared by the relation's tests: a temporary directory of its own, and files that one can damage."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_verification_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What this host has already checked against digests is remembered per test, never from one test to another."""
    directory = tmp_path / "host-temp"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.fixture
def without_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that make many small versions: what must be durable is tested elsewhere."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


DataFiles = Callable[[Path, str], list[Path]]


@pytest.fixture
def data_files() -> DataFiles:
    """Give the data files of a relation with an ending such as "rows"."""
    return lambda root, ending: sorted(Path(root).glob(f"data/*/*.{ending}"))
