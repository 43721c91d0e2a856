"""The specification of a multi-way join, and its validation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import pyarrow as pa

from dovetail.core.errors import PlanError, SchemaError
from dovetail.core.memory import Budget
from dovetail.joins.multiway.cascade import (
    JoinTypes,
    MultiJoinType,
    carried_inputs,
    nullable_inputs,
    resolved_join_type,
)
from dovetail.joins.multiway.graph import JoinAttribute, JoinGraph, OnClause
from dovetail.joins.multiway.pair_conditions import PairCondition, check_conditions
from dovetail.joins.multiway.windows import Distances, LatePolicy, TimeWindow, TupleWindow, furthest_apart
from dovetail.relation.keys import check_schema, code_kind, compute_codes

__all__ = [
    "Flushing",
    "LatePolicy",
    "MJoinSpec",
    "MultiJoinType",
    "TimeWindow",
    "TupleWindow",
    "code_column",
    "mjoin_spec",
]

Flushing = Literal["coordinated", "random"]
RESERVED_PREFIX = "__"


@dataclass(frozen=True)
class MJoinSpec:
    """A validated multi-way join; created by `mjoin_spec`.

    Attributes
    ----------
    schemas
        The columns of each input, without codes.
    graph
        Join attributes. Each input batch has an int64 code for each of its attributes, see `code_column`.
    how, driving
        Join type, and the input whose rows a left join keeps.
    window
        Bounds the state; None keeps everything.
    budget
        Of the whole operator.
    spill_directory, partitions, flushing, seed
        Where to spill (None: never), the number of hash partitions, and how victims are chosen.
    max_delay
        The maximum delay of results of spilled tuples, in the unit of `MJoin.set_time`; None: until `drain`.
    sequences
        Fixed probing sequences: for an input, the others in probing order.
    conditions
        Conditions between two inputs besides the equality of join columns and the window.
    cascade
        How each input is joined with those before it, if they are not one join; see `cascade`. Such a spec is run as a
        tree of joins.
    """

    schemas: Mapping[str, pa.Schema]
    graph: JoinGraph
    how: MultiJoinType = "inner"
    driving: str = ""
    window: TupleWindow | TimeWindow | None = None
    budget: Budget = field(default_factory=lambda: Budget.parse("256MB"))
    spill_directory: Path | None = None
    partitions: int = 64
    flushing: Flushing = "coordinated"
    seed: int = 0
    max_delay: int | None = None
    sequences: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    conditions: tuple[PairCondition, ...] = ()
    cascade: tuple[MultiJoinType, ...] = ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The inputs in order; the operator uses their numbers internally."""
        return tuple(self.schemas)

    @cached_property
    def attributes(self) -> tuple[JoinAttribute, ...]:
        """The join attributes; one shared by all inputs comes first."""
        return self.graph.attributes

    @cached_property
    def input_attributes(self) -> tuple[tuple[int, ...], ...]:
        """The attribute numbers of each input; rows are stored in hash order of the first."""
        return tuple(tuple(k for k, a in enumerate(self.attributes) if name in a.columns) for name in self.names)

    @cached_property
    def is_star(self) -> bool:
        """Whether one attribute links all inputs, so that only equal hash partitions join."""
        return self.graph.star is not None

    @cached_property
    def code_columns(self) -> tuple[str, ...]:
        """The code column of each attribute."""
        return tuple(code_column(self.graph, a.name) for a in self.attributes)

    @cached_property
    def hashed(self) -> tuple[bool, ...]:
        """Whether the codes of each attribute are hashes, so that keys must be compared too."""
        kinds = []
        for attribute in self.attributes:
            name = attribute.inputs[0]
            kinds.append(code_kind(self.schemas[name], attribute.columns[name]) == "xxhash64")
        return tuple(kinds)

    @cached_property
    def preserved(self) -> tuple[bool, ...]:
        """Whether the operator tracks for each input which of its rows have matched."""
        if self.how == "left":
            return tuple(name == self.driving for name in self.names)
        sides = {"right": (False, True), "full": (True, True), "semi": (True, False), "anti": (True, False)}
        return sides.get(self.how, (False,) * len(self.names))

    @cached_property
    def carried(self) -> tuple[str, ...]:
        """The inputs whose columns are in the result."""
        if self.cascade:
            return carried_inputs(self.names, self.cascade)
        return self.names[:1] if self.how in ("semi", "anti") else self.names

    @cached_property
    def nullable(self) -> frozenset[str]:
        """The inputs that a row of the result may lack."""
        if self.cascade:
            return nullable_inputs(self.names, self.cascade)
        if self.how == "left":
            return frozenset(name for name in self.names if name != self.driving)
        return frozenset({"right": self.names[:1], "full": self.names[:2]}.get(self.how, ()))

    @cached_property
    def furthest(self) -> Distances | None:
        """For every ordered pair of inputs, the most that the second may be later; None without a window."""
        return furthest_apart(self.names, self.window)

    @cached_property
    def has_one_width(self) -> bool:
        """Whether all pairs of inputs have the same symmetric window."""
        if isinstance(self.window, TimeWindow):
            return self.window.width is not None and not self.window.bounds
        return self.window is not None

    @cached_property
    def reaches(self) -> tuple[int | None, ...]:
        """Per input, the most that a match may be later; None if there is no bound."""
        if self.furthest is None:
            return (None,) * len(self.names)
        others = [[most for j, most in enumerate(row) if j != i] for i, row in enumerate(self.furthest)]
        return tuple(None if None in row else max(most for most in row if most is not None) for row in others)

    @cached_property
    def gives_unmatched(self) -> bool:
        """Whether rows that can no longer match are emitted."""
        return self.how in ("left", "right", "full", "anti")

    def with_codes(self, name: str, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A batch of an input with its codes first, as the Spark plan computes them.

        Examples
        --------
        >>> schema = pa.schema({"k": pa.int64()})
        >>> spec = mjoin_spec({"a": schema, "b": schema}, on="k")
        >>> spec.with_codes("a", pa.record_batch({"k": [5]})).schema.names
        ['__code', 'k']
        """
        fields, columns = list(batch.schema), list(batch.columns)
        for place, number in enumerate(self.input_attributes[self.names.index(name)]):
            codes = compute_codes(batch, self.attributes[number].columns[name])
            fields.insert(place, pa.field(self.code_columns[number], pa.int64()))
            columns.insert(place, codes)
        return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))

    def fingerprint(self) -> dict[str, Any]:
        """Identifies the state; a snapshot with another fingerprint is refused."""
        window: dict[str, Any] | None = None
        if isinstance(self.window, TimeWindow):
            window = {"time": self.window.width, "columns": [list(self.window.columns_of(n)) for n in self.names]}
            if self.window.bounds:
                window["bounds"] = [bound.describe() for bound in self.window.bounds]
        elif self.window is not None:
            window = {"tuples": self.window.width}
        about: dict[str, Any] = {
            "graph": self.graph.as_dict(),
            "how": self.how,
            "driving": self.driving,
            "window": window,
            "schemas": {name: str(schema.remove_metadata()) for name, schema in self.schemas.items()},
            "partitions": self.partitions,
        }
        if self.cascade:
            about["cascade"] = list(self.cascade)
        if self.conditions:
            # Left out otherwise: so it was before there were any.
            about["conditions"] = [each.describe() for each in self.conditions]
        return about


def code_column(graph: JoinGraph, attribute: str) -> str:
    """The name of an attribute's code column; ``__code`` if there is only one attribute."""
    return "__code" if len(graph.attributes) == 1 else f"__code_{attribute}"


def mjoin_spec(
    inputs: Mapping[str, pa.Schema],
    on: OnClause | JoinGraph,
    *,
    how: JoinTypes = "inner",
    driving: str | None = None,
    window: TupleWindow | TimeWindow | None = None,
    budget: str | int | Budget = "256MB",
    spill_directory: str | Path | None = None,
    partitions: int = 64,
    flushing: Flushing = "coordinated",
    seed: int = 0,
    max_delay: int | None = None,
    sequences: Mapping[str, Sequence[str]] | None = None,
    conditions: Sequence[PairCondition] = (),
) -> MJoinSpec:
    """Validate a multi-way join and create its spec; see `MJoinSpec` for the parameters.

    `how` may also be a type for each input after the first, as SQL cascades joins; such a join is run by `MJoinTree`.

    Examples
    --------
    >>> schema = pa.schema({"k": pa.int64(), "v": pa.string()})
    >>> mjoin_spec({"a": schema, "b": schema.set(1, pa.field("w", pa.int32()))}, on="k").names
    ('a', 'b')
    >>> mjoin_spec({"a": schema, "b": schema}, on="k")
    Traceback (most recent call last):
    dovetail.core.errors.PlanError: Inputs 'a' and 'b' both have a column 'v'. Rename one of the two.
    """
    schemas = dict(inputs)
    graph = on if isinstance(on, JoinGraph) else JoinGraph.of({n: s.names for n, s in schemas.items()}, on)
    kind, cascade = resolved_join_type(tuple(schemas), how)
    if driving is not None and (kind != "left" or driving not in schemas):
        raise PlanError(f"driving={driving!r}: only a left join has a driving input, which must be one of its inputs.")
    if not 1 <= partitions <= 4096 or partitions & (partitions - 1):
        raise PlanError(f"partitions={partitions}: the number of partitions must be a power of two up to 4096.")
    if flushing not in get_args(Flushing):
        raise PlanError(f"flushing={flushing!r} is none of {', '.join(get_args(Flushing))}.")
    if max_delay is not None and max_delay < 0:
        raise PlanError(f"max_delay={max_delay}: a delay is at least 0.")
    for name, schema in schemas.items():
        _check_names(name, schema)
    for attribute in graph.attributes:
        _check_types(schemas, attribute)
    if isinstance(window, TimeWindow):
        for name, schema in schemas.items():
            _check_time(name, schema, window)
        _check_same_time(schemas, window)
    check_conditions(schemas, conditions)
    furthest_apart(tuple(schemas), window)
    spec = MJoinSpec(
        schemas,
        graph,
        kind,
        driving or next(iter(schemas)),
        window,
        Budget.parse(budget),
        None if spill_directory is None else Path(spill_directory),
        partitions,
        flushing,
        seed,
        max_delay,
        {name: tuple(order) for name, order in (sequences or {}).items()},
        tuple(conditions),
        cascade,
    )
    _check_output(spec)
    _check_sequences(spec)
    return spec


def _check_names(name: str, schema: pa.Schema) -> None:
    reserved = [column for column in schema.names if column.startswith(RESERVED_PREFIX)]
    if reserved:
        raise SchemaError(f"Column {reserved[0]!r} of input {name!r} has a reserved name.", hint="Rename it.")


def _check_types(schemas: Mapping[str, pa.Schema], attribute: JoinAttribute) -> None:
    first = attribute.inputs[0]
    for name in attribute.inputs:
        check_schema(schemas[name], attribute.columns[name])
        for ours, theirs in zip(attribute.columns[first], attribute.columns[name], strict=True):
            kinds = schemas[first].field(ours).type, schemas[name].field(theirs).type
            if kinds[0] != kinds[1]:
                raise SchemaError(
                    f"{first}.{ours} is {kinds[0]} and {name}.{theirs} is {kinds[1]}: keys of different types.",
                    hint="Cast one of them first.",
                )


def _check_time(name: str, schema: pa.Schema, window: TimeWindow) -> None:
    for column in window.columns_of(name):
        if column not in schema.names:
            raise PlanError(f"Input {name!r} has no time column {column!r}; its columns are {', '.join(schema.names)}.")
        kind = schema.field(column).type
        is_moment = pa.types.is_timestamp(kind) and kind.unit == "us"
        if not (is_moment or pa.types.is_date32(kind) or pa.types.is_signed_integer(kind)):
            raise SchemaError(
                f"Time column {column!r} of input {name!r} is {kind}.",
                hint="Use a timestamp in microseconds, a date or an integer.",
            )


def _check_same_time(schemas: Mapping[str, pa.Schema], window: TimeWindow) -> None:
    """Refuse times that cannot be subtracted from each other."""
    kinds = {name: schema.field(window.columns_of(name)[0]).type for name, schema in schemas.items()}
    first, kind = next(iter(kinds.items()))
    for name, other in kinds.items():
        both = [pa.types.is_timestamp(kind), pa.types.is_date32(kind)]
        if both != [pa.types.is_timestamp(other), pa.types.is_date32(other)]:
            raise SchemaError(
                f"The time column of input {first!r} is {kind}, but that of {name!r} is {other}.",
                hint="Cast one of them.",
            )


def _check_output(spec: MJoinSpec) -> None:
    """Refuse columns that would have the same name in the result."""
    owner: dict[str, str] = {}
    for attribute in spec.attributes:
        for column in attribute.columns[attribute.inputs[0]]:
            if column in owner:
                raise PlanError(
                    f"Inputs {owner[column]!r} and {attribute.inputs[0]!r} both have a join column {column!r}, of two "
                    "different join attributes.",
                    hint="Rename one of the two.",
                )
            owner[column] = attribute.inputs[0]
    key_columns = {(n, c) for a in spec.attributes for n, columns in a.columns.items() for c in columns}
    for name in spec.carried:
        for column in spec.schemas[name].names:
            if (name, column) in key_columns:
                continue
            if column in owner:
                raise PlanError(
                    f"Inputs {owner[column]!r} and {name!r} both have a column {column!r}.",
                    hint="Rename one of the two.",
                )
            owner[column] = name


def _check_sequences(spec: MJoinSpec) -> None:
    for name, order in spec.sequences.items():
        others = [other for other in spec.names if other != name]
        if name not in spec.names or sorted(order) != sorted(others):
            raise PlanError(f"The probing sequence of {name!r} is not an order of {', '.join(others)}: {list(order)}.")
        reached = [name]
        for other in order:
            if not spec.graph.shared(reached, [other]):
                raise PlanError(
                    f"The probing sequence of {name!r} reaches {other!r} before an input that is linked with it."
                )
            reached.append(other)
