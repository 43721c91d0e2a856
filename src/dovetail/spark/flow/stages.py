"""The stages of a flow besides its operators: the user's transformations, and forks of its input.

Each knows its output columns, so that it need not be applied again to learn them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.spark.flow.sink import Sink
from dovetail.spark.flow.step import Step

__all__ = ["Diversion", "Stage", "Transformation"]


@dataclass(frozen=True)
class Transformation:
    """A function of the user's, from rows to rows; called once when the flow is described, and once per micro-batch."""

    function: Callable[[DataFrame], DataFrame]
    output: T.StructType


@dataclass(frozen=True)
class Diversion:
    """Rows that leave a flow before its first operator, to a sink of their own, such as unreadable or unwanted rows.

    Where a row goes depends only on the row, so that a replay decides the same.
    """

    condition: str  # SQL: which rows leave; if it is NULL, the row stays
    columns: tuple[str, ...]  # SQL expressions: the side sink's columns
    dropped: tuple[str, ...]  # columns that the flow continues without
    sink: Sink
    diverted: T.StructType = field(default_factory=T.StructType)
    output: T.StructType = field(default_factory=T.StructType)

    def leaving(self, rows: DataFrame) -> DataFrame:
        return rows.where(self._is_leaving()).selectExpr(*self.columns)

    def staying(self, rows: DataFrame) -> DataFrame:
        return rows.where(~self._is_leaving()).drop(*self.dropped)

    def _is_leaving(self) -> Column:
        return F.coalesce(F.expr(self.condition), F.lit(False))


Stage = Step | Transformation | Diversion
