"""Rows that Spark has staged as Parquet files in a directory of their own."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import types as T

from dovetail.errors import PlanError
from dovetail.relation.files import sync_directory
from dovetail.state.documents import storage_errors

__all__ = ["check_columns", "make_durable", "remove_up_to", "staged_files", "write_staged"]


def check_columns(schema: T.StructType) -> None:
    """Refuse columns that a Parquet file cannot have, before any data moves."""
    if not schema.names:
        raise PlanError("The flow puts out no column; a Parquet file needs one.")
    seen: set[str] = set()
    for field in schema:
        # Spark reads names without regard to case, unless told otherwise.
        if field.name.lower() in seen:
            raise PlanError(
                f"The flow puts out two columns {field.name!r}, which a Parquet file cannot have.",
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
    # Nobody looks for the file that says that a job has succeeded: the commit does.
    unmarked = df.write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
    unmarked.option("compression", compression).parquet(str(directory))


def staged_files(directory: Path) -> list[tuple[str, int]]:
    """The Parquet files that Spark wrote to a directory, and the rows of each."""
    names = sorted(name for name in os.listdir(directory) if name.endswith(".parquet") and name[0] not in "._")
    return [(name, pq.read_metadata(directory / name).num_rows) for name in names]


def make_durable(directory: Path, names: Iterable[str]) -> None:
    """Let files and their names survive a power cut: Spark leaves that to the operating system."""
    with storage_errors(directory):
        for name in names:
            descriptor = os.open(directory / name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(directory)
        sync_directory(directory.parent)


def remove_up_to(parent: Path, last: int) -> None:
    """Remove what was staged for micro-batches up to ``last``, attempts that were never committed included."""
    for entry in os.scandir(parent) if parent.is_dir() else ():
        number = entry.name.removeprefix("done.").partition("-")[0]
        if number.isdigit() and int(number) <= last:
            shutil.rmtree(entry.path, ignore_errors=True)
