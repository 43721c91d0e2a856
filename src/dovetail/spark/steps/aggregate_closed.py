"""`flow.aggregate_closed` as a step of the commit protocol: emits each group of a join once, when it is closed.

The join reports a join value as closed in the micro-batch that has its last results. So a group is complete when the
report reaches this step, and the state is one row per open group.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, get_args

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from dovetail.core.errors import PlanError
from dovetail.relation.format import CODE_COLUMN, SHARD_COLUMN
from dovetail.relation.keys import code_kind
from dovetail.runtime.aggregate_closed import Aggregate, AggregateKind, ClosedGroupsTask
from dovetail.spark.flow.step import BatchClock, Step, StepRecord
from dovetail.spark.plan.codes import code_column, quoted, shard_column
from dovetail.spark.steps.promises import MetadataJoinStep

__all__ = ["ClosedGroupsStep"]

_NOTICE = "__notice"
_SUMMED = (T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.FloatType, T.DoubleType)
_ORDERED = (*_SUMMED, T.DateType, T.TimestampType, T.TimestampNTZType)


class ClosedGroupsStep(Step):
    """Aggregates of a join's results by its join columns.

    ``rows`` is an empty DataFrame with the input columns. ``aggregates`` maps each output column to ``"count"`` or a
    pair such as ``("sum", "price")``.
    """

    def __init__(self, name: str, join: Step | None, rows: DataFrame, aggregates: Mapping[str, Any]) -> None:
        if not isinstance(join, MetadataJoinStep) or join.notices is None:
            raise PlanError(
                "aggregate_closed needs a multi_join before it that tells which join values are closed.",
                hint='Pass punctuations= and notices="notice" to multi_join.',
            )
        if not isinstance(aggregates, Mapping) or not aggregates:
            raise PlanError(
                f"aggregate_closed: {aggregates!r} names no aggregate.", hint='Pass {"rows": "count"}, for instance.'
            )
        self.name, self.shards, self._may_take_shards = name, join.shards, join.may_take_shards
        self._by, self._notices = list(join.join_columns), join.notices
        self._input = rows.schema
        for column in [*self._by, self._notices]:
            self._field(column)
        given = {column: _parsed(column, how) for column, how in aggregates.items()}
        repeated = [column for column in given if column in self._by]
        if repeated:
            raise PlanError(f"aggregate_closed: {repeated[0]!r} is a join column.", hint="Choose another name.")
        self._values = list(dict.fromkeys(column for _, column in given.values() if column is not None))
        fields = [self._result(column, kind, of) for column, (kind, of) in given.items()]
        self._given = given
        keys = [self._field(column) for column in self._by]
        self.output = T.StructType([*keys, *fields])
        carried = [T.StructField(f"c{n}", f.dataType, f.nullable, f.metadata) for n, f in enumerate(self.output)]
        self.mapped_schema = T.StructType(carried)
        self.carried = tuple(self.mapped_schema.names)
        self._key_names = [f"__k{n}" for n in range(len(self._by))]
        self._value_names = [f"__v{n}" for n in range(len(self._values))]
        self.sort_by = [CODE_COLUMN, *self._key_names, *self._value_names]
        arrow = to_arrow_schema(T.StructType(keys), timezone="UTC")
        self._key_types: list[pa.DataType] = arrow.types
        self._code_kind = code_kind(arrow, self._by)

    def _field(self, column: str) -> T.StructField:
        if column not in self._input.names:
            raise PlanError(
                f"aggregate_closed: there is no column {column!r} here.",
                hint=f"There are {', '.join(self._input.names)}.",
            )
        return self._input[column]

    def _result(self, column: str, kind: AggregateKind, of: str | None) -> T.StructField:
        if of is None or kind == "count":
            if of is not None:
                self._field(of)
            return T.StructField(column, T.LongType(), False)
        found = self._field(of)
        allowed = _SUMMED if kind == "sum" else _ORDERED
        if not isinstance(found.dataType, allowed):
            raise PlanError(
                f"aggregate_closed: {kind} of {of!r}, which is {found.dataType.simpleString()}.",
                hint=f"Cast it to {'long or double' if kind == 'sum' else 'a number, a date or a timestamp'}.",
            )
        if kind != "sum":
            return T.StructField(column, found.dataType, True, found.metadata)
        is_real = isinstance(found.dataType, T.FloatType | T.DoubleType)
        return T.StructField(column, T.DoubleType() if is_real else T.LongType())

    def as_saved(self, saved: Mapping[str, Any]) -> "ClosedGroupsStep":
        """With the checkpoint's number of shards, unless the user has set that of the join."""
        if not self._may_take_shards:
            return self
        taken_up = copy(self)
        taken_up.shards = saved["shards"]
        return taken_up

    def fingerprint(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": "aggregate_closed",
            "shards": self.shards,
            "hash": f"{self._code_kind}, pmod(xxhash64(code, 42), shards)",
            "input": [f"{f.name} {f.dataType.simpleString()}" for f in self._input],
            "output": [f"{f.name} {f.dataType.simpleString()}" for f in self.output],
            "by": self._by,
            "aggregates": [f"{kind} {'*' if of is None else of}" for kind, of in self._given.values()],
        }

    def route(self, inputs: Sequence[DataFrame]) -> DataFrame:
        """The keys, the aggregated columns and the notices, each row with its shard."""
        (rows,) = inputs
        code = code_column(rows.schema, self._by, self._code_kind)
        named = zip([*self._by, *self._values], [*self._key_names, *self._value_names], strict=True)
        return rows.select(
            shard_column(code, self.shards).alias(SHARD_COLUMN),
            code.alias(CODE_COLUMN),
            F.col(quoted(self._notices)).alias(_NOTICE),
            *(F.col(quoted(column)).alias(name) for column, name in named),
        )

    def decide(self, previous: Mapping[str, StepRecord] | None, clock: BatchClock) -> dict[str, Any]:
        return {}

    def task(self, is_last: bool) -> ClosedGroupsTask:
        types = to_arrow_schema(self.mapped_schema, timezone="UTC").types[len(self._by) :]
        aggregates = [
            Aggregate(kind, None if of is None else self._values.index(of), result)
            for (kind, of), result in zip(self._given.values(), types, strict=True)
        ]
        return ClosedGroupsTask(tuple(self._key_types), tuple(aggregates), tuple(self.mapped_schema.names))

    def finish(self, mapped: DataFrame) -> DataFrame:
        return mapped.select(*(F.col(f"c{n}").alias(f.name, metadata=f.metadata) for n, f in enumerate(self.output)))


def _parsed(column: str, how: Any) -> tuple[AggregateKind, str | None]:
    kind, of = how if isinstance(how, tuple) and len(how) == 2 else (how, None)
    is_known = isinstance(kind, str) and kind in get_args(AggregateKind)
    if not is_known or not (isinstance(of, str) or (how == "count")):
        raise PlanError(
            f"aggregate_closed: {column!r} is {how!r}.",
            hint='Write "count", or a pair of count, sum, min or max and a column, such as ("sum", "price").',
        )
    return kind, of
