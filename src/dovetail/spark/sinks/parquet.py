"""Parquet, exactly once: staged by Spark in a directory beside, published by renaming whole files.

What a reader of the target sees are plain Parquet files, ``batch-<b>-<n>-<uuid>.parquet``, with exactly the output's
columns. What lies in ``_dovetail/`` is staged or done; Spark and other readers leave names with an underscore alone.
"""

import os
import shutil
import uuid
from pathlib import Path

from pyspark.sql import DataFrame

from dovetail.errors import PlanError, StateError
from dovetail.faultpoints import fault_point
from dovetail.relation.files import sync_directory
from dovetail.relation.format import digest_of
from dovetail.spark.sinks.base import Receipt, Sink, SinkContext
from dovetail.spark.sinks.staging import check_columns, make_durable, remove_up_to, staged_files, write_staged
from dovetail.state.documents import storage_errors
from dovetail.state.store import local_path

__all__ = ["ParquetSink", "parquet"]

_HIDDEN = "_dovetail"


class ParquetSink(Sink):
    """A directory of Parquet files; made by `parquet`."""

    kind = "parquet"
    stages_in_jvm = True

    def __init__(self, path: str | os.PathLike[str], compression: str = "snappy") -> None:
        self.path = local_path(path, "path")
        self.compression = compression

    def open(self, context: SinkContext) -> None:
        """Make the directory."""
        super().open(context)
        check_columns(context.schema)
        if self.path.exists() and not self.path.is_dir():
            raise PlanError(f"path={str(self.path)!r} is a file.", hint="Name a directory.")
        with storage_errors(self.path):
            self._staging.mkdir(parents=True, exist_ok=True)
            sync_directory(self.path)

    @property
    def _staging(self) -> Path:
        # Two flows of one name may write to one target; their checkpoints tell them apart.
        place = digest_of(str(self.context.staged_root).encode())[:8]
        return self.path / _HIDDEN / f"{self.context.flow}-{place}"

    def stage(self, df: DataFrame, batch: int) -> Receipt:
        """Let Spark write the rows to a directory that no reader looks into."""
        name = f"{batch:08d}-{uuid.uuid4().hex}"
        directory = self._staging / name
        write_staged(df, directory, self.compression)
        fault_point("sink.parquet.written")
        found = staged_files(directory)
        # The first micro-batch publishes a file even if it has no row: so a reader always finds the columns.
        filled = [(file, rows) for file, rows in found if rows] or (found[:1] if batch == 0 else [])
        if filled:
            make_durable(directory, [file for file, _ in filled])
        else:
            shutil.rmtree(directory)
        files = [
            {"staged": file, "name": f"batch-{batch:08d}-{number:05d}-{name[9:]}.parquet", "rows": rows}
            for number, (file, rows) in enumerate(filled)
        ]
        staging = str(directory.relative_to(self.path))
        return {"batch": batch, "path": str(self.path), "directory": staging, "files": files}

    def publish(self, receipt: Receipt) -> None:
        """Rename the staged files into the target, each whole or not at all."""
        target = Path(receipt["path"])
        directory = target / receipt["directory"]
        done = directory.with_name(f"done.{directory.name}")
        if not receipt["files"] or done.exists():
            return
        with storage_errors(target):
            for file in receipt["files"]:
                staged, published = directory / file["staged"], target / file["name"]
                if staged.exists():
                    os.rename(staged, published)
                    fault_point("sink.parquet.renamed")
                elif not published.exists():
                    raise StateError(
                        f"{staged} was committed but is neither staged nor published: somebody removed it.",
                        hint=f"Restore {directory} from a copy, or start the flow with a new checkpoint.",
                    )
            sync_directory(target)
            fault_point("sink.parquet.published")
            if directory.exists():
                os.rename(directory, done)
                sync_directory(directory.parent)

    def forget(self, receipt: Receipt) -> None:
        """Remove what is left of a published micro-batch, and of attempts at it that were never committed."""
        fault_point("sink.parquet.forget")
        remove_up_to((Path(receipt["path"]) / receipt["directory"]).parent, receipt["batch"])


def parquet(path: str | os.PathLike[str], compression: str = "snappy") -> ParquetSink:
    """A directory of Parquet files to which every row of the flow goes exactly once.

    Parameters
    ----------
    path
        A local directory or, on a cluster, one that all nodes mount. Made if needed; several flows may share it.
    compression
        Any that Spark writes: ``"snappy"``, ``"zstd"``, ``"none"``, ...

    Examples
    --------
    >>> parquet("/tmp/orders").path.name
    'orders'
    """
    return ParquetSink(path, compression)
