"""Rows that Spark has staged as Parquet files in a directory of their own."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import types as T

from dovetail.core.errors import PlanError, StateError
from dovetail.storage.documents import storage_errors
from dovetail.storage.local import LOCAL

__all__ = ["check_columns", "make_durable", "remove_up_to", "staged_files", "write_staged"]


def check_columns(schema: T.StructType) -> None:
    """Refuse columns that a Parquet file cannot have, before any data moves."""
    if not schema.names:
        raise PlanError("The flow has no output columns; a Parquet file needs one.")
    seen: set[str] = set()
    for field in schema:
        # By default, Spark ignores case in names.
        if field.name.lower() in seen:
            raise PlanError(
                f"The output has two columns {field.name!r}, which a Parquet file cannot have.",
                hint="Rename one of them with transform, or leave it out with select=.",
            )
        if isinstance(field.dataType, T.NullType | T.CalendarIntervalType):
            raise PlanError(
                f"Column {field.name!r} is {field.dataType.simpleString()}, which a Parquet file cannot hold.",
                hint="Cast it with transform.",
            )
        seen.add(field.name.lower())


def write_staged(df: DataFrame, directory: Path, compression: str = "snappy") -> None:
    """Let Spark compute all rows, in one job, and write them to a new directory."""
    # The marker of a successful job is not needed: the commit is the marker.
    unmarked = df.write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
    unmarked.option("compression", compression).parquet(str(directory))


def staged_files(directory: Path) -> list[tuple[str, int]]:
    """The Parquet files that Spark wrote to a directory, and the rows of each, counted by the driver."""
    found = os.listdir(directory) if directory.is_dir() else []
    names = sorted(name for name in found if name.endswith(".parquet") and name[0] not in "._")
    if not names:
        # Spark writes a file even for no rows.
        raise StateError(
            f"Spark's job has succeeded, but the driver sees none of the files that it wrote to {directory}. The "
            "micro-batch was not committed.",
            hint="On a cluster, checkpoint and target must be directories that the driver and all workers mount.",
        )
    with storage_errors(directory):
        return [(name, pq.read_metadata(directory / name).num_rows) for name in names]


def make_durable(directory: Path, names: Iterable[str]) -> None:
    """Flush files and their names: Spark leaves that to the operating system."""
    with storage_errors(directory):
        LOCAL.sync(directory / name for name in names)
        # Above it, too: a driver that takes over may have removed the directory of this one, and Spark made it again.
        LOCAL.sync((directory, *directory.parents[:2]))


def remove_up_to(parent: Path, last: int) -> None:
    """Remove staged files of micro-batches up to ``last``, including attempts that were never committed."""
    for entry in os.scandir(parent) if parent.is_dir() else ():
        number = entry.name.removeprefix("done.").partition("-")[0]
        if number.isdigit() and int(number) <= last:
            shutil.rmtree(entry.path, ignore_errors=True)
