"""The step that keeps a relation current with a table: which rows are changes, and who may follow."""

from collections.abc import Sequence
from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.core.durations import parse_duration_ms
from dovetail.core.errors import PlanError, SchemaError, StateError
from dovetail.relation import Relation
from dovetail.spark.flow.store import FlowStore, local_path
from dovetail.spark.plan.codes import quoted
from dovetail.spark.plan.feed_columns import FEED_COLUMNS, OPERATION, PROBLEM, SEQUENCE
from dovetail.spark.plan.spark_errors import explain_spark
from dovetail.storage.documents import create_document, read_document
from dovetail.storage.local import LOCAL
from dovetail.warehouse.following import DELETE, UPSERT

__all__ = [
    "ACTION_COLUMNS",
    "FOLLOWER",
    "STORED_SEQUENCE",
    "Following",
    "columns_to_keep",
    "stored_sequence_of",
    "with_actions",
]

FOLLOWER = "follower.json"
"""In a relation's directory: which flow follows a table with it."""

STORED_SEQUENCE = "row_sequence"
ACTION_COLUMNS = ("__action", "__row_sequence", "__row_problem")
_INTEGERS = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)


@dataclass(frozen=True)
class Following:
    """What makes a kept step a follower."""

    keep_tombstones_ms: int

    @classmethod
    def of(cls, keep_tombstones: str) -> "Following":
        return cls(parse_duration_ms("keep_tombstones", keep_tombstones))

    def claim(self, path: str, store: FlowStore) -> None:
        """Become the relation's follower, for good; a `StateError` if another flow is."""
        document = local_path(path, "relation") / FOLLOWER
        if create_document(document, {"flow": store.flow_id, "checkpoint": str(store.checkpoint)}, "follow.claim"):
            return
        found = read_document(document, LOCAL) or {}
        if found.get("flow") != store.flow_id:
            raise StateError(
                f"The relation at {path} is followed by another flow, with the checkpoint {found.get('checkpoint')}.",
                hint=f"Continue with that checkpoint. If that flow is gone for good, remove {document} and build the "
                "relation anew: a new follower does not learn what was deleted in between.",
            )


def with_actions(
    rows: DataFrame, keys: Sequence[str], sequence_by: str | None, apply_as_deletes: str | None
) -> DataFrame:
    """The rows, with what each does, its sequence, and what is wrong with it."""
    sequence = _sequence(rows, sequence_by)
    if apply_as_deletes is None and OPERATION in rows.columns:
        apply_as_deletes = f"{OPERATION} = 'd'"
    is_delete = F.lit(False) if apply_as_deletes is None else _expression(rows, apply_as_deletes, "apply_as_deletes")
    if not isinstance(_type_of(rows, is_delete), T.BooleanType):
        raise PlanError(f"apply_as_deletes={apply_as_deletes!r} is no condition.", hint="Write one, as op = 'd'.")
    problem = F.col(PROBLEM).cast("string") if PROBLEM in rows.columns else F.lit(None).cast("string")
    lacks_key = F.lit(False)
    for name in keys:
        lacks_key = lacks_key | F.col(quoted(name)).isNull()
    action = (
        F.when(problem.isNotNull(), 4)
        .when(lacks_key, 2)
        .when(sequence.isNull(), 3)
        .when(F.coalesce(is_delete, F.lit(False)), DELETE)
        .otherwise(UPSERT)
    )
    # A row without a key has to reach a task that reports it; rows without one reach the shard of code NULL.
    computed = (action.cast("long"), sequence, problem)
    return rows.withColumns(dict(zip(ACTION_COLUMNS, computed, strict=True)))


def _sequence(rows: DataFrame, sequence_by: str | None) -> Column:
    """The sequence as a long."""
    if sequence_by is None:
        if SEQUENCE not in rows.columns:
            raise PlanError(
                "follow needs an order of the changes of a key.", hint="Pass sequence_by=, a column or SQL expression."
            )
        sequence_by = SEQUENCE
    column = (
        F.col(quoted(sequence_by)) if sequence_by in rows.columns else _expression(rows, sequence_by, "sequence_by")
    )
    kind = _type_of(rows, column)
    if isinstance(kind, _INTEGERS):
        return column.cast("long")
    if isinstance(kind, T.TimestampType):
        return F.unix_micros(column)
    if isinstance(kind, T.DateType):
        return F.unix_date(column).cast("long")
    raise PlanError(
        f"sequence_by={sequence_by!r} is {kind.simpleString()}.",
        hint="Order by a whole number, a timestamp or a date; cast it to one.",
    )


def _expression(rows: DataFrame, text: str, what: str) -> Column:
    column = F.expr(text)
    _type_of(rows, column, f"{what}={text!r}")
    return column


def _type_of(rows: DataFrame, column: Column, what: str = "") -> T.DataType:
    from pyspark.errors import AnalysisException, ParseException

    try:
        kind: T.DataType = rows.select(column.alias("c")).schema["c"].dataType
    except (AnalysisException, ParseException) as error:
        raise PlanError(f"{what} is not understood: {explain_spark(error)}") from None
    return kind


def columns_to_keep(
    schema: T.StructType, keys: Sequence[str], columns: Sequence[str] | None, found: Relation | None
) -> list[str]:
    """The source's columns that the relation has besides its key: those named, else the relation's, else all."""
    own = [name for name in schema.names if name not in (*FEED_COLUMNS, *ACTION_COLUMNS)]
    if columns is not None:
        wanted = list(columns)
    elif found is not None:
        wanted = [name for name in found.schema.names if name not in (*keys, STORED_SEQUENCE)]
    else:
        wanted = [name for name in own if name not in keys]
    missing = [name for name in (*keys, *wanted) if name not in own]
    if missing:
        raise PlanError(
            f"The source has no column {missing[0]!r}.", hint=f"It has {', '.join(own)}; name the others with columns=."
        )
    if set(wanted) & set(keys) or len(set(wanted)) < len(wanted):
        raise PlanError(f"columns={wanted} has a column of the key, or one twice.", hint="Name the others once.")
    if found is not None:
        surplus = [n for n in found.schema.names if n not in (*keys, *wanted, STORED_SEQUENCE)]
        if surplus:
            raise SchemaError(
                f"The relation at {found.path} has a column {surplus[0]!r}, which the follower would not fill.",
                hint="Name it in columns=, or build the relation without it.",
            )
    return wanted


def stored_sequence_of(schema: T.StructType, sequence_by: str | None, kept: Sequence[str]) -> str:
    """The relation's column with the sequence: a column of its own, unless one that is kept can serve."""
    if sequence_by in kept and isinstance(schema[sequence_by].dataType, T.LongType):
        return str(sequence_by)
    return STORED_SEQUENCE
