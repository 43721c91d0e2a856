"""Feed a flow, wait for it, and inspect its files. Importing it does not need Spark.

>>> feed = Feed(tempfile.mkdtemp())
>>> feed.add(pa.table({"k": [1, 2]})).name
'000000.parquet'
>>> feed.rows()
[{'k': 1}, {'k': 2}]
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dovetail.spark.flow.store import FlowStore, files_of

__all__ = ["Feed", "commits_of", "published_rows", "state_bytes", "unnamed_state_files", "wait_until"]


class Feed:
    """A directory of Parquet files that a streaming file source reads in order."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)

    def files(self) -> list[Path]:
        """All files so far, in order."""
        return sorted(self.directory.glob("[0-9]*.parquet"))

    def add(self, table: pa.Table) -> Path:
        """Add a file atomically."""
        number = len(self.files())
        path = self.directory / f"{number:06d}.parquet"
        with tempfile.NamedTemporaryFile(dir=self.directory, prefix=".", suffix=".tmp", delete=False) as draft:
            pq.write_table(table, draft)
        os.rename(draft.name, path)
        # The source orders files by age; the order of two files with the same time is undefined.
        os.utime(path, (1_600_000_000 + number, 1_600_000_000 + number))
        return path

    def rows(self) -> list[dict[str, Any]]:
        return [row for file in self.files() for row in pq.read_table(file).to_pylist()]


def published_rows(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All rows visible to a reader of a Parquet sink."""
    files = sorted(path for path in Path(directory).glob("*.parquet") if path.name[0] not in "._")
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def commits_of(checkpoint: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Every commit in a checkpoint, oldest first."""
    directory = Path(checkpoint) / "dovetail" / "commits"
    return [json.loads(path.read_text()) for path in sorted(directory.glob("[0-9]*.json"))]


def unnamed_state_files(checkpoint: str | os.PathLike[str]) -> set[str]:
    """State files, drafts and staged output of committed micro-batches that no commit names: leftovers of a crash."""
    store = FlowStore(checkpoint)
    named = {file.name for commit in commits_of(checkpoint) for file in files_of(commit)}
    found = {str(path.relative_to(store.state_root)) for path in store.state_root.rglob("*") if path.is_file()}
    drafts = {path.name for name in ("intents", "commits") for path in (store.root / name).glob(".*")}
    return (found - named) | drafts


def state_bytes(checkpoint: str | os.PathLike[str]) -> tuple[int, int]:
    """Bytes of all files in the state directory, and of the tables named by the latest commit: the live state."""
    files = [path for path in FlowStore(checkpoint).state_root.rglob("*") if path.is_file()]
    commits = commits_of(checkpoint)
    live = sum(file.bytes for file in files_of(commits[-1])) if commits else 0
    return sum(path.stat().st_size for path in files), live


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
    """Wait until a condition is true; raise `AssertionError` that names it after the timeout."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up_at:
            raise AssertionError(f"Timed out after {timeout_s:g} s waiting for {what}.")
        time.sleep(0.02)
