"""What to join, how, and within how much memory; one spec for all operators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, get_args

import pyarrow as pa

from dovetail.core.errors import PlanError, SchemaError
from dovetail.core.memory import Budget
from dovetail.joins.conditions import Condition
from dovetail.joins.protocol import CODE_COLUMN, RelationShard
from dovetail.joins.shedding import SheddingPolicy
from dovetail.relation import Disk, IoMode, Relation

__all__ = ["JoinSpec", "JoinType", "KeyNames", "columns_needed", "join_spec", "key_pairs"]

JoinType = Literal["inner", "left", "semi", "anti"]
KeyNames = str | Sequence[str] | Mapping[str, str]


@dataclass(frozen=True)
class JoinSpec:
    """One shard of a stream joined with one shard of a relation; validated on creation.

    Usually created by `join_spec`, which opens the shard with only the columns that the join needs.

    Parameters
    ----------
    shard
        The relation's shard. All its columns are read, cached and accounted for, so leave out those not needed.
    stream_schema
        The columns of every stream batch: ``__code`` (int64, NULL if the key has a NULL), then the tuple's own. Without
        `on` there is no code.
    on
        Pairs (stream column, relation column) of the key. Empty: no equality, only `condition`.
    how
        ``"inner"``, ``"left"``, ``"semi"`` or ``"anti"``.
    budget
        The most bytes the operator may hold at any moment.
    select
        The relation's columns to emit besides the key; None means all columns of the shard.
    condition
        A condition in addition to the equality of the key.
    code_kind
        ``"xxhash64"`` if equal codes must be rechecked on the key columns, ``"value"`` if the code is the key.
    block_rows
        b: how many relation rows one disk step reads. None: a share of the budget.
    chunk_rows
        w: how many stream tuples may enter the window per step of a cycle. None: as many as the budget allows.
    ordered
        Emit results in the order of the stream.
    shed
        What to drop when the input exceeds the budget; None: nothing, `offer` makes room with disk steps instead.
    identity
        What a snapshot must agree on besides the join and the shard's version, number and counts: which relation it is.
    """

    shard: RelationShard
    stream_schema: pa.Schema
    on: tuple[tuple[str, str], ...]
    how: JoinType = "inner"
    budget: Budget = field(default_factory=lambda: Budget.parse("64MB"))
    select: tuple[str, ...] | None = None
    condition: Condition | None = None
    code_kind: Literal["value", "xxhash64"] = "value"
    block_rows: int | None = None
    chunk_rows: int | None = None
    ordered: bool = False
    shed: SheddingPolicy | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.how not in get_args(JoinType):
            raise PlanError(f"how={self.how!r} is not a join type.", hint="Use inner, left, semi or anti.")
        for name in ("block_rows", "chunk_rows"):
            require_positive(name, getattr(self, name))
        if not self.has_equality and self.condition is None:
            raise PlanError("A join needs key columns, a condition, or both.", hint="Pass on= or condition=.")
        self._check_columns()
        self._check_keys()
        if self.condition is not None:
            self.condition.columns(self.stream_columns, self.shard.schema)

    @property
    def has_equality(self) -> bool:
        """Whether tuples and rows are matched by their codes."""
        return bool(self.on)

    @property
    def must_recheck_keys(self) -> bool:
        """Whether equal codes can belong to different keys."""
        return self.has_equality and self.code_kind == "xxhash64"

    @property
    def stream_columns(self) -> pa.Schema:
        """The stream's own columns: its schema without the code."""
        return pa.schema([f for f in self.stream_schema if f.name != CODE_COLUMN], self.stream_schema.metadata)

    @property
    def relation_columns(self) -> list[str]:
        """The relation's columns that are emitted: none for semi and anti, never the key."""
        if self.how in ("semi", "anti"):
            return []
        keys = {relation_name for _, relation_name in self.on}
        names = self.shard.schema.names if self.select is None else self.select
        return [name for name in names if name not in keys]

    def with_budget(self, budget: str | int | Budget) -> Self:
        """The same join within another budget."""
        return replace(self, budget=Budget.parse(budget))

    def fingerprint(self) -> dict[str, Any]:
        """What a snapshot of this join must agree on, JSON-able."""
        stats = self.shard.stats
        return dict(self.identity) | {
            "shard_version": [self.shard.version, self.shard.number],
            "shard_stats": [stats.rows, stats.bytes, stats.distinct_codes, stats.max_multiplicity],
            "code_kind": self.code_kind,
            "on": [list(pair) for pair in self.on],
            "how": self.how,
            "select": self.relation_columns,
            "condition": None if self.condition is None else self.condition.describe(),
            "ordered": self.ordered,
            "stream": [f"{f.name}: {f.type}" for f in self.stream_schema],
            "relation_rows": self.shard.num_rows,
        }

    def _check_columns(self) -> None:
        names = self.stream_schema.names
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise SchemaError(f"The stream has two columns {repeated[0]!r}.", hint="Rename one of them.")
        if self.has_equality:
            if CODE_COLUMN not in names:
                raise SchemaError(
                    f"The stream has no column {CODE_COLUMN!r}, which holds the join code.",
                    hint="Compute it with dovetail.relation.compute_codes.",
                )
            if self.stream_schema.field(CODE_COLUMN).type != pa.int64():
                raise SchemaError(f"{CODE_COLUMN} is {self.stream_schema.field(CODE_COLUMN).type}, not int64.")
        known = {*self.shard.schema.names, *(relation_name for _, relation_name in self.on)}
        missing = [name for name in self.select or () if name not in known]
        if missing:
            raise PlanError(
                f"select names {missing[0]!r}, which the relation does not have.",
                hint=f"It has {', '.join(self.shard.schema.names)}.",
            )
        stream_names = set(self.stream_columns.names)
        shared = [name for name in self.relation_columns if name in stream_names]
        if shared:
            raise PlanError(
                f"Stream and relation both have a column {shared[0]!r} that is not joined on.",
                hint="Rename one of them, or leave it out with select=.",
            )

    def _check_keys(self) -> None:
        for stream_name, relation_name in self.on:
            if stream_name not in self.stream_columns.names:
                raise PlanError(f"The stream has no key column {stream_name!r}.")
            if not self.must_recheck_keys:
                continue
            if relation_name not in self.shard.schema.names:
                raise PlanError(f"The shard was opened without {relation_name!r}, which hashed codes are rechecked on.")
            kinds = self.stream_schema.field(stream_name).type, self.shard.schema.field(relation_name).type
            if kinds[0] != kinds[1]:
                raise SchemaError(
                    f"Key column {stream_name!r} is {kinds[0]} in the stream, {relation_name!r} is {kinds[1]} in the "
                    "relation.",
                    hint="Cast one of them before computing codes.",
                )


