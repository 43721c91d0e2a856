"""One shard of a relation that follows a table, in one micro-batch.

As for any kept relation, the shard's state is its changes since the relation's version. Besides, it has tombstones:
the deleted keys whose deletion is in the version. They are levels like the changes, each with the batch time at which
it was folded, and are dropped when they are older than `FollowTask.keep_tombstones_ms`.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dovetail.core.metrics import OperatorMetrics
from dovetail.runtime.kept import (
    CHANGES_TABLE,
    MOST_LEVELS,
    chunks_of,
    levels_of,
    open_version,
    tidied_levels,
)
from dovetail.runtime.local_directory import local_directory
from dovetail.runtime.shard_job import ShardInput, ShardResult
from dovetail.storage.state_files import StateFile
from dovetail.warehouse.following import TIME_COLUMN, FollowChanges, LastSequences, tombstones_of
from dovetail.warehouse.kept_rows import KeptRows, Level

__all__ = ["TOMBSTONES_TABLE", "FollowTask"]

TOMBSTONES_TABLE = "tombstones"


@dataclass(frozen=True)
class FollowTask:
    """The work of one shard; see `dovetail.runtime.shard_job.ShardTask` and `dovetail.runtime.kept.KeptTask`."""

    path: str
    key: tuple[str, ...]
    is_hashed: bool
    transformation: FollowChanges
    stream_schema: pa.Schema
    budget_bytes: int
    keep_tombstones_ms: int

    def run(self, given: ShardInput) -> Generator[pa.RecordBatch, None, ShardResult]:
        """Apply the shard's changes, and give those that were applied."""
        state, intent = given.state, given.intent
        relation = open_version(self.path, intent["version"])
        is_folded = state is not None and state.values["version"] != intent["version"]
        saved = () if state is None else state.files
        levels = levels_of([(f, given.read(f)) for f in saved if f.table == CHANGES_TABLE], self.key, self.is_hashed)
        tombs = _Tombstones(self, given)
        files = tuple(file for file in saved if file.table == CHANGES_TABLE)
        if is_folded:
            tombs.take(levels)
            levels, files = [], ()
        reader = relation.shard(given.shard, columns=self.transformation.columns_read())
        held = sum(file.bytes for file in files)
        room = max(0, self.budget_bytes // 2 - held)
        kept = KeptRows(reader, levels, self.key, self.is_hashed, room, local_directory())
        last = LastSequences(kept, tombs.levels, self.transformation.stored_sequence)
        memo: dict[str, Any] = {} if state is None else dict(state.values["memo"])
        metrics = OperatorMetrics() if state is None else OperatorMetrics.from_dict(state.values["metrics"])
        for batch in chunks_of(given.batches, self.stream_schema, self.budget_bytes):
            result = self.transformation.follow(batch, last, memo, metrics)
            if result is not None and result.num_rows:
                yield result
        new, files, merging = tidied_levels(levels, files, kept, self.key, self.is_hashed)
        spilled = kept.spilled_bytes + (0 if state is None else int(state.values["spilled_bytes"]))
        marks = {name: intent[name] for name in ("batch", "time_ms", "folded_ms") if name in intent}
        totals = {"metrics": metrics.as_dict(), "spilled_bytes": spilled}
        rows = sum(file.rows for file in files) + sum(table.num_rows for table in new)
        report = {
            "pending": 0,
            "oldest_ms": None,
            "memory": {"changes": held + kept.size_bytes, "merging": max(merging, tombs.merging_bytes)},
            "metrics": metrics.as_dict(),
            "version": intent["version"],
            "state_rows": {"changes": rows, "tombstones": tombs.rows},
            "counters": {"spilled_bytes": spilled, **memo},
            "changes": {
                "bytes": sum(file.bytes for file in files) + sum(table.nbytes for table in new),
                "new_bytes": kept.size_bytes + kept.spilled_bytes,
            },
        }
        tables = [*((CHANGES_TABLE, table) for table in new), *((TOMBSTONES_TABLE, table) for table in tombs.new)]
        values = {"version": intent["version"], "memo": memo, **totals, **marks}
        return ShardResult(tables, (*tombs.files, *files), values, report)


class _Tombstones:
    """The tombstones of a shard, in files that stay and tables that are new."""

    def __init__(self, task: FollowTask, given: ShardInput) -> None:
        self._task, self._now_ms = task, int(given.intent["time_ms"])
        saved = () if given.state is None else given.state.files
        self.files: tuple[StateFile, ...] = tuple(file for file in saved if file.table == TOMBSTONES_TABLE)
        self.levels = [self._level(given.read(file)) for file in self.files]
        self.new: list[pa.Table] = []
        self.merging_bytes = 0

    @property
    def rows(self) -> int:
        return sum(level.codes.size for level in self.levels)

    def take(self, changes: list[Level]) -> None:
        """Keep the deletions among changes that the relation's version now holds; drop tombstones that are too old."""
        task, sequence = self._task, self._task.transformation.stored_sequence
        if changes:
            self.merging_bytes = sum(level.table.nbytes for level in changes)
            table = tombstones_of(changes, task.key, task.is_hashed, sequence, self._now_ms)
            if table.num_rows:
                self.new = [table]
                self.levels.append(self._level(table))
        oldest_ms = self._now_ms - task.keep_tombstones_ms
        is_expired = any(_oldest(level) < oldest_ms for level in self.levels)
        if is_expired or len(self.levels) > MOST_LEVELS:
            # Not the newest of each key only: a lookup takes the greatest sequence.
            every = pa.concat_tables([level.table for level in self.levels])
            merged = every.filter(pc.greater_equal(every.column(TIME_COLUMN), oldest_ms))
            self.merging_bytes = max(self.merging_bytes, every.nbytes + merged.nbytes)
            self.files, self.new = (), [merged] if merged.num_rows else []
            self.levels = [self._level(table) for table in self.new]

    def _level(self, table: pa.Table) -> Level:
        return Level(table, self._task.key, self._task.is_hashed)


def _oldest(level: Level) -> int:
    found: int = pc.min(level.table.column(TIME_COLUMN)).as_py()
    return found
