"""The plan of a join between a streaming or batch DataFrame and a relation, checked before any data moves.

A plan has two halves. The JVM's half is here: `JoinPlan.prepare` brings the stream into the form that tasks read
(internal column names, aligned keys, codes, shards), and `JoinPlan.finish` gives the tasks' output the names, order,
types, nullability and metadata of Spark's own ``join(..., on=[...])``. The tasks' half is the `JoinRecipe`, which is
picklable and independent of Spark.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from dovetail.core.errors import PlanError
from dovetail.core.memory import Budget
from dovetail.costs.explain import Objective, Strategy
from dovetail.joins.conditions import Condition
from dovetail.joins.options import FlowOptions, JoinOptions
from dovetail.joins.shedding import SheddingPolicy
from dovetail.joins.spec import JoinType, KeyNames, columns_needed, key_pairs
from dovetail.relation import Disk, IoMode, Relation
from dovetail.relation.format import CODE_COLUMN, SHARD_COLUMN
from dovetail.runtime.join_recipe import JoinRecipe, RenamedCondition
from dovetail.spark.plan.alignment import KeyColumn, aligned_key, is_aligned
from dovetail.spark.plan.codes import code_column, shard_column
from dovetail.spark.plan.condition_text import parse_condition
from dovetail.spark.plan.host import concurrent_tasks, planned_costs
from dovetail.spark.plan.names import NameResolver
from dovetail.spark.plan.payload import decoded_columns, encode, encoded_schema, is_plain
from dovetail.spark.plan.relation_jobs import spark_schema

__all__ = ["JoinName", "JoinPlan", "Routing", "free_prefix", "plan_join"]

JoinName = Literal[
    "inner", "left", "leftouter", "left_outer", "semi", "leftsemi", "left_semi", "anti", "leftanti", "left_anti"
]
"""The join types of `enrich`, under all names that Spark has for them."""

Routing = Literal["none", "shard", "replicate"]
"""Where the stream's rows go: nowhere, to the shard of their code, or to every shard."""

_JOIN_TYPES: dict[str, JoinType] = {
    "inner": "inner",
    "left": "left",
    "leftouter": "left",
    "semi": "semi",
    "leftsemi": "semi",
    "anti": "anti",
    "leftanti": "anti",
}


