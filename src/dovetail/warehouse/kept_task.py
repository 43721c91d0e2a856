"""One shard of a transformation with a kept relation, in one micro-batch.

The shard's state is its changes since the relation's version: Arrow files, one level each, the oldest first. When the
intent names another version than the state, the driver has folded all changes into it, and the shard starts without.
"""

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import pyarrow as pa

from dovetail.errors import RelationNotFound
from dovetail.metrics import OperatorMetrics
from dovetail.relation import Relation
from dovetail.spark.shard_job import ShardInput, ShardResult
from dovetail.state import StateFile
from dovetail.warehouse.kept_rows import KeptRows, Level, merged_levels
from dovetail.warehouse.transformations import Transformation

__all__ = ["CHANGES_TABLE", "KeptTask", "levels_of"]

CHANGES_TABLE = "changes"
_CHUNK_ROWS = 65_536
_MOST_LEVELS = 8


@dataclass(frozen=True)
class KeptTask:
    """The work of one shard; see `dovetail.spark.shard_job.ShardTask`.

    Attributes
    ----------
    path, key, is_hashed
        The relation.
    transformation
        What is done.
    stream_schema
        The columns of the routed rows.
    """

    path: str
    key: tuple[str, ...]
    is_hashed: bool
    transformation: Transformation
    stream_schema: pa.Schema

    def run(self, given: ShardInput) -> Generator[pa.RecordBatch, None, ShardResult]:
        """Transform the shard's rows, and give what changed."""
        shard, state, intent = given.shard, given.state, given.intent
        relation = self._relation(intent["version"])
        is_folded = state is not None and state.values["version"] != intent["version"]
        files = () if state is None or is_folded else state.files
        levels = levels_of([(file, given.read(file)) for file in files], self.key, self.is_hashed)
        reader = relation.shard(shard, columns=self.transformation.columns_read())
        kept = KeptRows(reader, levels, self.key, self.is_hashed)
        metrics = OperatorMetrics()
        if state is None:
            memo = self.transformation.begin(shard, relation.num_shards, intent)
        else:
            memo = dict(state.values["memo"])
            metrics = OperatorMetrics.from_dict(state.values["metrics"])
        for batch in _chunks(given.batches, self.stream_schema):
            result = self.transformation.apply(batch, kept, memo, metrics)
            if result is not None and result.num_rows:
                yield result
        new = [merged_levels(kept.new_levels, self.key, self.is_hashed)] if kept.new_levels else []
        if len(files) + len(new) > _MOST_LEVELS:
            new = [merged_levels([*levels, *kept.new_levels], self.key, self.is_hashed)]
            files = ()
        rows = sum(file.rows for file in files) + sum(table.num_rows for table in new)
        size = sum(file.bytes for file in files) + sum(table.nbytes for table in new)
        values = {"version": intent["version"], "memo": dict(memo), "metrics": metrics.as_dict()}
        report = {
            "pending": 0,
            "oldest_ms": None,
            "memory": {"changes": size},
            "metrics": metrics.as_dict(),
            "version": intent["version"],
            "state_rows": {"changes": rows},
        }
        return ShardResult([(CHANGES_TABLE, table) for table in new], tuple(files), values, report)

    def _relation(self, version: int) -> Relation:
        try:
            return Relation.open(self.path, version)
        except RelationNotFound as error:
            raise RelationNotFound(
                str(error), hint="Nothing was lost: put the relation back, and start the flow again."
            ) from None


def levels_of(tables: list[tuple[StateFile, pa.Table]], key: tuple[str, ...], is_hashed: bool) -> list[Level]:
    """The levels that a shard's state holds, the oldest first."""
    return [Level(table, key, is_hashed) for file, table in tables if file.table == CHANGES_TABLE]


def _chunks(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows in pieces that are worth a lookup each."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        waiting.append(batch if batch.schema.equals(schema) else batch.cast(schema))
        rows += batch.num_rows
        if rows >= _CHUNK_ROWS:
            yield pa.concat_batches(waiting)
            waiting, rows = [], 0
    if rows:
        yield pa.concat_batches(waiting)
