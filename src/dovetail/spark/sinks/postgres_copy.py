"""Copies rows into PostgreSQL on executors: Arrow to CSV to COPY, with no value touched in Python."""

import io
import itertools
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.csv as pa_csv
from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.core.errors import PlanError
from dovetail.spark.plan.codes import quoted

if TYPE_CHECKING:
    import psycopg

__all__ = ["ATTEMPT_COLUMN", "CopyTask", "as_text"]

ATTEMPT_COLUMN = "__attempt"
_OPTIONS = pa_csv.WriteOptions(include_header=False, quoting_style="needed")
_PLAIN = (
    *(T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.FloatType, T.DoubleType, T.BooleanType),
    *(T.StringType, T.DateType),
)


def as_text(name: str, kind: T.DataType) -> Column:
    """A column in a form that both Arrow's CSV and PostgreSQL understand; a `PlanError` if there is none."""
    column = F.col(quoted(name))
    if isinstance(kind, _PLAIN):
        return column
    if isinstance(kind, T.DecimalType):
        return column.cast("string").alias(name)
    if isinstance(kind, T.BinaryType):
        return F.when(column.isNotNull(), F.concat(F.lit("\\x"), F.hex(column))).alias(name)
    if isinstance(kind, T.TimestampType):
        return F.date_format(column, "yyyy-MM-dd HH:mm:ss.SSSSSSXXX").alias(name)
    if isinstance(kind, T.TimestampNTZType):
        return column.cast("string").alias(name)
    raise PlanError(
        f"Column {name!r} is {kind.simpleString()}, which the PostgreSQL sink does not write.",
        hint="Make it text with to_json in a select.",
    )


@dataclass(frozen=True)
class CopyTask:
    """Copies the rows of one task in one transaction, under a unique name, and reports the name."""

    login: Mapping[str, str]
    statement: str  # COPY, with the column of the name last

    def __repr__(self) -> str:
        # The login holds a password.
        return f"CopyTask({self.statement!r})"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import psycopg

        attempt, rows = uuid.uuid4().hex, 0
        first = next((batch for batch in batches if batch.num_rows), None)
        if first is None:
            return
        refused: str | None = None
        try:
            with (
                psycopg.connect(**self.login) as connection,  # type: ignore[arg-type]
                connection.cursor() as cursor,
                cursor.copy(self.statement) as copy,
            ):
                for batch in itertools.chain([first], batches):
                    copy.write(_csv(batch, attempt))
                    rows += batch.num_rows
        except (psycopg.IntegrityError, psycopg.DataError) as error:
            # Reported, not raised: a retry would not help, and Spark would bury the message.
            refused = _reason(error, attempt)
        report = [pa.array([attempt]), pa.array([rows], pa.int64()), pa.array([refused], pa.string())]
        yield pa.RecordBatch.from_arrays(report, names=["attempt", "rows", "refused"])


def _reason(error: "psycopg.Error", attempt: str) -> str:
    """Why the database refused a row, as JSON for the driver."""
    diag = error.diag
    return json.dumps(
        {
            "text": (diag.message_primary or type(error).__name__).rstrip(".") + ".",
            "relation": diag.table_name,
            "constraint": diag.constraint_name,
            "detail": diag.message_detail,
            "attempt": attempt,
        }
    )


def _csv(batch: pa.RecordBatch, attempt: str) -> bytes:
    named = batch.append_column(ATTEMPT_COLUMN, pa.array([attempt] * batch.num_rows))
    text = io.BytesIO()
    pa_csv.write_csv(named, text, _OPTIONS)
    return text.getvalue()
