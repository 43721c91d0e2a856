"""`flow.aggregate_closed` as a step of the commit protocol: groups of a join, each put out once, when it is closed.

The join tells which of its join values are closed in the micro-batch that gives their last results, so that a group is
complete when the word reaches this step, and its state is one row for each group that is still open.
"""

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from dovetail.errors import PlanError
from dovetail.relation.format import CODE_COLUMN, SHARD_COLUMN
from dovetail.relation.keys import code_kind
from dovetail.spark.closed_groups_task import Aggregate, AggregateKind, ClosedGroupsTask
from dovetail.spark.codes import code_column, quoted, shard_column
from dovetail.spark.metadata_join import MetadataJoinStep
from dovetail.spark.steps import BatchClock, Step, StepRecord

__all__ = ["ClosedGroupsStep"]

_NOTICE = "__notice"
_SUMMED = (T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.FloatType, T.DoubleType)
_ORDERED = (*_SUMMED, T.DateType, T.TimestampType, T.TimestampNTZType)


class ClosedGroupsStep(Step):
    """Aggregates of a join's results by its join columns.

    Parameters
    ----------
    name
        The step's name.
    join
        The join, which tells what is closed.
    rows
        An empty DataFrame with the columns that arrive here.
    aggregates
        For each column of the result, ``"count"`` or a pair such as ``("sum", "price")``.
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
        self.name, self.shards = name, join.shards
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

    def fingerprint(self) -> dict[str, Any]:
        """What its state depends on."""
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
        """The keys, what is aggregated and the notices, each row with its shard."""
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
        """Nothing is to be decided."""
        return {}

    def task(self, is_last: bool) -> ClosedGroupsTask:
        """The groups of one shard."""
        types = to_arrow_schema(self.mapped_schema, timezone="UTC").types[len(self._by) :]
        aggregates = [
            Aggregate(kind, None if of is None else self._values.index(of), result)
            for (kind, of), result in zip(self._given.values(), types, strict=True)
        ]
        return ClosedGroupsTask(tuple(self._key_types), tuple(aggregates), tuple(self.mapped_schema.names))

    def finish(self, mapped: DataFrame) -> DataFrame:
        """The join columns, then the aggregates."""
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
