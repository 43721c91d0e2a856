"""Rows that leave a flow before its first operator, to a sink of their own: what cannot be read, what nobody wants."""

from dataclasses import dataclass

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from dovetail.spark.sinks.base import Sink

__all__ = ["Diversion"]


@dataclass(frozen=True)
class Diversion:
    """A fork of a flow's input. What goes where is a function of the row, so that a replay decides the same.

    Attributes
    ----------
    condition
        SQL: which rows leave. A row for which it is neither true nor false stays.
    columns
        SQL expressions: what the side sink gets of them.
    dropped
        Columns that only the condition needed, and that the flow goes on without.
    sink
        Where they go.
    """

    condition: str
    columns: tuple[str, ...]
    dropped: tuple[str, ...]
    sink: Sink

    def leaving(self, rows: DataFrame) -> DataFrame:
        """What the side sink gets."""
        return rows.where(self._is_leaving()).selectExpr(*self.columns)

    def staying(self, rows: DataFrame) -> DataFrame:
        """What goes on."""
        return rows.where(~self._is_leaving()).drop(*self.dropped)

    def _is_leaving(self) -> Column:
        return F.coalesce(F.expr(self.condition), F.lit(False))
