"""The plan of a join between a streaming or batch DataFrame and a relation, made and checked before any data moves.

A plan has two halves. What the JVM does is on this side: `JoinPlan.prepare` brings the stream to the form that tasks
read (columns under names of ours, keys aligned, codes, shards), and `JoinPlan.finish` gives what tasks put out the
names, order, types, nullability and metadata that Spark's own ``join(..., on=[...])`` would have given it. What a task
does is in the plan's `JoinRecipe`, which is picklable and knows nothing of Spark.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from dovetail.errors import PlanError
from dovetail.memory import Budget
from dovetail.model.explain import Objective, Strategy
from dovetail.operators.conditions import Condition
from dovetail.operators.spec import JoinType, KeyNames, columns_needed, key_pairs
from dovetail.relation import Disk, IoMode, Relation
from dovetail.relation.format import CODE_COLUMN, SHARD_COLUMN
from dovetail.spark.alignment import KeyColumn, aligned_key, is_aligned
from dovetail.spark.codes import code_column, shard_column
from dovetail.spark.condition_text import parse_condition
from dovetail.spark.join_recipe import JoinRecipe, RenamedCondition
from dovetail.spark.names import NameResolver
from dovetail.spark.payload import decode, encode, encoded_schema
from dovetail.spark.relation_jobs import spark_schema

__all__ = ["JoinPlan", "Routing", "plan_join"]

Routing = Literal["none", "shard", "replicate"]
"""Where the rows of the stream go: nowhere, to the shard of their code, or to every shard."""

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
    """A join that was checked; made by `plan_join`.

    Attributes
    ----------
    relation
        The version that was planned with.
    recipe
        What a task needs.
    on
        Pairs (stream column, relation column) of the key, by the names that their owners know.
    budget, strategy, objective
        As asked for.
    output
        The columns of the result, as the user sees them.
    carried
        What the same columns are called in what tasks put out, and in which order.
    mapped_schema
        The schema of what tasks put out, for ``mapInArrow``.
    stream_schema
        The columns of what `JoinRecipe.stream_batch` gives, for a `JoinSpec` before there is data.
    """

    relation: Relation
    recipe: JoinRecipe
    on: tuple[tuple[str, str], ...]
    budget: Budget
    strategy: Strategy
    objective: Objective
    output: T.StructType
    carried: tuple[str, ...]
    mapped_schema: T.StructType
    stream_schema: pa.Schema
    _stream_names: tuple[str, ...]
    _aligned: tuple[tuple[str, Column], ...]
    _code: Column | None

    @property
    def has_equality(self) -> bool:
        """Whether rows are matched by a key; without one, every row of the stream has to meet every shard."""
        return bool(self.on)

    def prepare(self, df: DataFrame, routing: Routing = "none", *, moves_rows: bool = True) -> DataFrame:
        """The stream as tasks read it.

        With a `routing`, the first column is ``__shard``, and a partition has the rows of one shard or of none. Then,
        unless the recipe's `code_from` names the column that holds it, comes ``__code``. With ``moves_rows=False`` the
        rows stay in the partitions where they are, for a caller who moves them together with others.
        """
        rows = df.toDF(*self._stream_names)
        if self._aligned:
            rows = rows.select("*", *(column.alias(name) for name, column in self._aligned))
        rows = encode(rows)
        columns: list[Column] = [F.col(name) for name in self._stream_names]
        rechecked = {ours for ours, _ in self.recipe.on}
        columns += [F.col(name) for name, _ in self._aligned if name in rechecked]
        if self._code is not None and self.recipe.code_from is None:
            columns.insert(0, self._code.alias(CODE_COLUMN))
        if routing == "none":
            return rows.select(*columns)
        shards = self.recipe.num_shards
        if routing == "shard":
            assert self._code is not None, "rows without a code have no shard"
            shard = shard_column(self._code, shards)
        else:
            shard = F.explode(F.sequence(F.lit(0), F.lit(shards - 1)))
        routed = rows.select(shard.alias(SHARD_COLUMN), *columns)
        return routed.repartitionById(shards, F.col(SHARD_COLUMN)) if moves_rows else routed

    def finish(self, mapped: DataFrame) -> DataFrame:
        """What tasks put out, as the user's result; columns besides those of `carried` are left out."""
        fields = [
            T.StructField(carried, field.dataType, field.nullable, field.metadata)
            for carried, field in zip(self.carried, self.output, strict=True)
        ]
        return decode(mapped, T.StructType(fields)).toDF(*self.output.names)