def join_spec(
    relation: Relation,
    stream_schema: pa.Schema,
    *,
    shard: int = 0,
    on: KeyNames | None = None,
    how: JoinType = "inner",
    budget: str | int | Budget = "64MB",
    select: Sequence[str] | None = None,
    condition: Condition | None = None,
    block_rows: int | None = None,
    chunk_rows: int | None = None,
    ordered: bool = False,
    shed: SheddingPolicy | None = None,
    io: IoMode | Disk = "map",
) -> JoinSpec:
    """Open a shard with only the columns that a join needs, and specify the join.

    Parameters
    ----------
    on
        The stream's names of the relation's key: None if they are the same, names in the key's order, or a dict from
        stream to relation names. An empty list joins by `condition` alone.
    io
        How the shard is read; see ``Relation.shard``.
    stream_schema, how, budget, select, condition, block_rows, chunk_rows, ordered, shed
        See `JoinSpec`.

    Examples
    --------
    >>> import tempfile
    >>> rows = pa.table({"id": [1, 2], "city": ["Rome", "Oslo"], "area": [1285, 454]})
    >>> relation = Relation.build(rows, tempfile.mkdtemp() + "/r", on="id", shards=1)
    >>> stream = pa.schema({"__code": pa.int64(), "id": pa.int64(), "amount": pa.int64()})
    >>> spec = join_spec(relation, stream, select=["city"], budget="1MB")
    >>> spec.shard.schema.names, spec.relation_columns
    (['city'], ['city'])
    """
    pairs = key_pairs(on, relation.key)
    columns = columns_needed(relation, stream_schema, pairs, how, select, condition)
    return JoinSpec(
        shard=relation.shard(shard, columns=columns, io=io, include_null_keys=not pairs),
        stream_schema=stream_schema,
        on=pairs,
        how=how,
        budget=Budget.parse(budget),
        select=tuple(columns if select is None else select) if how in ("inner", "left") else (),
        condition=condition,
        code_kind=relation.code_kind,
        block_rows=block_rows,
        chunk_rows=chunk_rows,
        ordered=ordered,
        shed=shed,
        identity={"relation": relation.relation_id, "version": relation.version, "shard": shard},
    )


def require_positive(name: str, value: int | None) -> None:
    """Refuse a value that is not None and not a positive integer."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise PlanError(f"{name}={value!r}: must be an integer above 0.")


def key_pairs(on: KeyNames | None, key: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Pairs (stream column, relation column) in the order of the relation's key; none if ``on`` is empty.

    Examples
    --------
    >>> key_pairs({"customer": "id"}, ["id"])
    (('customer', 'id'),)
    """
    if on is None:
        return tuple((name, name) for name in key)
    if isinstance(on, Mapping):
        by_relation_name = {relation_name: stream_name for stream_name, relation_name in on.items()}
        if sorted(by_relation_name) != sorted(key) or len(on) != len(key):
            raise PlanError(f"on={dict(on)!r} must map stream columns to the relation's key {list(key)}, each once.")
        return tuple((by_relation_name[name], name) for name in key)
    names = [on] if isinstance(on, str) else list(on)
    if names and len(names) != len(key):
        raise PlanError(f"on={names!r} has {len(names)} columns, the relation's key {list(key)} has {len(key)}.")
    if set(names) == set(key):
        names = list(key)
    return tuple(zip(names, key, strict=True)) if names else ()


def columns_needed(
    relation: Relation,
    stream_schema: pa.Schema,
    pairs: Sequence[tuple[str, str]],
    how: JoinType,
    select: Sequence[str] | None,
    condition: Condition | None,
) -> list[str]:
    """The relation's columns that are emitted, rechecked or used by the condition, in the relation's order."""
    needed: set[str] = set()
    if how in ("inner", "left"):
        needed.update(relation.schema.names if select is None else select)
        needed -= {relation_name for _, relation_name in pairs}
    if pairs and relation.code_kind == "xxhash64":
        needed.update(relation_name for _, relation_name in pairs)
    if condition is not None:
        own = pa.schema([f for f in stream_schema if f.name != CODE_COLUMN])
        needed.update(condition.columns(own, relation.schema)[1])
    unknown = sorted(needed - set(relation.schema.names))
    if unknown:
        raise PlanError(
            f"select names {unknown[0]!r}, which the relation does not have.",
            hint=f"It has {', '.join(relation.schema.names)}.",
        )
    return [name for name in relation.schema.names if name in needed]
