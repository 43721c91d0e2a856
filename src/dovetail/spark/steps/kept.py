"""Transformations with a relation that the flow keeps, as steps of the commit protocol.

The step is the relation's only writer. What it changes is state of its shards, named by the flow's commits. Before the
changes outgrow their budget, the driver folds those of the last commit into a new version of the relation, before the
next micro-batch begins; the intent names that version, and its commit names it together with the state that is left. A
crash in between folds the same changes again, which changes nothing: they replace the rows of their keys.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from dovetail.errors import PlanError, RelationNotFound, SchemaError
from dovetail.faultpoints import fault_point
from dovetail.memory import Budget
from dovetail.relation import Relation
from dovetail.relation.format import CODE_COLUMN, SHARD_COLUMN, CodeKind
from dovetail.relation.keys import check_schema
from dovetail.relation.local import nullable_fields
from dovetail.spark.codes import code_column, shard_column
from dovetail.spark.payload import decode, encode, encoded_schema
from dovetail.spark.routing import is_sortable
from dovetail.spark.steps import BatchClock, Step, StepRecord
from dovetail.state import FlowStore, read_table
from dovetail.warehouse.kept_rows import Level, merged_levels
from dovetail.warehouse.kept_task import KeptTask, levels_of, needs_folding
from dovetail.warehouse.transformations import SurrogateKeys, Transformation

__all__ = ["Arrivals", "KeptRelation", "KeptStep"]


@dataclass(frozen=True)
class Arrivals:
    """The rows that reach a step, their columns under names of ours.

    Attributes
    ----------
    schema
        As the user sees it.
    names
        Our names, in the same order.
    """

    schema: T.StructType
    names: tuple[str, ...]

    @classmethod
    def of(cls, rows: DataFrame) -> "Arrivals":
        """Of an empty DataFrame with the columns that arrive."""
        return cls(rows.schema, tuple(f"__s{number}" for number in range(len(rows.schema))))

    def ours(self, name: str) -> str:
        """Our name of a column; a `PlanError` if there is none."""
        found = [number for number, other in enumerate(self.schema.names) if other == name]
        if len(found) != 1:
            many = "no column" if not found else "two columns"
            raise PlanError(f"The flow has {many} {name!r} here.", hint=f"It has {', '.join(self.schema.names)}.")
        return self.names[found[0]]

    def renamed(self) -> T.StructType:
        """The columns under our names."""
        pairs = zip(self.names, self.schema, strict=True)
        return T.StructType([T.StructField(name, f.dataType, f.nullable, f.metadata) for name, f in pairs])

    def arrow(self) -> pa.Schema:
        """The columns under our names, as they travel."""
        return to_arrow_schema(encoded_schema(self.renamed()), timezone="UTC")


@dataclass(frozen=True)
class KeptRelation:
    """The relation of a step: opened, or to be made when the flow starts.

    Attributes
    ----------
    path
        Its directory.
    schema
        Its columns.
    key
        Pairs (our name of the stream's column, the relation's column).
    code_kind, shards
        How rows become codes and codes shards.
    is_unique
        Whether a key has one row.
    """

    path: str
    schema: pa.Schema
    key: tuple[tuple[str, str], ...]
    code_kind: CodeKind
    shards: int
    is_unique: bool = True

    @property
    def key_names(self) -> tuple[str, ...]:
        """The key columns, by the relation's names."""
        return tuple(theirs for _, theirs in self.key)

    @property
    def is_hashed(self) -> bool:
        """Whether equal codes may stand for different keys."""
        return self.code_kind == "xxhash64"

    def open_or_make(self) -> None:
        """Make it, empty, if there is none; refuse one that does not fit."""
        found = open_kept(self.path)
        if found is None:
            check_schema(self.schema, self.key_names)
            empty = self.schema.empty_table()
            Relation.build(empty, self.path, on=self.key_names, shards=self.shards, unique=self.is_unique)
        else:
            self.check(found)

    def check(self, relation: Relation) -> None:
        """Refuse a relation that has another key or other columns."""
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
    """The relation at a path, if there is one."""
    try:
        return Relation.open(path)
    except RelationNotFound:
        return None


