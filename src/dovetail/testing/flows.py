"""Feed a flow, wait for it, and look at what it left on disk. No Spark is needed to import it.

Examples
--------
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

from dovetail.state.store import FlowStore, files_of

__all__ = ["Feed", "commits_of", "published_rows", "state_bytes", "unnamed_state_files", "wait_until"]


class Feed:
    """A directory of Parquet files that a streaming file source reads, one after the other.

    Examples
    --------
    >>> feed = Feed(tempfile.mkdtemp())
    >>> [feed.add(pa.table({"k": [number]})).name for number in range(2)]
    ['000000.parquet', '000001.parquet']
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)

    def files(self) -> list[Path]:
        """All files so far, in order."""
        return sorted(self.directory.glob("[0-9]*.parquet"))

    def add(self, table: pa.Table) -> Path:
        """Add a file, whole or not at all."""
        number = len(self.files())
        path = self.directory / f"{number:06d}.parquet"
        with tempfile.NamedTemporaryFile(dir=self.directory, prefix=".", suffix=".tmp", delete=False) as draft:
            pq.write_table(table, draft)
        os.rename(draft.name, path)
        # The source takes files by their age; two of the same moment would come in any order.
        os.utime(path, (1_600_000_000 + number, 1_600_000_000 + number))
        return path

    def rows(self) -> list[dict[str, Any]]:
        """All rows so far."""
        return [row for file in self.files() for row in pq.read_table(file).to_pylist()]


def published_rows(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All rows that a reader of a Parquet sink sees.

    Examples
    --------
    >>> published_rows(Feed(tempfile.mkdtemp()).directory)
    []
    """
    files = sorted(path for path in Path(directory).glob("*.parquet") if path.name[0] not in "._")
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def commits_of(checkpoint: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Every commit that a checkpoint still has, the oldest first.

    Examples
    --------
    >>> commits_of(tempfile.mkdtemp())
    []
    """
    directory = Path(checkpoint) / "dovetail" / "commits"
    return [json.loads(path.read_text()) for path in sorted(directory.glob("[0-9]*.json"))]


def unnamed_state_files(checkpoint: str | os.PathLike[str]) -> set[str]:
    """State files, drafts and staged output of committed micro-batches that no commit names: what a crash left.

    Examples
    --------
    >>> unnamed_state_files(tempfile.mkdtemp())
    set()
    """
    store = FlowStore(checkpoint)
    named = {file.name for commit in commits_of(checkpoint) for file in files_of(commit)}
    found = {str(path.relative_to(store.state_root)) for path in store.state_root.rglob("*") if path.is_file()}
    drafts = {path.name for name in ("intents", "commits") for path in (store.root / name).glob(".*")}
    return (found - named) | drafts


def state_bytes(checkpoint: str | os.PathLike[str]) -> tuple[int, int]:
    """Bytes of all files in the state directory, and of the tables that the newest commit names: the live state.

    Examples
    --------
    >>> state_bytes(tempfile.mkdtemp())
    (0, 0)
    """
    files = [path for path in FlowStore(checkpoint).state_root.rglob("*") if path.is_file()]
    commits = commits_of(checkpoint)
    live = sum(file.bytes for file in files_of(commits[-1])) if commits else 0
    return sum(path.stat().st_size for path in files), live


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 120.0) -> None:
    """Wait for something that must happen; an `AssertionError` that names it if it does not.

    Examples
    --------
    >>> wait_until(lambda: True, "the truth")
    """
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up_at:
            raise AssertionError(f"Waited {timeout_s:g} s in vain for {what}.")
        time.sleep(0.02)
