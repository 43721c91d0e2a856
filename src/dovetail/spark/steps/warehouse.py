"""The warehouse's transformations as methods of a flow."""

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.core.durations import parse_duration_ms
from dovetail.core.errors import PlanError
from dovetail.core.memory import Budget
from dovetail.relation import Relation
from dovetail.relation.keys import code_kind
from dovetail.spark.flow.store import local_path
from dovetail.spark.plan.codes import check_key_columns
from dovetail.spark.steps.follow_step import (
    ACTION_COLUMNS,
    Following,
    columns_to_keep,
    stored_sequence_of,
    with_actions,
)
from dovetail.spark.steps.kept import Arrivals, KeptRelation, KeptStep, kept_schema, open_kept
from dovetail.warehouse.following import FollowChanges
from dovetail.warehouse.history import History
from dovetail.warehouse.transformations import (
    CHANGES,
    Change,
    ChangeDetection,
    Deduplication,
    SurrogateKeys,
    Transformation,
)

if TYPE_CHECKING:
    from dovetail.spark.flow.step import Step

__all__ = ["WarehouseStages"]

On = str | Sequence[str] | Mapping[str, str]
Place = Relation | str | os.PathLike[str]

FOLD_EVERY = "10 seconds"
KEEP_TOMBSTONES = "2 days"

_HASH = "__hash"
_STORED_HASH = "row_hash"