@dataclass
class KeptStep(Step):
    """A transformation with a kept relation.

    Attributes
    ----------
    name, kind
        Which step it is, and what it does.
    arrivals
        The rows that reach it.
    relation, transformation
        What it keeps, and what it does.
    budget
        The most memory that changes take which are in no version of the relation yet.
    computed
        Columns that the JVM adds, by our names.
    order
        Our names of the columns that order the rows of a key.
    results
        What tasks put out: (name in it, column that the user sees), in order.
    settings
        What else its state depends on, ready for JSON.
    """

    name: str
    kind: str
    arrivals: Arrivals
    relation: KeptRelation
    transformation: Transformation
    budget: Budget
    computed: Mapping[str, Column]
    order: Sequence[str]
    results: Sequence[tuple[str, T.StructField]]
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shards, self.budget_bytes = self.relation.shards, self.budget.total_bytes
        self._shard_bytes = max(1, self.budget_bytes // self.shards)
        self.output = T.StructType([column for _, column in self.results])
        self._carried = T.StructType(
            [T.StructField(name, column.dataType, True, column.metadata) for name, column in self.results]
        )
        self.mapped_schema = encoded_schema(self._carried)
        code = T.StructField(CODE_COLUMN, T.LongType())
        hashes = [T.StructField(name, T.LongType()) for name in self.computed]
        own = T.StructType([code, *encoded_schema(self.arrivals.renamed()), *hashes])
        self._stream_schema = to_arrow_schema(own, timezone="UTC")
        keys = [ours for ours, _ in self.relation.key]
        first = [CODE_COLUMN, *keys, *self.order]
        others = [column.name for column in own if column.name not in first and is_sortable(column.dataType)]
        self.sort_by = [*dict.fromkeys(first), *others]

    def open(self, store: FlowStore) -> None:
        """Make the relation if there is none."""
        super().open(store)
        self.relation.open_or_make()

    def fingerprint(self) -> dict[str, Any]:
        """What its state depends on."""
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

    def route(self, inputs: Sequence[DataFrame]) -> DataFrame:
        """The stream with codes, shards and computed columns."""
        (df,) = inputs
        rows = df.toDF(*self.arrivals.names)
        keys = [ours for ours, _ in self.relation.key]
        code = code_column(self.arrivals.renamed(), keys, self.relation.code_kind)
        extra = {CODE_COLUMN: code, **self.computed}
        rows = rows.select(*(column.alias(name) for name, column in extra.items()), *rows.columns)
        shard = shard_column(F.col(CODE_COLUMN), self.shards).alias(SHARD_COLUMN)
        names = [CODE_COLUMN, *self.arrivals.names, *self.computed]
        return encode(rows).select(shard, *names)

    def decide(self, previous: Mapping[str, StepRecord] | None, clock: BatchClock) -> dict[str, Any]:
        """The relation's version: the last one, or a new one with all changes so far."""
        if previous is None:
            relation = Relation.open(self.relation.path)
            return {"version": relation.version, **self._first(relation)}
        own = previous[self.name]
        version = int(own.states[0].values["version"])
        if needs_folding(own.reports, self._shard_bytes):
            version = self._folded(own)
        return {"version": version}

    def _first(self, relation: Relation) -> dict[str, Any]:
        if not isinstance(self.transformation, SurrogateKeys):
            return {}
        column = self.transformation.column
        greatest = 0
        for number in range(relation.num_shards):
            for block in relation.shard(number, columns=[column]).blocks(1 << 20):
                greatest = max(greatest, pc.max(block.rows.column(column)).as_py() or 0)
        return {"first_counter": greatest // relation.num_shards + 1}

    def _folded(self, previous: StepRecord) -> int:
        """Make a version of the relation that has all changes of the last commit."""
        shards = []
        for state in previous.states:
            tables = [(file, read_table(self.store.state_root, file)) for file in state.files]
            shards.append(levels_of(tables, self.relation.key_names, self.relation.is_hashed))
        size = sum(level.table.nbytes for levels in shards for level in levels)
        # More than the budget cannot be merged within it. One level after the other comes to the same.
        turns = [shards] if size <= self.budget.total_bytes else _turns(shards)
        fault_point("kept.fold.before")
        relation = Relation.open(self.relation.path)
        self.relation.check(relation)
        for turn in turns:
            relation = relation.upsert(self._merged(turn).select(relation.schema.names).cast(relation.schema))
        fault_point("kept.fold.after")
        return relation.version

    def _merged(self, shards: Sequence[Sequence[Level]]) -> pa.Table:
        key, is_hashed = self.relation.key_names, self.relation.is_hashed
        parts = [merged_levels(levels, key, is_hashed).drop_columns([CODE_COLUMN]) for levels in shards if levels]
        return pa.concat_tables(parts)

    def task(self, is_last: bool) -> KeptTask:
        """The work of one shard."""
        return KeptTask(
            path=self.relation.path,
            key=self.relation.key_names,
            is_hashed=self.relation.is_hashed,
            transformation=self.transformation,
            stream_schema=self._stream_schema,
            budget_bytes=self._shard_bytes,
        )

    def finish(self, mapped: DataFrame) -> DataFrame:
        """The user's columns."""
        return decode(mapped, self._carried).toDF(*self.output.names)


def kept_schema(columns: Sequence[tuple[str, pa.DataType]]) -> pa.Schema:
    """The schema of a relation with these columns."""
    return nullable_fields(pa.schema([pa.field(name, kind) for name, kind in columns]))


def _turns(shards: Sequence[Sequence[Level]]) -> list[list[list[Level]]]:
    """The levels of all shards in turns, the oldest first, one of each shard at most."""
    return [[[level] for level in turn if level is not None] for turn in zip_longest(*shards)]