@dataclass(frozen=True)
class JoinPlan:
    """A validated join; created by `plan_join`."""

    relation: Relation  # the version planned with
    recipe: JoinRecipe  # for the tasks
    on: tuple[tuple[str, str], ...]  # pairs (stream column, relation column) of the key
    budget: Budget
    strategy: Strategy
    objective: Objective
    rate: float | None
    shed: SheddingPolicy | None  # what to drop when more arrives than may wait; None: nothing
    output: T.StructType  # the columns of the result, as the user sees them
    carried: tuple[str, ...]  # the names of these columns in the tasks' output, in its order
    mapped_schema: T.StructType  # of the tasks' output, for ``mapInArrow``
    stream_schema: pa.Schema  # of the batches of `JoinRecipe.stream_batch`
    tasks: int  # how many tasks share the budget if rows are not shuffled
    takes_encoded: bool  # whether `prepare_carried` can compute codes from encoded key columns
    _stream_names: tuple[str, ...]
    _aligned: tuple[tuple[str, Column], ...]
    _code: Column | None

    @property
    def has_equality(self) -> bool:
        """Whether rows are matched by a key; without one, every stream row must meet every shard."""
        return bool(self.on)

    def prepare(self, df: DataFrame, routing: Routing = "none") -> DataFrame:
        """The stream as tasks read it.

        With a `routing`, the first column is ``__shard``, and a partition has rows of at most one shard. Then comes
        ``__code``, unless the recipe's `code_from` names a column for it.
        """
        prepared = encode(self.with_keys(df)).select(*self._columns)
        if routing == "none":
            return prepared
        return self.place(prepared, routing).repartitionById(self.recipe.num_shards, F.col(SHARD_COLUMN))

    def with_keys(self, df: DataFrame) -> DataFrame:
        """The stream under internal names, and beside it the keys that had to be cast."""
        rows = df.toDF(*self._stream_names)
        if self._aligned:
            rows = rows.select("*", *(column.alias(name) for name, column in self._aligned))
        return rows

    def prepare_carried(self, rows: DataFrame, names: Sequence[str]) -> DataFrame:
        """Like `prepare`, for rows whose columns are already encoded under these names; requires `takes_encoded`.

        Other columns are left out.
        """
        own = [F.col(name).alias(ours) for name, ours in zip(names, self._stream_names, strict=True)]
        rows = rows.select(*own)
        if self._aligned:
            rows = rows.select("*", *(column.alias(name) for name, column in self._aligned))
        # Without a code to compute, the columns are complete.
        return rows if len(self._columns) == len(own) else rows.select(*self._columns)

    def place(self, prepared: DataFrame, routing: Routing) -> DataFrame:
        """Add the routing to rows prepared without one, in their partitions."""
        shards = self.recipe.num_shards
        if routing == "shard":
            assert self._code is not None, "rows without a code have no shard"
            code = self._code if self.recipe.code_from is not None else F.col(CODE_COLUMN)
            shard = shard_column(code, shards)
        else:
            shard = F.explode(F.sequence(F.lit(0), F.lit(shards - 1)))
        return prepared.select(shard.alias(SHARD_COLUMN), "*")

    @cached_property
    def _columns(self) -> list[Column]:
        """The columns that tasks read, from the renamed and the aligned columns of the stream."""
        columns: list[Column] = [F.col(name) for name in self._stream_names]
        rechecked = {ours for ours, _ in self.recipe.on}
        columns += [F.col(name) for name, _ in self._aligned if name in rechecked]
        if self._code is not None and self.recipe.code_from is None:
            columns.insert(0, self._code.alias(CODE_COLUMN))
        return columns

    def finish(self, mapped: DataFrame) -> DataFrame:
        """The tasks' output as the user's result; columns not in `carried` are left out."""
        return mapped.select(*self._result)

    @property
    def stream_names(self) -> tuple[str, ...]:
        """The internal names of the stream's columns, in order."""
        return self._stream_names

    @property
    def code(self) -> Column | None:
        """The code of a row of `with_keys`; None without equality."""
        return self._code

    @property
    def relation_fields(self) -> list[T.StructField]:
        """The relation's columns in the result."""
        return list(self.output.fields[len(self._stream_names) :])

    def as_arrived(self, spark: SparkSession, rows: pa.Table, stream: T.StructType) -> DataFrame:
        """Stream rows kept by a task, under internal names, as the user had them."""
        named = _renamed(stream, self._stream_names)
        df = spark.createDataFrame(rows.select(list(self._stream_names)), encoded_schema(named))
        return df.select(*decoded_columns(named, stream.names))

    @cached_property
    def _result(self) -> list[Column]:
        """The columns of the result; cached, because describing them to the JVM takes time."""
        return decoded_columns(_renamed(self.output, self.carried), self.output.names)


