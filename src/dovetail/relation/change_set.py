"""Rows to write and keys to remove, as one version of a relation: readers see both or neither."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dovetail.relation.format import Manifest, Operation, Shard
from dovetail.relation.local import ArrowSource, nullable_fields
from dovetail.relation.shard_writer import remove_new_files
from dovetail.storage.interface import Storage
from dovetail.storage.local import LOCAL

__all__ = ["DELETED_COLUMN", "ChangeSet"]

DELETED_COLUMN = "__deleted"
"""True in the rows of keys to remove; their other columns do not matter."""


class ChangeSet:
    """Upserts and deletes of different keys, to be passed to `Relation.upsert`.

    >>> import tempfile
    >>> from dovetail.relation import Relation
    >>> first = Relation.build(pa.table({"k": [1, 2], "n": [1, 2]}), tempfile.mkdtemp() + "/r", on="k")
    >>> changes = pa.table({"k": [1, 3], "n": [None, 3], "__deleted": [True, False]})
    >>> second = first.upsert(ChangeSet(changes, first.schema))
    >>> second.version, sorted(second.to_arrow().to_pylist(), key=lambda row: row["k"])
    (2, [{'k': 2, 'n': 2}, {'k': 3, 'n': 3}])
    """

    spark_schema: dict[str, Any] | None = None

    def __init__(self, changes: pa.Table, schema: pa.Schema, storage: Storage = LOCAL) -> None:
        gone = changes.column(DELETED_COLUMN)
        self.schema: pa.Schema = nullable_fields(schema)
        self._deleted = changes.filter(gone).select(self.schema.names)
        self._written = changes.filter(pc.invert(gone)).select(self.schema.names)
        self._storage = storage

    def write(
        self, root: str, operation: Operation, base: Manifest, progress: Callable[[int, int], None] | None = None
    ) -> list[Shard]:
        """Apply the deletes to ``base``, and the upserts to the result."""
        if not self._deleted.num_rows:
            return self._source(self._written).write(root, "upsert", base, progress)
        shards = self._source(self._deleted).write(root, "delete", base)
        if not self._written.num_rows:
            return shards
        between = replace(base, shards=tuple(shards))
        try:
            last = self._source(self._written).write(root, "upsert", between, progress)
        except BaseException:
            remove_new_files(root, base, dict(enumerate(shards)), self._storage)
            raise
        # Bitmaps and segments that the upserts have replaced belong to no version.
        used = base.data_files() | replace(base, shards=tuple(last)).data_files()
        for name in between.data_files() - used:
            self._storage.delete(Path(root) / "data" / name)
        return last

    def _source(self, rows: pa.Table) -> ArrowSource:
        return ArrowSource(rows.cast(self.schema), self._storage)