def plan_join(
    df: DataFrame,
    relation: Relation,
    *,
    on: KeyNames | None = None,
    how: str = "inner",
    select: str | Sequence[str] | None = None,
    condition: str | Condition | None = None,
    budget: str | int | Budget = "256MB",
    strategy: str = "auto",
    objective: str = "rate",
    io: IoMode | Disk = "map",
) -> JoinPlan:
    """Plan the join of a DataFrame with a relation; refuse, before any data moves, what cannot be.

    Parameters
    ----------
    df
        The stream; a batch DataFrame serves as well.
    relation
        The version to plan with.
    on
        The key: a name or names that both sides have, in any order; names of the stream's in the order of the
        relation's key; or a mapping from stream to relation names. None: the relation's key. An empty list: no
        equality, `condition` says it all.
    how
        ``inner``, ``left``, ``semi`` or ``anti``, or Spark's other names for them.
    select
        The relation's columns to put out besides the key, in this order; None: all.
    condition
        What must hold besides the equality of the key: a condition object, or comparisons between columns of both
        sides joined by AND, such as ``"valid_from <= ts AND ts < valid_to"``.
    budget, strategy, objective, io
        How the join is to be done.

    Raises
    ------
    PlanError
        Naming the column or option at fault and what would work.
    """
    spark = df.sparkSession
    join_type = _join_type(how)
    _require_option("strategy", strategy, get_args(Strategy))
    _require_option("objective", objective, get_args(Objective))
    resolver = NameResolver.of(spark)
    stream, table = df.schema, spark_schema(relation)
    keys = _keys(on, relation, stream, resolver)
    selected = _selected(select, relation, resolver)
    prefix = _free_prefix(relation)
    names = tuple(f"{prefix}{number}" for number in range(len(stream)))
    pairs = [KeyColumn(names[number], stream[number], table[theirs]) for number, theirs in keys]
    casts = {f"{prefix}key{place}": key for place, key in enumerate(pairs) if not is_aligned(key)}
    aligned = tuple((name, aligned_key(spark, key)) for name, key in casts.items())
    coded = [next((name for name, cast in casts.items() if cast is key), key.column) for key in pairs]
    is_hashed = relation.code_kind == "xxhash64"
    ours = coded if is_hashed else [key.column for key in pairs]
    on_ours = tuple((name, key.relation.name) for name, key in zip(ours, pairs, strict=True))
    parsed = _condition(condition, stream, relation, names, resolver)
    if not keys:
        _check_without_equality(parsed, join_type, strategy)
    # Timestamps travel with the session's time zone as part of their type.
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
    )
    coded_schema = T.StructType([T.StructField(n, k.relation.dataType) for n, k in zip(coded, pairs, strict=True)])
    return JoinPlan(
        relation=relation,
        recipe=recipe,
        on=tuple((stream[number].name, theirs) for number, theirs in keys),
        budget=Budget.parse(budget),
        strategy=strategy,  # type: ignore[arg-type]
        objective=objective,  # type: ignore[arg-type]
        output=output,
        carried=carried,
        mapped_schema=encoded_schema(_renamed(output, carried)),
        stream_schema=_operator_schema(arrow, recipe),
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


def _require_option(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise PlanError(f"{name}={value!r} is not known.", hint=f"Use {', '.join(known[:-1])} or {known[-1]}.")


def _keys(
    on: KeyNames | None, relation: Relation, stream: T.StructType, resolver: NameResolver
) -> list[tuple[int, str]]:
    """(number of the stream's column, relation column) of the key, in the order of the relation's key."""
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
            hint="Pass comparisons between columns as text, or an object of dovetail.operators: Comparison, Range, "
            "AllOf or BatchPredicate.",
        )
    users = stream.names
    return RenamedCondition(
        condition, tuple((ours, name) for ours, name in zip(names, users, strict=True) if users.count(name) == 1)
    )


def _check_without_equality(condition: Condition | None, how: JoinType, strategy: str) -> None:
    if condition is None:
        raise PlanError("a join needs key columns, a condition, or both.", hint="Pass on= or condition=.")
    if how != "inner":
        raise PlanError(
            f"how={how!r} needs key columns: without them every shard sees every row of the stream, and none knows "
            "whether another has a match.",
            hint='Pass on=, or use how="inner".',
        )
    if strategy not in ("auto", "mesh"):
        raise PlanError(f"{strategy} joins on equal keys only.", hint='Use strategy="mesh", or pass on=.')


# -------------------------------------------------------------------- what comes out


def _free_prefix(relation: Relation) -> str:
    """What our names of the stream's columns begin with: nothing that a column of the relation begins with."""
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
    """The stream's columns in the order of the result: those of the key, in the order that was asked for, first."""
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