def plan_join(
    df: DataFrame,
    relation: Relation,
    *,
    on: KeyNames | None = None,
    how: JoinName = "inner",
    select: str | Sequence[str] | None = None,
    condition: str | Condition | None = None,
    budget: str | int | Budget = "256MB",
    strategy: Strategy = "auto",
    objective: Objective = "rate",
    rate: float | None = None,
    io: IoMode | Disk = "map",
    flow: FlowOptions | None = None,
) -> JoinPlan:
    """Plan the join of a DataFrame, streaming or batch, with a version of a relation.

    Parameters
    ----------
    on
        The key: names that both sides have, in any order; names of the stream in the order of the relation's key; or a
        mapping from stream to relation names. None: the relation's key. An empty list: no equality, only `condition`.
    how
        ``inner``, ``left``, ``semi`` or ``anti``, or Spark's other names for them.
    select
        The relation's columns to emit besides the key, in this order; None: all.
    condition
        An additional condition: a condition object, or comparisons of columns of both sides joined by AND, such as
        ``"valid_from <= ts AND ts < valid_to"``.
    flow
        Options of flows; None if the join is not part of a flow.
    """
    spark = df.sparkSession
    join_type = _join_type(how)
    resolver = NameResolver.of(spark)
    stream, table = df.schema, spark_schema(relation)
    keys = _keys(on, relation, stream, resolver)
    selected = _selected(select, relation, resolver)
    prefix = free_prefix(relation)
    names = tuple(f"{prefix}{number}" for number in range(len(stream)))
    pairs = [KeyColumn(names[number], stream[number], table[theirs]) for number, theirs in keys]
    casts = {f"{prefix}key{place}": key for place, key in enumerate(pairs) if not is_aligned(key)}
    aligned = tuple((name, aligned_key(spark, key)) for name, key in casts.items())
    coded = [next((name for name, cast in casts.items() if cast is key), key.column) for key in pairs]
    is_hashed = relation.code_kind == "xxhash64"
    ours = coded if is_hashed else [key.column for key in pairs]
    on_ours = tuple((name, key.relation.name) for name, key in zip(ours, pairs, strict=True))
    parsed = _condition(condition, stream, relation, names, resolver)
    JoinOptions(
        strategy=strategy,
        objective=objective,
        rate=rate,
        how=join_type,
        has_equality=bool(keys),
        has_condition=parsed is not None,
        flow=flow,
    ).require_possible()
    if not keys:
        strategy = "mesh"
    # The type of timestamps includes the session's time zone.
    arrow = to_arrow_schema(
        encoded_schema(_renamed(stream, names)), timezone=spark.conf.get("spark.sql.session.timeZone")
    )
    put_out = _relation_output(relation, keys, join_type, selected)
    needed = columns_needed(relation, arrow, on_ours, join_type, selected, parsed)
    order = _stream_order(stream, keys, on, resolver)
    of_stream = [names[number] for number in order]
    carried = (*of_stream, *(f"{prefix}relation{place}" for place in range(len(put_out))))
    output = T.StructType([*(stream[number] for number in order), *(table[name] for name in put_out)])
    recipe = JoinRecipe(
        path=relation.path,
        filesystem=relation.filesystem,
        relation_id=relation.relation_id,
        version=relation.version,
        relation_columns=tuple(needed),
        relation_schema=pa.schema([f for f in relation.schema if f.name in {*needed, *relation.key}]),
        key=relation.key,
        code_kind=relation.code_kind,
        num_shards=relation.num_shards,
        on=on_ours,
        code_from=on_ours[0][0] if keys and not is_hashed and not casts else None,
        how=join_type,
        select=tuple(put_out),
        condition=parsed,
        io=io,
        emitted=(*of_stream, *put_out),
        costs=planned_costs(),
    )
    coded_schema = T.StructType([T.StructField(n, k.relation.dataType) for n, k in zip(coded, pairs, strict=True)])
    return JoinPlan(
        relation=relation,
        recipe=recipe,
        on=tuple((stream[number].name, theirs) for number, theirs in keys),
        budget=Budget.parse(budget),
        strategy=strategy,
        objective=objective,
        rate=rate,
        shed=None if flow is None else flow.policy,
        output=output,
        carried=carried,
        mapped_schema=encoded_schema(_renamed(output, carried)),
        stream_schema=_operator_schema(arrow, recipe),
        tasks=concurrent_tasks(spark),
        takes_encoded=all(is_plain(stream[number].dataType) for number, _ in keys),
        _stream_names=names,
        _aligned=aligned,
        _code=code_column(coded_schema, coded, relation.code_kind) if keys else None,
    )


# -------------------------------------------------------------------- what was asked for


def _join_type(how: str) -> JoinType:
    found = _JOIN_TYPES.get(how.lower().replace("_", "")) if isinstance(how, str) else None
    if found is None:
        raise PlanError(f"how={how!r} is not a join type of enrich.", hint="Use inner, left, semi or anti.")
    return found


