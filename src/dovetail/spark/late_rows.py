"""Rows that came too late or broke a promise, on their way to a side output: exactly once, as the results are.

A task writes them to a file of its own while it runs, and then as tables of its state, which the commit names and the
next micro-batch does not take over. When the micro-batch is published, the driver makes a Parquet file of each; its
name has the micro-batch and the shard in it, so that publishing again changes nothing.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from dovetail.relation.files import sync_directory
from dovetail.state import read_table

if TYPE_CHECKING:
    from dovetail.spark.steps import StepRecord

__all__ = ["LateOutput", "LateWriter", "QuarantineOutput", "is_late_table"]

_PREFIX = "late "
_QUARANTINED = "quarantined "


def is_late_table(name: str) -> bool:
    """Whether a table of a state holds late rows.

    Examples
    --------
    >>> is_late_table("late a"), is_late_table("0-17")
    (True, False)
    """
    return name.startswith(_PREFIX)


class LateWriter:
    """Takes the late rows of one task, and those that broke a promise; they wait on disk, not in memory.

    Parameters
    ----------
    directory
        The task's own.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writers: dict[str, tuple[pa.ipc.RecordBatchStreamWriter, pa.OSFile, Path]] = {}

    def add(self, name: str, rows: pa.RecordBatch) -> None:
        """Keep late rows of an input."""
        self._write(f"{_PREFIX}{name}", rows)

    def add_quarantined(self, name: str, rows: pa.RecordBatch) -> None:
        """Keep rows of an input that broke a promise, with the reason in their last column."""
        self._write(f"{_QUARANTINED}{name}", rows)

    def _write(self, table: str, rows: pa.RecordBatch) -> None:
        if table not in self._writers:
            path = self._directory / f"late-{len(self._writers)}.arrow"
            file = pa.OSFile(str(path), "wb")
            self._writers[table] = (pa.ipc.new_stream(file, rows.schema), file, path)
        self._writers[table][0].write_batch(rows)

    def tables(self) -> list[tuple[str, pa.Table]]:
        """All that was added, mapped, by the names of tables of a state; the files are gone when these are."""
        found = []
        for table, (writer, file, path) in self._writers.items():
            writer.close()
            file.close()
            with pa.memory_map(str(path)) as mapped:
                found.append((table, pa.ipc.open_stream(mapped.read_buffer()).read_all()))
            path.unlink()
        self._writers.clear()
        return found


@dataclass(frozen=True)
class LateOutput:
    """The side output of a join.

    Attributes
    ----------
    path
        A directory with one for each input.
    names
        For each input, its columns as the user has them.
    """

    path: Path
    names: Mapping[str, Sequence[str]]

    def publish(self, record: "StepRecord", state_root: Path, batch: int) -> None:
        """Make the late rows of a committed micro-batch visible; again, if it must be."""
        for name, shard, table in _tables(record, state_root, _PREFIX):
            names = list(self.names[name])
            # Columns behind these are hidden ones that only the join needs.
            shown = table.select(list(range(len(names)))).rename_columns(names)
            _write(self.path / name, _file_name(batch, shard), shown)


@dataclass(frozen=True)
class QuarantineOutput:
    """The side output of rows that broke a promise, as `LateOutput`; each with the reason in a column more."""

    path: Path
    names: Mapping[str, Sequence[str]]

    def publish(self, record: "StepRecord", state_root: Path, batch: int) -> None:
        """Make the quarantined rows of a committed micro-batch visible; again, if it must be."""
        for name, shard, table in _tables(record, state_root, _QUARANTINED):
            names = list(self.names[name])
            reason = table.num_columns - 1
            shown = table.select([*range(len(names)), reason]).rename_columns([*names, table.column_names[reason]])
            _write(self.path / name, _file_name(batch, shard), shown)


def _tables(record: "StepRecord", state_root: Path, prefix: str) -> Iterator[tuple[str, int, pa.Table]]:
    """The rows of one kind that a commit names, by input and shard."""
    for shard, state in enumerate(record.states):
        for file in state.files:
            if file.table.startswith(prefix):
                yield file.table.removeprefix(prefix), shard, read_table(state_root, file)


def _file_name(batch: int, shard: int) -> str:
    return f"batch-{batch:08d}-{shard:05d}.parquet"


def _write(directory: Path, name: str, table: pa.Table) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=directory)
    try:
        with os.fdopen(descriptor, "wb") as file:
            pq.write_table(table, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(draft, directory / name)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(draft)
        raise
    sync_directory(directory)
