"""Parquet, exactly once: staged by Spark in a hidden directory, published by renaming whole files.

A reader of the target sees plain Parquet files with exactly the output's columns; see `ParquetTarget` for their names,
and for which driver may publish.
"""

import os
import shutil
import uuid

from pyspark.sql import DataFrame

from dovetail.core.errors import PlanError
from dovetail.core.faultpoints import fault_point
from dovetail.spark.flow.ownership import Owner
from dovetail.spark.flow.sink import Receipt, Sink, SinkContext
from dovetail.spark.flow.store import local_path
from dovetail.spark.sinks.parquet_target import ParquetTarget
from dovetail.spark.sinks.staging import check_columns, make_durable, staged_files, write_staged
from dovetail.storage.documents import storage_errors
from dovetail.storage.local import LOCAL

__all__ = ["ParquetSink", "parquet"]


class ParquetSink(Sink):
    """A directory of Parquet files; made by `parquet`."""

    kind = "parquet"
    stages_in_jvm = True

    def __init__(self, path: str | os.PathLike[str], compression: str = "snappy") -> None:
        self.path = local_path(path, "path")
        self.compression = compression

    def open(self, context: SinkContext) -> None:
        super().open(context)
        check_columns(context.schema)
        if self.path.exists() and not self.path.is_dir():
            raise PlanError(f"path={str(self.path)!r} is a file.", hint="Name a directory.")
        with storage_errors(self.path):
            LOCAL.make_directory(self.path)

    def claim(self, owner: Owner, batch: int | None, receipt: Receipt | None) -> None:
        super().claim(owner, batch, receipt)
        self._target = ParquetTarget(self.path, LOCAL, owner, self.context.place)
        self._target.claim(batch, receipt)

    def stage(self, df: DataFrame, batch: int) -> Receipt:
        attempt = uuid.uuid4().hex
        directory = self._target.staging / f"{batch:08d}-{attempt}"
        try:
            write_staged(df, directory, self.compression)
            fault_point("sink.parquet.written")
            found = staged_files(directory)
        except Exception:
            self._target.require_not_replaced()
            raise
        # The staged files of a replaced driver are moved away. Spark may continue to write and not notice.
        self._target.require_not_replaced()
        # The first micro-batch publishes a file even without rows, so that a reader always finds the columns.
        filled = [(file, rows) for file, rows in found if rows] or (found[:1] if batch == 0 else [])
        if filled:
            make_durable(directory, [file for file, _ in filled])
        else:
            shutil.rmtree(directory)
        return self._target.receipt(batch, attempt, filled)

    def publish(self, receipt: Receipt) -> None:
        self._target.publish(receipt)

    def forget(self, receipt: Receipt) -> None:
        self._target.forget(receipt)


def parquet(path: str | os.PathLike[str], compression: str = "snappy") -> ParquetSink:
    """A directory of Parquet files that gets every row of the flow exactly once.

    Parameters
    ----------
    path
        A local directory or, on a cluster, one that all nodes mount. Created if needed; several flows may share it.
    compression
        Any that Spark writes: ``"snappy"``, ``"zstd"``, ``"none"``, ...

    Examples
    --------
    >>> parquet("/tmp/orders").path.name
    'orders'
    """
    return ParquetSink(path, compression)
