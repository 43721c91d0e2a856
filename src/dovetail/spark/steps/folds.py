"""When a flow folds the changes of its kept relation, and what it folds: the driver's side of `warehouse.folding`.

Changes are folded after a commit, once ``fold_every`` of batch time has passed since the last fold; before the next
micro-batch, if they might exceed their budget; and when a run ends. The next intent names the version. If a run ends
between a fold and that intent, the next run finds the version by its origin. A micro-batch that already runs with the
previous version continues with it and the changes: a later fold writes them again.
"""

import datetime as dt
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest

import pyarrow as pa

from dovetail.core.errors import RelationConflict
from dovetail.core.memory import Budget
from dovetail.relation import Relation
from dovetail.relation.format import CODE_COLUMN
from dovetail.runtime.kept import CHANGES_TABLE, levels_of
from dovetail.spark.flow.step import StepRecord
from dovetail.spark.flow.store import FlowStore
from dovetail.spark.steps.named_versions import named_versions
from dovetail.storage.digests import digest_of
from dovetail.storage.state_files import read_table
from dovetail.warehouse.folding import Origin, fold, is_folded
from dovetail.warehouse.kept_rows import Level, merged_levels

__all__ = ["Folds", "batch_of", "has_changes", "is_due"]


NEWEST_KEPT, YOUNG_S = 3, 600
"""Versions kept for readers that pin nothing, such as a program that opens the relation and reads it at once."""

_VACUUM_EVERY = 32


class Folds:
    """The folds of one step; created when the step is opened, because it needs the checkpoint."""

    def __init__(
        self,
        step: str,
        store: FlowStore,
        path: str,
        key: tuple[str, ...],
        is_hashed: bool,
        budget: Budget,
        check: Callable[[Relation], None],
        records_offsets: bool = False,
    ) -> None:
        self._step, self._store, self._path = step, store, path
        self._key, self._is_hashed, self._budget, self._check = key, is_hashed, budget, check
        self._records_offsets = records_offsets
        self._last: tuple[Origin, int] | None = None
        self._has_looked = False
        self._folds_since_vacuum = 0

    def require_not_ahead(self, relation: Relation) -> None:
        """Refuse a relation that holds changes of this flow, before its first micro-batch."""
        is_folded(relation, Origin(self._store.flow_id, self._step, -1, ""))

    def found(self, record: StepRecord, batch: int) -> int | None:
        """The version that holds the changes of a commit, if they were folded, possibly by an earlier run."""
        origin = self._origin(record, batch)
        if self._last is not None and self._last[0] == origin:
            return self._last[1]
        if not self._has_looked:
            # Later folds are made by this driver.
            self._has_looked = True
            newest = Relation.open(self._path)
            if is_folded(newest, origin):
                return newest.version
        return None

    def fold(self, record: StepRecord, batch: int) -> int:
        """Fold the changes of a commit into a new version of the relation and return its number."""
        origin = self._origin(record, batch)
        if self._last is None or self._last[0] != origin:
            self._last = origin, self._folded(origin, record, batch)
        return self._last[1]

    def _folded(self, origin: Origin, record: StepRecord, batch: int) -> int:
        # How far the source is in this version, for whoever asks the relation.
        offsets = self._store.spark_half.offsets(batch) if self._records_offsets else None
        also = {} if offsets is None else {"offsets": offsets.text.splitlines()[2:]}
        return fold(self._path, origin, self._parts(record), self._check, also=also).version

    def vacuum_if_due(self) -> None:
        """Vacuum once every few folds."""
        self._folds_since_vacuum += 1
        if self._folds_since_vacuum >= _VACUUM_EVERY:
            self.vacuum()

    def vacuum(self) -> None:
        """Remove versions that no kept commit or intent names, nobody has pinned, and that are neither young nor among
        the newest.
        """
        self._folds_since_vacuum = 0
        named = named_versions(self._store, self._step)
        if named is None:
            return
        relation = Relation.open(self._path)
        young_from = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=YOUNG_S)
        young = {
            info.version for info in relation.versions() if dt.datetime.fromisoformat(info.created_at) > young_from
        }
        # Another writer has the lock: the next vacuum will remove them.
        with suppress(RelationConflict):
            relation.vacuum(keep=NEWEST_KEPT, also=named | young)

    def _origin(self, record: StepRecord, batch: int) -> Origin:
        changes = digest_of("\n".join(state.state_id for state in record.states).encode())
        return Origin(self._store.flow_id, self._step, batch, changes)

    def _parts(self, record: StepRecord) -> list[Callable[[], pa.Table]]:
        shards = []
        for state in record.states:
            tables = [(file, read_table(self._store.state_root, file)) for file in state.files]
            shards.append(levels_of(tables, self._key, self._is_hashed))
        size = sum(level.table.nbytes for levels in shards for level in levels)
        # More than the budget cannot be merged within it. Folding level by level gives the same result.
        turns = [shards] if size <= self._budget.total_bytes else _turns(shards)
        return [partial(self._merged, turn) for turn in turns]

    def _merged(self, shards: Sequence[Sequence[Level]]) -> pa.Table:
        key, is_hashed = self._key, self._is_hashed
        parts = [merged_levels(levels, key, is_hashed).drop_columns([CODE_COLUMN]) for levels in shards if levels]
        return pa.concat_tables(parts)


def has_changes(record: StepRecord) -> bool:
    """Whether a commit has changes that its version does not hold."""
    return any(file.table == CHANGES_TABLE for state in record.states for file in state.files)


def is_due(record: StepRecord, fold_every_ms: int) -> bool:
    """Whether readers have waited long enough for the changes of a commit."""
    values = record.states[0].values
    folded_ms = values.get("folded_ms")
    # A checkpoint of an earlier version has no times. A clock that went back must not delay a fold.
    return folded_ms is None or not 0 <= values["time_ms"] - folded_ms < fold_every_ms


def batch_of(record: StepRecord, store: FlowStore) -> int:
    recorded = record.states[0].values.get("batch")
    # A checkpoint of an earlier version: the commit is the newest.
    newest = store.last_batch() if recorded is None else recorded
    assert newest is not None, "there is a record, so there is a commit"
    return int(newest)


def _turns(shards: Sequence[Sequence[Level]]) -> list[list[list[Level]]]:
    """The levels of all shards in turns, the oldest first, at most one of each shard."""
    return [[[level] for level in turn if level is not None] for turn in zip_longest(*shards)]