def _keys(
    on: KeyNames | None, relation: Relation, stream: T.StructType, resolver: NameResolver
) -> list[tuple[int, str]]:
    """Pairs (number of the stream's column, relation column), in the order of the relation's key."""
    if on is not None and not isinstance(on, str | Mapping | Sequence):
        raise PlanError(f"on={on!r} names no key.", hint="Pass a column name, a list of names, or a mapping of names.")
    if isinstance(on, Mapping):
        named: KeyNames | None = {
            mine: resolver.spelling(theirs, relation.schema.names) or theirs for mine, theirs in on.items()
        }
    elif on is None:
        named = None
    else:
        names = [on] if isinstance(on, str) else list(on)
        if not all(isinstance(name, str) for name in names):
            raise PlanError(f"on={on!r} has something that is not a column name.", hint="Pass names as strings.")
        named = [resolver.spelling(name, relation.key) or name for name in names]
        if len(set(names)) < len(names):
            raise PlanError(f"on={names!r} names a column twice.", hint="Name each key column once.")
    pairs = key_pairs(named, relation.key)
    return [(resolver.number_of(mine, stream.names, "the stream"), theirs) for mine, theirs in pairs]


def _selected(select: str | Sequence[str] | None, relation: Relation, resolver: NameResolver) -> list[str] | None:
    if select is None:
        return None
    names = relation.schema.names
    wanted = [select] if isinstance(select, str) else list(select)
    chosen = [names[resolver.number_of(name, names, "the relation")] for name in wanted]
    repeated = sorted({name for name in chosen if chosen.count(name) > 1})
    if repeated:
        raise PlanError(f"select names {repeated[0]!r} twice.", hint="Name each column once.")
    return chosen


def _condition(
    condition: str | Condition | None,
    stream: T.StructType,
    relation: Relation,
    names: Sequence[str],
    resolver: NameResolver,
) -> RenamedCondition | None:
    if condition is None:
        return None
    if isinstance(condition, str):
        condition = parse_condition(condition, stream.names, relation.schema.names, resolver)
    elif not (hasattr(condition, "mask") and hasattr(condition, "columns")):
        raise PlanError(
            f"condition={condition!r} is not a condition.",
            hint="Pass comparisons between columns as text, or an object of dovetail.joins: Comparison, Range, "
            "AllOf or BatchPredicate.",
        )
    users = stream.names
    return RenamedCondition(
        condition, tuple((ours, name) for ours, name in zip(names, users, strict=True) if users.count(name) == 1)
    )


# -------------------------------------------------------------------- output


def free_prefix(relation: Relation) -> str:
    """A prefix for internal names that no column of the relation starts with."""
    prefix = "__s"
    while any(name.startswith(prefix) for name in relation.schema.names):
        prefix += "_"
    return prefix


def _renamed(schema: T.StructType, names: Sequence[str]) -> T.StructType:
    return T.StructType(
        [T.StructField(name, f.dataType, f.nullable, f.metadata) for name, f in zip(names, schema, strict=True)]
    )


def _operator_schema(arrow: pa.Schema, recipe: JoinRecipe) -> pa.Schema:
    """The schema of stream batches as the operators get them."""
    codes = [pa.field(CODE_COLUMN, pa.int64())] if recipe.on else []
    extra = [pa.field(ours, recipe.relation_schema.field(theirs).type) for ours, theirs in recipe.on]
    return pa.schema([*codes, *arrow, *(field for field in extra if field.name not in arrow.names)])


def _stream_order(
    stream: T.StructType, keys: Sequence[tuple[int, str]], on: KeyNames | None, resolver: NameResolver
) -> list[int]:
    """The stream's columns in the order of the result: the key first, in the requested order."""
    if on is None or isinstance(on, str):
        first = [number for number, _ in keys]
    else:
        first = [resolver.number_of(name, stream.names, "the stream") for name in on]
    return first + [number for number in range(len(stream)) if number not in first]


def _relation_output(
    relation: Relation, keys: Sequence[tuple[int, str]], how: JoinType, selected: Sequence[str] | None
) -> list[str]:
    if how in ("semi", "anti"):
        return []
    of_key = {theirs for _, theirs in keys}
    return [name for name in (relation.schema.names if selected is None else selected) if name not in of_key]
