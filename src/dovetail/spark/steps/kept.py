"""Transformations with a relation that the flow keeps, as steps of the commit protocol.

The step is the relation's only writer. Its changes are state of its shards, named by the flow's commits. The driver
regularly folds the changes of the last commit into a new version of the relation, see `dovetail.spark.steps.folds`. The
next intent names that version, and its commit names it together with the remaining state. After a crash in between, the
next start finds the version, or folds the same changes again: they replace the rows of their keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from dovetail.core.errors import PlanError, RelationNotFound, SchemaError
from dovetail.core.memory import Budget
from dovetail.relation import Relation
from dovetail.relation.format import CODE_COLUMN, SHARD_COLUMN, CodeKind
from dovetail.relation.keys import check_schema
from dovetail.relation.local import nullable_fields
from dovetail.runtime.follow import FollowTask
from dovetail.runtime.kept import KeptTask, needs_folding
from dovetail.runtime.shard_job import ShardTask
from dovetail.spark.flow.routing import is_sortable
from dovetail.spark.flow.step import BatchClock, Step, StepExplanation, StepRecord
from dovetail.spark.flow.store import FlowStore
from dovetail.spark.plan.codes import code_column, shard_column
from dovetail.spark.plan.payload import decoded_columns, encode, encoded_schema, is_plain
from dovetail.spark.steps.flow_pins import FlowPin
from dovetail.spark.steps.folds import Folds, batch_of, has_changes, is_due
from dovetail.spark.steps.follow_step import Following
from dovetail.spark.steps.named_versions import named_versions
from dovetail.warehouse.following import FollowChanges
from dovetail.warehouse.transformations import SurrogateKeys, Transformation

__all__ = ["Arrivals", "KeptRelation", "KeptStep"]


@dataclass(frozen=True)
class Arrivals:
    """The rows that reach a step, with internal column names, in the same order."""

    schema: T.StructType
    names: tuple[str, ...]

    @classmethod
    def of(cls, rows: DataFrame) -> "Arrivals":
        """From an empty DataFrame with the input columns."""
        return cls(rows.schema, tuple(f"__s{number}" for number in range(len(rows.schema))))

    def ours(self, name: str) -> str:
        """The internal name of a column; a `PlanError` if there is none."""
        found = [number for number, other in enumerate(self.schema.names) if other == name]
        if len(found) != 1:
            many = "no column" if not found else "two columns"
            raise PlanError(f"The flow has {many} {name!r} here.", hint=f"It has {', '.join(self.schema.names)}.")
        return self.names[found[0]]

    def renamed(self) -> T.StructType:
        """The columns under their internal names."""
        pairs = zip(self.names, self.schema, strict=True)
        return T.StructType([T.StructField(name, f.dataType, f.nullable, f.metadata) for name, f in pairs])

    def arrow(self) -> pa.Schema:
        """The columns under their internal names, as encoded for Python."""
        return to_arrow_schema(encoded_schema(self.renamed()), timezone="UTC")


@dataclass(frozen=True)
class KeptRelation:
    """The relation of a step: existing, or to be created when the flow starts."""

    path: str
    schema: pa.Schema
    key: tuple[tuple[str, str], ...]  # (internal name of the stream's column, the relation's column)
    code_kind: CodeKind
    shards: int
    is_unique: bool = True

    @property
    def key_names(self) -> tuple[str, ...]:
        return tuple(theirs for _, theirs in self.key)

    @property
    def is_hashed(self) -> bool:
        """Whether different keys may have equal codes."""
        return self.code_kind == "xxhash64"

    def open_or_make(self) -> None:
        """Create it, empty, if it does not exist; refuse one that does not fit."""
        found = open_kept(self.path)
        if found is None:
            check_schema(self.schema, self.key_names)
            empty = self.schema.empty_table()
            Relation.build(empty, self.path, on=self.key_names, shards=self.shards, unique=self.is_unique)
        else:
            self.check(found)

    def check(self, relation: Relation) -> None:
        """Refuse a relation with another key or other columns."""
        if relation.key != self.key_names:
            raise PlanError(
                f"The relation at {self.path} has the key {', '.join(relation.key)}, not {', '.join(self.key_names)}.",
                hint="Use another path, or the columns of its key.",
            )
        for column in self.schema:
            number = relation.schema.get_field_index(column.name)
            there = None if number < 0 else relation.schema.field(number).type
            if there != column.type:
                has = "no such column" if there is None else f"{there}"
                raise SchemaError(
                    f"Column {column.name!r} is {column.type} here; the relation at {self.path} has {has}.",
                    hint="Cast it before, or use another path.",
                )


def open_kept(path: str) -> Relation | None:
    """The relation at a path, or None."""
    try:
        return Relation.open(path)
    except RelationNotFound:
        return None


@dataclass
class KeptStep(Step):
    """A transformation with a kept relation."""

    name: str
    kind: str
    arrivals: Arrivals
    relation: KeptRelation
    transformation: Transformation | FollowChanges
    budget: Budget  # of changes that are in no version of the relation yet
    fold_every_ms: int  # the longest time, in batch time, that changes are in no version
    computed: Mapping[str, Column]  # columns that the JVM adds, by internal names
    order: Sequence[str]  # internal names of the columns that order the rows of a key
    results: Sequence[tuple[str, T.StructField]]  # (internal name, column that the user sees)
    settings: Mapping[str, Any] = field(default_factory=dict)  # what else state depends on; JSON-serializable
    following: Following | None = None  # with a `FollowChanges`

    state_ignores = ("name", "input", "output")  # it holds rows of the relation, not of the stream

    def __post_init__(self) -> None:
        self.shards, self.budget_bytes = self.relation.shards, self.budget.total_bytes
        self._shard_bytes = max(1, self.budget_bytes // self.shards)
        self.output = T.StructType([column for _, column in self.results])
        self._carried = T.StructType(
            [T.StructField(name, column.dataType, True, column.metadata) for name, column in self.results]
        )
        self.mapped_schema = encoded_schema(self._carried)
        self.carried = tuple(self._carried.names)
        self._columns = decoded_columns(self._carried, self.output.names)
        code = T.StructField(CODE_COLUMN, T.LongType())
        hashes = [T.StructField(name, T.LongType()) for name in self.computed]
        own = T.StructType([code, *encoded_schema(self.arrivals.renamed()), *hashes])
        self._stream_schema = to_arrow_schema(own, timezone="UTC")
        keys = [ours for ours, _ in self.relation.key]
        arriving = self.arrivals.renamed()
        hashed = arriving.names if self.computed else keys
        self.takes_carried = all(is_plain(arriving[name].dataType) for name in hashed)
        first = [CODE_COLUMN, *keys, *self.order]
        others = [column.name for column in own if column.name not in first and is_sortable(column.dataType)]
        self.sort_by = [*dict.fromkeys(first), *others]

    def open(self, store: FlowStore) -> None:
        super().open(store)
        self.relation.open_or_make()
        kept = self.relation
        if self.following is not None:
            self.following.claim(kept.path, store)
        parts = (self.name, store, kept.path, kept.key_names, kept.is_hashed, self.budget, kept.check)
        self._folds = Folds(*parts, records_offsets=self.following is not None)
        self._pin = FlowPin(kept.path, store, self.name)
        self._pin.hold(named_versions(store, self.name) or ())

    def fingerprint(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "shards": self.shards,
            "hash": f"{self.relation.code_kind}, pmod(xxhash64(code, 42), shards)",
            "input": [f"{f.name} {f.dataType.simpleString()}" for f in self.arrivals.schema],
            "output": [f"{f.name} {f.dataType.simpleString()}" for f in self.output],
            "on": [f"{ours} = {theirs}" for ours, theirs in self._named_key()],
            "relation": self.relation.path,
            **self.settings,
        }

    def _named_key(self) -> list[tuple[str, str]]:
        users = dict(zip(self.arrivals.names, self.arrivals.schema.names, strict=True))
        return [(users[ours], theirs) for ours, theirs in self.relation.key]

    def explanation(self) -> StepExplanation:
        plain = super().explanation()
        return replace(plain, facts={**plain.facts, "fold every": f"{self.fold_every_ms / 1000:g} seconds"})

    def route(self, inputs: Sequence[DataFrame]) -> DataFrame:
        (df,) = inputs
        return self._placed(encode(self._hashed(df.toDF(*self.arrivals.names))))

    def route_carried(self, rows: DataFrame, names: Sequence[str]) -> DataFrame:
        """The same for the output of another step: encoding does not change the hashed columns."""
        pairs = zip(names, self.arrivals.names, strict=True)
        return self._placed(self._hashed(rows.select(*(F.col(name).alias(ours) for name, ours in pairs))))

    def _hashed(self, rows: DataFrame) -> DataFrame:
        """Rows under internal names, with codes and computed columns."""
        keys = [ours for ours, _ in self.relation.key]
        code = code_column(self.arrivals.renamed(), keys, self.relation.code_kind)
        extra = {CODE_COLUMN: code, **self.computed}
        return rows.select(*(column.alias(name) for name, column in extra.items()), *self.arrivals.names)

    def _placed(self, rows: DataFrame) -> DataFrame:
        shard = shard_column(F.col(CODE_COLUMN), self.shards).alias(SHARD_COLUMN)
        return rows.select(shard, CODE_COLUMN, *self.arrivals.names, *self.computed)

    def decide(self, previous: Mapping[str, StepRecord] | None, clock: BatchClock) -> dict[str, Any]:
        """The relation's version: the last one, or a new one with all changes so far."""
        times = {"time_ms": clock.time_ms, "folded_ms": clock.time_ms}
        if previous is None:
            relation = Relation.open(self.relation.path)
            self._folds.require_not_ahead(relation)
            self._pin.hold({relation.version})
            return {"version": relation.version, "batch": 0, **times, **self._first(relation)}
        own = previous[self.name]
        batch = batch_of(own, self.store)
        before = int(own.states[0].values["version"])
        version = self._folds.found(own, batch)
        if version is None and needs_folding(own.reports, self._shard_bytes):
            version = self._folds.fold(own, batch)
        if version is None:
            values = own.states[0].values
            version = before
            times["folded_ms"] = values.get("folded_ms", clock.time_ms)
        elif clock.previous_ms is not None:
            times["folded_ms"] = clock.previous_ms
        self._pin.hold({before, version})
        return {"version": version, "batch": batch + 1, **times}

    def published(self, record: StepRecord, batch: int) -> None:
        """Fold committed changes if readers have waited long enough."""
        if has_changes(record) and is_due(record, self.fold_every_ms):
            self._folds.fold(record, batch)
            self._folds.vacuum_if_due()

    def settle(self, record: StepRecord, batch: int) -> None:
        """Fold all committed changes, and remove versions that are no longer needed."""
        if has_changes(record):
            self._folds.fold(record, batch)
        self._folds.vacuum()

    def _first(self, relation: Relation) -> dict[str, Any]:
        if not isinstance(self.transformation, SurrogateKeys):
            return {}
        column = self.transformation.column
        greatest = 0
        for number in range(relation.num_shards):
            for block in relation.shard(number, columns=[column]).blocks(1 << 20):
                greatest = max(greatest, pc.max(block.rows.column(column)).as_py() or 0)
        return {"first_counter": greatest // relation.num_shards + 1}

    def task(self, is_last: bool) -> ShardTask:
        relation, logic = self.relation, self.transformation
        about = (relation.path, relation.key_names, relation.is_hashed)
        if isinstance(logic, FollowChanges):
            assert self.following is not None, "a follower knows how long it keeps tombstones"
            keep_ms = self.following.keep_tombstones_ms
            return FollowTask(*about, logic, self._stream_schema, self._shard_bytes, keep_ms)
        return KeptTask(*about, logic, self._stream_schema, self._shard_bytes)

    def finish(self, mapped: DataFrame) -> DataFrame:
        return mapped.select(*self._columns)


def kept_schema(columns: Sequence[tuple[str, pa.DataType]]) -> pa.Schema:
    return nullable_fields(pa.schema([pa.field(name, kind) for name, kind in columns]))