class WarehouseStages:
    """Stages that keep a relation: the flow is its only writer, and creates it if there is none."""

    @abstractmethod
    def _here(self) -> DataFrame: ...

    @abstractmethod
    def _then(self, stage: Any) -> Self: ...

    @abstractmethod
    def _with_columns(self, function: Callable[[DataFrame], DataFrame]) -> Self: ...

    @abstractmethod
    def _step_name(self, kind: str) -> str: ...

    # ================================================================ keys

    def surrogate_key(
        self,
        column: str,
        relation: Place,
        *,
        on: On,
        budget: str | int | Budget = "64MB",
        shards: int | None = None,
        fold_every: str = FOLD_EVERY,
    ) -> Self:
        """Add a warehouse key: a number, always the same for the same source key.

        A row whose source key has a NULL gets NULL. Numbers have gaps, and do not tell the order of arrival.

        Parameters
        ----------
        column
            The column to add, and the relation's column that holds the number.
        relation
            The lookup relation, or its path. The flow creates it if there is none, and is its only writer.
        on
            The source key: columns such as ``["source", "order_id"]``, or a mapping from stream to relation names.
        budget
            The maximum size of keys that are not in the relation yet; beyond it they are folded into a new version.
        shards
            Slices of a new relation; by default as many as tasks run at once.
        fold_every
            How long it may take until others see new keys in the relation, such as ``"10 seconds"``, give or take one
            micro-batch. They see all of them when a run has ended.
        """
        arrivals = Arrivals.of(self._here())
        key = self._key(arrivals, on)
        kept = self._relation(arrivals, relation, key, [(column, pa.int64())], shards)
        emitted = arrivals.names
        logic = SurrogateKeys(key, kept.is_hashed, emitted, column)
        self._require_new(arrivals, column)
        results = [*_same(arrivals), ("__number", T.StructField(column, T.LongType()))]
        settings = {"column": column}
        return self._kept(
            "surrogate_key", arrivals, kept, logic, budget, fold_every, results=results, settings=settings
        )

    def deduplicate(
        self,
        relation: Place,
        *,
        on: On,
        order_by: str | Sequence[str] = (),
        mark: str | None = None,
        budget: str | int | Budget = "64MB",
        shards: int | None = None,
        fold_every: str = FOLD_EVERY,
    ) -> Self:
        """Let only the first row of each key pass, now and ever. Rows whose key has a NULL equal no other, and pass.

        Parameters
        ----------
        relation
            The relation of keys seen so far, or its path; keys that are already in it count as seen.
        on
            The key: columns, or a mapping from stream to relation names.
        order_by
            Which row of a key is first, within one micro-batch.
        mark
            Keep duplicates, and add a boolean column of this name that is true for them.
        budget, shards, fold_every
            See `surrogate_key`.
        """
        arrivals = Arrivals.of(self._here())
        key = self._key(arrivals, on)
        kept = self._relation(arrivals, relation, key, [], shards)
        results = _same(arrivals)
        if mark is not None:
            self._require_new(arrivals, mark)
            results = [*results, ("__duplicate", T.StructField(mark, T.BooleanType()))]
        logic = Deduplication(key, kept.is_hashed, arrivals.names, mark is not None)
        order = [arrivals.ours(name) for name in _names(order_by)]
        settings = {"mark": mark, "order_by": _names(order_by)}
        return self._kept(
            "deduplicate",
            arrivals,
            kept,
            logic,
            budget,
            fold_every,
            order=order,
            results=results,
            settings=settings,
        )

    # ================================================================ changes

    def detect_changes(
        self,
        relation: Place,
        *,
        on: On,
        compare: Sequence[str] | None = None,
        order_by: str | Sequence[str] = (),
        column: str = "change",
        emit: Sequence[Change] = CHANGES,
        budget: str | int | Budget = "64MB",
        shards: int | None = None,
        fold_every: str = FOLD_EVERY,
    ) -> Self:
        """Add to each row whether its key is new, or its columns differ from those of the previous row of the key.

        Parameters
        ----------
        relation
            The relation that holds a hash of the last row of each key, or its path.
        on
            The key.
        compare
            The columns to compare; by default all but the key and those of `order_by`.
        order_by
            The order of a key's rows in one micro-batch.
        column
            The column to add: ``"inserted"``, ``"changed"`` or ``"unchanged"``.
        emit
            Which of these to emit.
        budget, shards, fold_every
            See `surrogate_key`.
        """
        return self._changes(
            "detect_changes", relation, on, compare, order_by, column, emit, budget, shards, fold_every, None
        )

    def upsert(
        self,
        relation: Place,
        *,
        on: On,
        columns: Sequence[str] | None = None,
        order_by: str | Sequence[str] = (),
        column: str = "change",
        emit: Sequence[Change] = CHANGES,
        budget: str | int | Budget = "64MB",
        shards: int | None = None,
        fold_every: str = FOLD_EVERY,
    ) -> Self:
        """Keep the last row of each key in a relation: a slowly changing dimension of type 1.

        Parameters
        ----------
        relation
            The dimension, or its path.
        on
            The key.
        columns
            The columns to keep besides; by default all others.
        order_by, column, emit, budget, shards, fold_every
            As for `detect_changes`.
        """
        return self._changes(
            "upsert", relation, on, columns, order_by, column, emit, budget, shards, fold_every, columns or ()
        )

    def _changes(
        self,
        kind: str,
        relation: Place,
        on: On,
        compare: Sequence[str] | None,
        order_by: str | Sequence[str],
        column: str,
        emit: Sequence[str],
        budget: str | int | Budget,
        shards: int | None,
        fold_every: str,
        stored: Sequence[str] | None,
    ) -> Self:
        arrivals = Arrivals.of(self._here())
        key = self._key(arrivals, on)
        order = [arrivals.ours(name) for name in _names(order_by)]
        compared = _compared(arrivals, key, compare, [] if stored is not None else order)
        unknown = [word for word in emit if word not in CHANGES]
        if unknown or not emit:
            raise PlanError(f"emit={list(emit)!r} is not known.", hint=f"Use some of {', '.join(CHANGES)}.")
        self._require_new(arrivals, column)
        kinds = arrivals.arrow()
        users = dict(zip(arrivals.names, arrivals.schema.names, strict=True))
        attributes = [] if stored is None else [(ours, users[ours]) for ours in compared]
        more = [*((theirs, kinds.field(ours).type) for ours, theirs in attributes), (_STORED_HASH, pa.int64())]
        kept = self._relation(arrivals, relation, key, more, shards)
        logic = ChangeDetection(
            key, kept.is_hashed, arrivals.names, _HASH, _STORED_HASH, tuple(attributes), tuple(dict.fromkeys(emit))
        )
        return self._kept(
            kind,
            arrivals,
            kept,
            logic,
            budget,
            fold_every,
            computed={_HASH: _hash_of(compared)},
            order=order,
            results=[*_same(arrivals), ("__change", T.StructField(column, T.StringType()))],
            settings={
                "compare": [users[ours] for ours in compared],
                "emit": sorted(emit),
                "order_by": _names(order_by),
            },
        )

    def history(
        self,
        relation: Place,
        *,
        on: On,
        time: str,
        columns: Sequence[str] | None = None,
        valid_from: str = "valid_from",
        valid_to: str = "valid_to",
        budget: str | int | Budget = "64MB",
        shards: int | None = None,
        fold_every: str = FOLD_EVERY,
    ) -> Self:
        """Keep every version of each key's row in a relation: a slowly changing dimension of type 2.

        The flow continues with the versions that were opened, closed or replaced: key, columns, `valid_from`,
        `valid_to`. Look one up by ``enrich(relation, on=..., condition="valid_from <= ts AND ts < valid_to")``.

        Parameters
        ----------
        relation
            The dimension, or its path.
        on
            The key.
        time
            The column with the time of a change, a timestamp. Changes may come late.
        columns
            The columns that make a version; by default all but key and time.
        valid_from, valid_to
            The relation's columns with the span of a version; the last one's ends at 9999-12-31.
        budget, shards, fold_every
            See `surrogate_key`.
        """
        arrivals = Arrivals.of(self._here())
        key = self._key(arrivals, on)
        moment = arrivals.ours(time)
        kind = arrivals.schema[time].dataType
        if not isinstance(kind, T.TimestampType | T.TimestampNTZType):
            raise PlanError(f"time={time!r} is {kind.simpleString()}.", hint="It must be a timestamp; cast it.")
        compared = _compared(arrivals, key, columns, [moment])
        users = dict(zip(arrivals.names, arrivals.schema.names, strict=True))
        attributes = tuple((ours, users[ours]) for ours in compared)
        kinds = arrivals.arrow()
        span = [(valid_from, kinds.field(moment).type), (valid_to, kinds.field(moment).type)]
        more = [*((theirs, kinds.field(ours).type) for ours, theirs in attributes), *span, (_STORED_HASH, pa.int64())]
        kept = self._relation(arrivals, relation, key, more, shards, is_unique=False)
        logic = History(
            key, kept.is_hashed, (), moment, _HASH, attributes, valid_from, valid_to, _STORED_HASH, kept.schema
        )
        sources = {theirs: arrivals.schema[users[ours]] for ours, theirs in [*key, *attributes]}
        shown = [(name, sources[name]) for name in kept.schema.names if name in sources]
        shown += [(name, T.StructField(name, kind)) for name in (valid_from, valid_to)]
        results = [(name, T.StructField(name, f.dataType, True, f.metadata)) for name, f in shown]
        return self._kept(
            "history",
            arrivals,
            kept,
            logic,
            budget,
            fold_every,
            computed={_HASH: _hash_of(compared)},
            order=[moment],
            results=results,
            settings={"time": time, "compare": [users[ours] for ours in compared]},
        )

    # ================================================================ tables elsewhere

    def follow(
        self,
        relation: Place,
        *,
        keys: str | Sequence[str],
        sequence_by: str | None = None,
        apply_as_deletes: str | None = None,
        columns: Sequence[str] | None = None,
        keep_tombstones: str = KEEP_TOMBSTONES,
        budget: str | int | Budget = "64MB",
        shards: int | None = None,
        fold_every: str = FOLD_EVERY,
    ) -> Self:
        """Keep a relation current with a table, from the table's changes; see `dovetail.follow` for the parameters.

        The flow continues with the changes that were applied: of each key in a micro-batch the last one, unless late.
        """
        names = _names(keys)
        path = relation.path if isinstance(relation, Relation) else str(local_path(relation, "relation"))
        kept_columns = columns_to_keep(self._here().schema, names, columns, open_kept(path))
        check_key_columns(self._here().schema, names)
        following = Following.of(keep_tombstones)
        actions = partial(with_actions, keys=names, sequence_by=sequence_by, apply_as_deletes=apply_as_deletes)
        changes = self._with_columns(actions)
        arrivals = Arrivals.of(changes._here())
        key = changes._key(arrivals, names)
        action, sequence, problem = (arrivals.ours(name) for name in ACTION_COLUMNS)
        stored = stored_sequence_of(arrivals.schema, sequence_by, kept_columns)
        kinds = arrivals.arrow()
        attributes = tuple((arrivals.ours(name), name) for name in kept_columns if name != stored)
        more = [*((name, kinds.field(ours).type) for ours, name in attributes), (stored, pa.int64())]
        kept = changes._relation(arrivals, path, key, more, shards)
        emitted = [pair for pair in _same(arrivals) if pair[1].name not in ACTION_COLUMNS]
        logic = FollowChanges(
            key, kept.is_hashed, tuple(ours for ours, _ in emitted), action, sequence, problem, stored, attributes
        )
        settings = {"sequence_by": sequence_by, "apply_as_deletes": apply_as_deletes, "columns": kept_columns}
        return changes._kept(
            "follow",
            arrivals,
            kept,
            logic,
            budget,
            fold_every,
            order=[sequence, action],
            results=emitted,
            settings=settings,
            following=following,
        )

    # ================================================================ pieces

    def _key(self, arrivals: Arrivals, on: On) -> tuple[tuple[str, str], ...]:
        pairs = list(on.items()) if isinstance(on, Mapping) else [(name, name) for name in _names(on)]
        if not pairs or len({mine for mine, _ in pairs}) < len(pairs):
            raise PlanError(f"on={on!r} names no key.", hint="Name each column of the key once.")
        check_key_columns(arrivals.schema, [mine for mine, _ in pairs if arrivals.ours(mine)])
        return tuple((arrivals.ours(mine), theirs) for mine, theirs in pairs)

    def _relation(
        self,
        arrivals: Arrivals,
        relation: Place,
        key: tuple[tuple[str, str], ...],
        more: Sequence[tuple[str, pa.DataType]],
        shards: int | None,
        is_unique: bool = True,
    ) -> KeptRelation:
        path = relation.path if isinstance(relation, Relation) else str(local_path(relation, "relation"))
        kinds = arrivals.arrow()
        names = [theirs for _, theirs in key]
        repeated = [name for name, _ in more if name in names]
        if repeated:
            raise PlanError(f"Column {repeated[0]!r} would be twice in the relation.", hint="Rename it.")
        schema = kept_schema([*((theirs, kinds.field(ours).type) for ours, theirs in key), *more])
        found = open_kept(path)
        if shards is not None and (isinstance(shards, bool) or not isinstance(shards, int) or shards < 1):
            raise PlanError(f"shards={shards!r}: a relation has at least one shard.")
        if found is not None and shards not in (None, found.num_shards):
            raise PlanError(f"shards={shards}: the relation at {path} has {found.num_shards}.", hint="Leave it out.")
        parallelism = max(1, self._here().sparkSession.sparkContext.defaultParallelism)
        count = found.num_shards if found is not None else shards or parallelism
        kept = KeptRelation(path, schema, key, code_kind(schema, names), count, is_unique)
        if found is not None:
            kept.check(found)
        return kept

    def _require_new(self, arrivals: Arrivals, column: str) -> None:
        if not isinstance(column, str) or not column or column in arrivals.schema.names:
            raise PlanError(f"The flow has a column {column!r} already.", hint="Choose another name for the new one.")

    def _kept(
        self,
        kind: str,
        arrivals: Arrivals,
        relation: KeptRelation,
        transformation: Transformation | FollowChanges,
        budget: str | int | Budget,
        fold_every: str,
        *,
        computed: Mapping[str, Column] | None = None,
        order: Sequence[str] = (),
        results: Sequence[tuple[str, T.StructField]],
        settings: Mapping[str, Any],
        following: Following | None = None,
    ) -> Self:
        name = self._step_name(kind)
        fold_every_ms = parse_duration_ms("fold_every", fold_every)
        parts = (name, kind, arrivals, relation, transformation, Budget.parse(budget), fold_every_ms)
        step: Step = KeptStep(*parts, computed or {}, order, results, settings, following)
        return self._then(step)


def _names(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _same(arrivals: Arrivals) -> list[tuple[str, T.StructField]]:
    return list(zip(arrivals.names, arrivals.schema, strict=True))


def _compared(
    arrivals: Arrivals, key: Sequence[tuple[str, str]], names: Sequence[str] | None, left_out: Sequence[str]
) -> list[str]:
    """Internal names of the compared columns."""
    keys = [ours for ours, _ in key]
    if names is None:
        chosen = [name for name in arrivals.names if name not in keys and name not in left_out]
    else:
        chosen = [arrivals.ours(name) for name in names]
    if not chosen or any(name in keys for name in chosen):
        raise PlanError("There must be columns to compare, and none of the key.", hint="Name some.")
    return chosen


def _hash_of(names: Sequence[str]) -> Column:
    """A hash that also covers which columns are NULL: Spark's own skips NULLs."""
    parts = [part for name in names for part in (F.col(name), F.col(name).isNull())]
    return F.xxhash64(*parts)
