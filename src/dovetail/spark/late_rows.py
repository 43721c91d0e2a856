"""Rows that came too late, on their way to a side output: exactly once, as the results are.

A task writes them to a file of its own while it runs, and then as tables of its state, which the commit names and the
next micro-batch does not take over. When the micro-batch is published, the driver makes a Parquet file of each; its
name has the micro-batch and the shard in it, so that publishing again changes nothing.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
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

__all__ = ["LateOutput", "LateWriter", "is_late_table"]

_PREFIX = "late "


def is_late_table(name: str) -> bool:
    """Whether a table of a state holds late rows.

    Examples
    --------
    >>> is_late_table("late a"), is_late_table("0-17")
    (True, False)
    """
    return name.startswith(_PREFIX)


class LateWriter:
    """Takes the late rows of one task; they wait on disk, not in memory.

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
        if name not in self._writers:
            path = self._directory / f"late-{len(self._writers)}.arrow"
            file = pa.OSFile(str(path), "wb")
            self._writers[name] = (pa.ipc.new_stream(file, rows.schema), file, path)
        self._writers[name][0].write_batch(rows)

    def tables(self) -> list[tuple[str, pa.Table]]:
        """All that was added, mapped, by the names of tables of a state; the files are gone when these are."""
        found = []
        for name, (writer, file, path) in self._writers.items():
            writer.close()
            file.close()
            with pa.memory_map(str(path)) as mapped:
                found.append((f"{_PREFIX}{name}", pa.ipc.open_stream(mapped.read_buffer()).read_all()))
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
        for shard, state in enumerate(record.states):
            for file in state.files:
                if is_late_table(file.table):
                    name = file.table.removeprefix(_PREFIX)
                    names = list(self.names[name])
                    # Columns behind these are hidden ones that only the join needs.
                    table = read_table(state_root, file).select(list(range(len(names)))).rename_columns(names)
                    _write(self.path / name, f"batch-{batch:08d}-{shard:05d}.parquet", table)


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
