"""Sinks that read back the staged rows: they see the same rows for the same micro-batch, even after a crash.

The rows are staged as Parquet files in the checkpoint and kept until the next micro-batch has started: then the last
one can no longer be published again.
"""

import sys
import uuid
from abc import abstractmethod
from collections.abc import Callable
from typing import IO, Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from dovetail.core.errors import PlanError
from dovetail.core.faultpoints import fault_point
from dovetail.spark.flow.sink import Receipt, Sink, SinkContext
from dovetail.spark.sinks.staging import check_columns, make_durable, remove_up_to, staged_files, write_staged

__all__ = ["ConsoleSink", "ForeachBatchSink", "MemorySink", "console", "foreach_batch", "memory"]

BatchFunction = Callable[[DataFrame, int], Any]


class StagedSink(Sink):
    """Stages rows in the checkpoint, and passes them on as read back."""

    def open(self, context: SinkContext) -> None:
        super().open(context)
        check_columns(context.schema)

    def stage(self, df: DataFrame, batch: int) -> Receipt:
        directory = self.context.staged_root / f"{batch:08d}-{uuid.uuid4().hex}"
        write_staged(df, directory)
        fault_point("sink.staged.written")
        files = staged_files(directory)
        make_durable(directory, [name for name, _ in files])
        return {"batch": batch, "directory": directory.name, "rows": sum(rows for _, rows in files)}

    def publish(self, receipt: Receipt) -> None:
        fault_point("sink.staged.before")
        self.take(self._read_back(receipt), receipt)
        fault_point("sink.staged.taken")

    @abstractmethod
    def take(self, df: DataFrame, receipt: Receipt) -> None:
        """Do the sink's work with the rows."""

    def forget(self, receipt: Receipt) -> None:
        """Remove the staged rows, and those of attempts that were never committed."""
        remove_up_to(self.context.staged_root, receipt["batch"])

    def _read_back(self, receipt: Receipt) -> DataFrame:
        directory = self.context.staged_root / receipt["directory"]
        return self.context.spark.read.schema(self.context.schema).parquet(str(directory))


class ForeachBatchSink(StagedSink):
    """Calls a function; made by `foreach_batch`."""

    kind = "foreach_batch"

    def __init__(self, function: BatchFunction) -> None:
        if not callable(function):
            raise PlanError(f"foreach_batch takes a function of (DataFrame, batch id), not {function!r}.")
        self.function = function

    def take(self, df: DataFrame, receipt: Receipt) -> None:
        self.function(df, receipt["batch"])


class MemorySink(StagedSink):
    """Keeps rows; made by `memory`."""

    kind = "memory"

    def __init__(self) -> None:
        self._batches: dict[int, pa.Table] = {}

    def take(self, df: DataFrame, receipt: Receipt) -> None:
        """Keep the rows, once."""
        if receipt["batch"] not in self._batches:
            self._batches[receipt["batch"]] = df.toArrow()

    @property
    def batches(self) -> dict[int, pa.Table]:
        """The rows of every published micro-batch, by its number."""
        return dict(self._batches)

    def to_arrow(self) -> pa.Table | None:
        """All rows so far; None before the first micro-batch."""
        tables = [self._batches[batch] for batch in sorted(self._batches)]
        return pa.concat_tables(tables) if tables else None

    def rows(self) -> list[dict[str, Any]]:
        """All rows so far, as dicts."""
        table = self.to_arrow()
        return [] if table is None else table.to_pylist()

    def to_df(self, spark: SparkSession) -> DataFrame:
        """All rows so far, as a DataFrame."""
        table = self.to_arrow()
        if table is None:
            return spark.createDataFrame([], self.context.schema)
        return spark.createDataFrame(table)


class ConsoleSink(StagedSink):
    """Prints rows; made by `console`."""

    kind = "console"

    def __init__(self, num_rows: int = 20, truncate: bool = True, file: IO[str] | None = None) -> None:
        self.num_rows, self.truncate, self.file = num_rows, truncate, file

    def take(self, df: DataFrame, receipt: Receipt) -> None:
        output = sys.stdout if self.file is None else self.file
        line = "-" * 43
        table = df._show_string(self.num_rows, self.truncate, False)
        output.write(f"{line}\nBatch: {receipt['batch']}\n{line}\n{table}\n")
        output.flush()


def foreach_batch(function: BatchFunction) -> ForeachBatchSink:
    """Call a function with the rows and the number of each micro-batch.

    The rows are read back from the staged files, so the function may run any number of actions on them. If it raises,
    or the process dies before it returns, it is called again for the same micro-batch with the same rows: it takes
    effect exactly once if it ignores numbers that it has already processed.
    """
    return ForeachBatchSink(function)


def memory() -> MemorySink:
    """Keep all rows in this process, for tests and notebooks: see `MemorySink.rows`, ``to_arrow`` and ``to_df``."""
    return MemorySink()


def console(num_rows: int = 20, truncate: bool = True, file: IO[str] | None = None) -> ConsoleSink:
    """Print each micro-batch, like Spark's own console sink.

    Parameters
    ----------
    num_rows, truncate
        As in ``DataFrame.show``.
    file
        Where to print; the standard output if None.
    """
    return ConsoleSink(num_rows, truncate, file)
