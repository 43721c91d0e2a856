"""Side output of rows that were late or broke a promise: exactly once, like the results.

A task writes them to its own file while it runs, and then as tables of its state, which the commit names and the next
micro-batch drops. On publish, the driver writes a Parquet file of each; its name contains the micro-batch and the
shard, so publishing again changes nothing.
"""

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from dovetail.runtime.late_rows import LATE_PREFIX, QUARANTINE_PREFIX
from dovetail.storage.local import LOCAL
from dovetail.storage.state_files import read_table

if TYPE_CHECKING:
    from dovetail.spark.flow.step import StepRecord

__all__ = ["SideFiles"]


@dataclass(frozen=True)
class SideFiles:
    """Parquet files of the rows of a side output: a directory per input."""

    path: Path
    names: Mapping[str, Sequence[str]]  # per input, its columns as the user has them
    prefix: str = LATE_PREFIX  # of the state tables that hold the rows

    def publish(self, record: "StepRecord", state_root: Path, batch: int) -> None:
        """Make the rows of a committed micro-batch visible; idempotent."""
        for name, shard, table in _tables(record, state_root, self.prefix):
            names = list(self.names[name])
            # The columns after these are hidden ones of the join; the last one of a quarantined row is the reason.
            last = [table.num_columns - 1] if self.prefix == QUARANTINE_PREFIX else []
            shown = table.select([*range(len(names)), *last])
            reasons = [table.column_names[place] for place in last]
            _write(self.path / name, _file_name(batch, shard), shown.rename_columns([*names, *reasons]))


def _tables(record: "StepRecord", state_root: Path, prefix: str) -> Iterator[tuple[str, int, pa.Table]]:
    """The rows of one kind that a commit names, by input and shard."""
    for shard, state in enumerate(record.states):
        for file in state.files:
            if file.table.startswith(prefix):
                yield file.table.removeprefix(prefix), shard, read_table(state_root, file)


def _file_name(batch: int, shard: int) -> str:
    return f"batch-{batch:08d}-{shard:05d}.parquet"


def _write(directory: Path, name: str, table: pa.Table) -> None:
    LOCAL.make_directory(directory)
    draft = directory / f".{uuid.uuid4().hex}.tmp"
    try:
        with LOCAL.open_new(draft) as file:
            pq.write_table(table, file)
        LOCAL.sync([draft])
        LOCAL.rename(draft, directory / name)
    except BaseException:
        LOCAL.delete(draft)
        raise
    LOCAL.sync([directory])
