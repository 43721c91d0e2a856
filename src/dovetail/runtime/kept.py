"""One shard of a transformation with a kept relation, in one micro-batch.

The shard's state is its changes since the relation's version: Arrow files, one level each, the oldest first. When the
intent names another version than the state, the driver has folded all changes into it, and the shard starts without.

A shard's part of the budget is for two things: one half for the changes, the other to merge them. The driver folds when
the next micro-batch may need more than the half, see `needs_folding`. A micro-batch that brings more than anybody could
expect puts what does not fit into a file, and the driver folds after it.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dovetail.core.errors import RelationNotFound
from dovetail.core.metrics import OperatorMetrics
from dovetail.relation import Relation
from dovetail.runtime.local_directory import local_directory
from dovetail.runtime.merged_batches import merged_batches
from dovetail.runtime.shard_job import ShardInput, ShardResult
from dovetail.storage.state_files import StateFile
from dovetail.warehouse.kept_rows import KeptRows, Level, merged_levels
from dovetail.warehouse.transformations import Transformation

__all__ = [
    "CHANGES_TABLE",
    "MOST_LEVELS",
    "KeptTask",
    "chunks_of",
    "levels_of",
    "needs_folding",
    "open_version",
    "tidied_levels",
]

CHANGES_TABLE = "changes"
_CHUNK_ROWS = 65_536
_CHUNK_SHARE = 8  # the part of a shard's budget that one chunk of its rows may take
_LEAST_CHUNK_BYTES = 1 << 16
MOST_LEVELS = 8


@dataclass(frozen=True)
class KeptTask:
    """The work of one shard; see `dovetail.runtime.shard_job.ShardTask`.

    Attributes
    ----------
    path, key, is_hashed
        The relation.
    transformation
        What is done.
    stream_schema
        The columns of the routed rows.
    budget_bytes
        The most memory that changes take, merging included.
    """

    path: str
    key: tuple[str, ...]
    is_hashed: bool
    transformation: Transformation
    stream_schema: pa.Schema
    budget_bytes: int

    def run(self, given: ShardInput) -> Generator[pa.RecordBatch, None, ShardResult]:
        """Transform the shard's rows, and give what changed."""
        shard, state, intent = given.shard, given.state, given.intent
        relation = open_version(self.path, intent["version"])
        is_folded = state is not None and state.values["version"] != intent["version"]
        files = () if state is None or is_folded else state.files
        levels = levels_of([(file, given.read(file)) for file in files], self.key, self.is_hashed)
        reader = relation.shard(shard, columns=self.transformation.columns_read())
        held = sum(file.bytes for file in files)
        room = max(0, self.budget_bytes // 2 - held)
        kept = KeptRows(reader, levels, self.key, self.is_hashed, room, local_directory())
        metrics = OperatorMetrics()
        if state is None:
            memo = self.transformation.begin(shard, relation.num_shards, intent)
        else:
            memo = dict(state.values["memo"])
            metrics = OperatorMetrics.from_dict(state.values["metrics"])
        for batch in chunks_of(given.batches, self.stream_schema, self.budget_bytes):
            result = self.transformation.apply(batch, kept, memo, metrics)
            if result is not None and result.num_rows:
                yield result
        new, files, merging = tidied_levels(levels, files, kept, self.key, self.is_hashed)
        rows = sum(file.rows for file in files) + sum(table.num_rows for table in new)
        spilled = kept.spilled_bytes + (0 if state is None else int(state.values["spilled_bytes"]))
        totals = {"metrics": metrics.as_dict(), "spilled_bytes": spilled}
        marks = {name: intent[name] for name in ("batch", "time_ms", "folded_ms") if name in intent}
        values = {"version": intent["version"], "memo": dict(memo), **totals, **marks}
        report = {
            "pending": 0,
            "oldest_ms": None,
            "memory": {"changes": held + kept.size_bytes, "merging": merging},
            "metrics": metrics.as_dict(),
            "version": intent["version"],
            "state_rows": {"changes": rows},
            "counters": {"spilled_bytes": spilled},
            "changes": {
                "bytes": sum(file.bytes for file in files) + sum(table.nbytes for table in new),
                "new_bytes": kept.size_bytes + kept.spilled_bytes,
            },
        }
        return ShardResult([(CHANGES_TABLE, table) for table in new], tuple(files), values, report)


def needs_folding(reports: Sequence[Mapping[str, Any]], budget_bytes: int) -> bool:
    """Whether the changes of a shard must leave before the next micro-batch, which may bring as many as the last.

    Parameters
    ----------
    reports
        What the tasks of the last micro-batch reported, by shard.
    budget_bytes
        A shard's part of the budget.

    Examples
    --------
    >>> needs_folding([{"changes": {"bytes": 300, "new_bytes": 100}}], 800)
    False
    >>> needs_folding([{"changes": {"bytes": 301, "new_bytes": 100}}], 800)
    True
    """
    room = budget_bytes // 2
    changes = [report["changes"] for report in reports]
    return any(one["bytes"] and one["bytes"] + one["new_bytes"] > room for one in changes)


def open_version(path: str, version: int) -> Relation:
    """The relation in the version that an intent names."""
    try:
        return Relation.open(path, version)
    except RelationNotFound as error:
        raise RelationNotFound(
            str(error), hint="Nothing was lost: put the relation back, and start the flow again."
        ) from None


def tidied_levels(
    levels: list[Level], files: tuple[StateFile, ...], kept: KeptRows, key: tuple[str, ...], is_hashed: bool
) -> tuple[list[pa.Table], tuple[StateFile, ...], int]:
    """New tables of the state, old ones that stay, and the bytes that merging took. Few levels are quick to ask."""
    new = kept.new_levels
    if kept.spilled_bytes:
        # Merged, they would be in memory again; the driver folds them before the next micro-batch.
        return [level.table for level in new], files, 0
    if not new:
        return [], files, 0
    is_many = len(files) + 1 > MOST_LEVELS
    if not is_many and len(new) == 1:
        return [new[0].table], files, 0
    merged = merged_levels([*levels, *new] if is_many else new, key, is_hashed)
    return [merged], () if is_many else files, merged.nbytes


def levels_of(tables: list[tuple[StateFile, pa.Table]], key: tuple[str, ...], is_hashed: bool) -> list[Level]:
    """The levels that a shard's state holds, the oldest first."""
    return [Level(table, key, is_hashed) for file, table in tables if file.table == CHANGES_TABLE]


def chunks_of(batches: Iterator[pa.RecordBatch], schema: pa.Schema, budget_bytes: int) -> Iterator[pa.RecordBatch]:
    """The rows in pieces that are worth a lookup each, of bounded bytes."""
    size_bytes = max(_LEAST_CHUNK_BYTES, budget_bytes // _CHUNK_SHARE)
    typed = (batch if batch.schema.equals(schema) else batch.cast(schema) for batch in batches)
    return merged_batches(typed, _CHUNK_ROWS, size_bytes)
