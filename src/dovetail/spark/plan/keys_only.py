"""Plans an `enrich` whose stream stays in the JVM: only key columns, and those of a condition, travel to Python.

An Arrow UDF takes them and returns, per tuple, a list of the relation's rows, which Spark puts beside the tuple by
``inline``. Spark runs a generator once whatever is selected or filtered behind it, and moves a filter on the stream's
columns in front of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.functions import arrow_udf
from pyspark.sql.pandas.types import to_arrow_type

from dovetail.joins.protocol import CODE_COLUMN
from dovetail.relation.widths import fixed_row_bytes
from dovetail.runtime.enrich import LookupTask, Refresh
from dovetail.runtime.join_recipe import JoinRecipe, RenamedCondition
from dovetail.runtime.keys_only import KeysOnlyTask
from dovetail.spark.plan.join_plan import JoinPlan, free_prefix
from dovetail.spark.plan.observed import observed, with_metrics
from dovetail.spark.plan.payload import encoded_column

__all__ = ["KeysOnlyPlan", "reason_to_send_rows"]

MOST_LIST_BYTES = 4096
"""The maximum size of all rows of one key, if there may be several."""

_SMALL = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
_ATOMIC = (
    T.BooleanType,
    T.ByteType,
    T.ShortType,
    T.IntegerType,
    T.LongType,
    T.FloatType,
    T.DoubleType,
    T.DecimalType,
    T.BinaryType,
    T.DateType,
    T.TimestampType,
    T.TimestampNTZType,
    T.DayTimeIntervalType,
)


def reason_to_send_rows(plan: JoinPlan, refresh: Refresh) -> str | None:
    """Why whole rows must travel; None if keys suffice."""
    for name, field in zip(plan.recipe.select, plan.relation_fields, strict=True):
        if not _travels(plan, name, field.dataType):
            return f"column {name!r} of type {field.dataType.simpleString()} cannot come back beside keys"
    if plan.recipe.how in ("semi", "anti") or plan.relation.is_unique_key:
        return None
    if refresh == "batch":
        return 'with refresh="batch" a later version can have any number of rows per key, which is not declared unique'
    most = plan.relation.stats.max_multiplicity
    if most <= 1:
        return None
    emitted = pa.schema([plan.recipe.relation_schema.field(name) for name in plan.recipe.select])
    row_bytes = fixed_row_bytes(emitted)
    if row_bytes is None:
        return f"a key has up to {most:,} rows, whose size is not known in advance"
    if most * max(1, row_bytes) > MOST_LIST_BYTES:
        return f"a key has up to {most:,} rows, more than {MOST_LIST_BYTES:,} bytes"
    return None


def _travels(plan: JoinPlan, name: str, kind: T.DataType) -> bool:
    """Whether values come back as they are stored."""
    if not _is_known(kind):
        return False
    stored, returned = plan.recipe.relation_schema.field(name).type, to_arrow_type(kind, timezone="UTC")
    return bool(returned in (stored, _SMALL.get(stored)))


def _is_known(kind: T.DataType) -> bool:
    """Whether an Arrow UDF returns values of this type unchanged."""
    match kind:
        case T.StringType():
            return bool(kind == T.StringType())
        case T.ArrayType():
            return _is_known(kind.elementType)
        case T.MapType():
            return _is_known(kind.keyType) and _is_known(kind.valueType)
        case T.StructType():
            return all(_is_known(field.dataType) for field in kind)
        case _:
            return type(kind) in _ATOMIC


@dataclass(frozen=True)
class KeysOnlyPlan:
    """A planned join by lookup, with only the columns that a lookup needs."""

    plan: JoinPlan

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The columns that tasks get: the code, unless a key column is its own code, the key, the condition's."""
        recipe = self.plan.recipe
        codes = [] if recipe.code_from is not None else [CODE_COLUMN]
        return tuple(dict.fromkeys([*codes, *(ours for ours, _ in recipe.on), *self._of_condition]))

    @property
    def _of_condition(self) -> list[str]:
        condition = self.plan.recipe.condition
        return [] if condition is None else condition.columns(self.plan.stream_schema, self.plan.relation.schema)[0]

    @property
    def recipe(self) -> JoinRecipe:
        """The join of the columns that tasks get, beside the numbers of their tuples."""
        recipe, condition = self.plan.recipe, self.plan.recipe.condition
        if condition is not None:
            assert isinstance(condition, RenamedCondition)
            needed = {*self._of_condition}
            condition = replace(condition, names=tuple(pair for pair in condition.names if pair[0] in needed))
        return replace(recipe, condition=condition, emitted=(self._row, *recipe.select))

    @property
    def _row(self) -> str:
        """The column of the tuples' numbers; internal names start with a prefix that no column of the relation has."""
        return f"{free_prefix(self.plan.relation)}row"

    def task(self, lookup: LookupTask, spark: SparkSession) -> KeysOnlyTask:
        """The function to run in tasks, from the one that joins whole rows."""
        names = {CODE_COLUMN, *self.arguments}
        fields = [field for field in self.plan.stream_schema if field.name in names]
        return KeysOnlyTask(
            lookup=replace(lookup, recipe=self.recipe),
            stream_schema=pa.schema([*fields, pa.field(self._row, pa.int64())]),
            arguments=self.arguments,
            row=self._row,
            returned=to_arrow_type(
                self._returned(lookup.reports_metrics),
                timezone="UTC",
                prefers_large_types=spark.conf.get("spark.sql.execution.arrow.useLargeVarTypes") == "true",
            ),
        )

    def _returned(self, has_metrics: bool) -> T.ArrayType:
        """What a task returns per tuple."""
        plan = self.plan
        of_relation = plan.carried[len(plan.stream_names) :]
        kinds = [field.dataType for field in plan.relation_fields]
        fields = [T.StructField(name, kind) for name, kind in zip(of_relation, kinds, strict=True)]
        # A struct has at least one field.
        element = T.StructType(fields or [T.StructField(self._row, T.BooleanType())])
        return T.ArrayType(with_metrics(element) if has_metrics else element, containsNull=False)

    def join(self, df: DataFrame, task: KeysOnlyTask, metrics: str | None) -> DataFrame:
        """The user's result; counters are reported under the name `metrics`."""
        plan = self.plan

        def looked_up(columns: Iterator[tuple[pa.Array, ...]]) -> Iterator[pa.Array]:
            # A single column is passed as it is.
            return task(given if isinstance(given, tuple) else (given,) for given in columns)

        looked_up.__name__ = task.name  # shown in Spark's plans
        look_up = arrow_udf(looked_up, self._returned(metrics is not None))
        found = plan.with_keys(df).select(
            *(F.col(name) for name in plan.stream_names),
            F.inline(look_up(*(self._argument(name, df.schema) for name in self.arguments))),
        )
        if metrics is not None:
            found = observed(found, metrics)
        return found.select(
            *(
                F.col(carried).alias(field.name, metadata=field.metadata)
                for carried, field in zip(plan.carried, plan.output, strict=True)
            )
        )

    def _argument(self, name: str, stream: T.StructType) -> Column:
        """A column that tasks get, of the stream's rows with keys."""
        if name == CODE_COLUMN:
            assert self.plan.code is not None, "a lookup has codes"
            return self.plan.code
        if name not in self.plan.stream_names:
            return F.col(name)
        return encoded_column(F.col(name), stream[self.plan.stream_names.index(name)].dataType)
