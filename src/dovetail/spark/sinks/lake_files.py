"""Data files that executors write for a table: staged where no reader looks, one value of each partition column each.

::

    <table>/_dovetail/<flow>/<batch>-<attempt>/...    staged by Spark
            <column>=<value>/...                      the directories of partitions, where files lack these columns
            batch-<b>-<n>-<flow>-<attempt>.parquet    moved there just before the table's commit names them

``<flow>`` is the flow's id. Delta and Iceberg readers know only the files that the table's log names, so a file that is
moved and never committed is garbage, which the table's own vacuum removes.
"""

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql import types as T

from dovetail.core.errors import PlanError, StateError
from dovetail.spark.flow.job_settings import set_for_a_while
from dovetail.spark.plan.codes import quoted
from dovetail.storage.documents import storage_errors
from dovetail.storage.local import LOCAL

__all__ = ["DataFile", "check_partition_columns", "move_into", "stage_files"]

_HIDDEN = "__partition"
_LONGEST_NAME = 255  # bytes, in most file systems
_PARTITION_TYPES = (T.StringType, T.ByteType, T.ShortType, T.IntegerType, T.LongType, T.DateType, T.BooleanType)
_WRITE_SETTINGS = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # not INT96, which has no statistics
    "spark.sql.parquet.writeLegacyFormat": "false",
    "spark.sql.parquet.fieldId.write.enabled": "false",  # a column's id is the table's to give
}


@dataclass(frozen=True)
class DataFile:
    """A staged file of a receipt."""

    staged: str  # relative to the staged directory
    name: str  # in the table
    rows: int
    bytes: int
    partition: Mapping[str, str | None]  # each partition column's value as text, None for NULL

    def as_dict(self) -> dict[str, Any]:
        return {
            "staged": self.staged,
            "name": self.name,
            "rows": self.rows,
            "bytes": self.bytes,
            "partition": dict(self.partition),
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "DataFile":
        return cls(**document)


def check_partition_columns(schema: T.StructType, names: Sequence[str]) -> None:
    """Refuse columns that cannot partition a table's files."""
    for name in names:
        if name not in schema.names:
            raise PlanError(
                f"The table is partitioned by {name!r}, which is not in the output.",
                hint=f"The output has {', '.join(schema.names)}.",
            )
        kind = schema[name].dataType
        if not isinstance(kind, _PARTITION_TYPES):
            raise PlanError(
                f"The partition column {name!r} is {kind.simpleString()}.",
                hint="Partition by text, whole numbers, dates or booleans.",
            )
    if names and len(set(names)) == len(schema.names):
        raise PlanError("Every column is a partition column.", hint="Leave one of them out of partition_by.")


def stage_files(
    df: DataFrame,
    root: Path,
    flow: str,
    batch: int,
    *,
    partition_by: Sequence[str],
    keeps_partition_columns: bool,
    compression: str,
) -> tuple[str, list[DataFile]]:
    """Let Spark compute all rows, in one job, and write them; returns the attempt's name and its files with rows.

    The files are durable. ``keeps_partition_columns``: whether files have these columns, too.
    """
    attempt = uuid.uuid4().hex
    directory = root / f"{batch:08d}-{attempt}"
    hidden = [f"{_HIDDEN}{number}" for number in range(len(partition_by))]
    # Spark would make one directory of '' and NULL, and guess types; a prefix keeps them apart.
    texts = [
        F.when(F.col(quoted(name)).isNull(), F.lit("n"))
        .otherwise(F.concat(F.lit("v"), F.col(quoted(name)).cast("string")))
        .alias(alias)
        for name, alias in zip(partition_by, hidden, strict=True)
    ]
    kept = [F.col(quoted(name)) for name in df.columns if keeps_partition_columns or name not in partition_by]
    writer = df.select(*kept, *texts).write if texts else df.write
    writer = writer.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
    writer = writer.option("compression", compression)
    if hidden:
        writer = writer.partitionBy(*hidden)
    with set_for_a_while(df.sparkSession, _WRITE_SETTINGS):
        writer.parquet(str(directory))
    if not directory.is_dir():
        raise StateError(
            f"Spark's job has succeeded, but the driver sees none of the files that it wrote to {directory}. The "
            "micro-batch was not committed.",
            hint="On a cluster, checkpoint and table must be directories that the driver and all workers mount.",
        )
    with_directories = () if keeps_partition_columns else tuple(partition_by)
    return attempt, _found(directory, f"{flow}-{attempt}", batch, partition_by, with_directories)


def _found(
    directory: Path, owner: str, batch: int, partition_by: Sequence[str], with_directories: Sequence[str]
) -> list[DataFile]:
    files: list[DataFile] = []
    with storage_errors(directory):
        found = sorted(path for path in directory.rglob("*.parquet") if path.name[0] not in "._")
        for path in found:
            rows = pq.read_metadata(path).num_rows
            if rows:
                place = path.relative_to(directory)
                values = _values(place, partition_by)
                above = [_directory(name, values[name], place.parts[n]) for n, name in enumerate(with_directories)]
                name = "/".join([*above, f"batch-{batch:08d}-{len(files):05d}-{owner}.parquet"])
                files.append(DataFile(str(place), name, rows, path.stat().st_size, values))
        LOCAL.sync(directory / file.staged for file in files)
        named = {(directory / file.staged).parent for file in files}
        between = {parent for place in named for parent in place.parents if directory in parent.parents}
        LOCAL.sync({*named, *between, directory, *directory.parents[:2]})
    return files


def _values(place: Path, partition_by: Sequence[str]) -> dict[str, str | None]:
    """The partition values of a file, from the names of its directories."""
    texts = [unquote(part.partition("=")[2]) for part in place.parts[:-1]]
    return {name: None if text == "n" else text[1:] for name, text in zip(partition_by, texts, strict=True)}


def _directory(column: str, value: str | None, staged: str) -> str:
    """The directory of a partition, as Hive names it: some readers go by it and not by the log."""
    # An empty text is NULL to the format.
    name = f"{column}={staged.partition('=')[2][1:] if value else '__HIVE_DEFAULT_PARTITION__'}"
    if len(name.encode()) > _LONGEST_NAME:
        raise StateError(
            f"The partition column {column!r} has a value of {len(value or '')} characters, too long for the name of a "
            "directory. The micro-batch was not committed.",
            hint="Shorten it with transform, or write to a table that is not partitioned by it.",
        )
    return name


def move_into(target: Path, staged: Path, files: Sequence[DataFile], where: str) -> None:
    """Move staged files to their final names, durably; those that are there already stay."""
    with storage_errors(target):
        for file in files:
            final, source = target / file.name, staged / file.staged
            try:
                if final.parent != target:
                    LOCAL.make_directory(final.parent)
                LOCAL.rename(source, final)
                # A vacuum goes by age, and the file may have been staged long ago.
                os.utime(final)
            except FileNotFoundError:
                if not LOCAL.exists(final):
                    raise StateError(
                        f"{source} was committed for {where} and is neither staged nor published in {target}: the "
                        "flow has another table now, or somebody removed it.",
                        hint=f"If {where} is still there, start the flow once with the target {where}; then it can "
                        "continue with another. Otherwise restore the checkpoint and the table from copies of one "
                        "moment.",
                    ) from None
        LOCAL.sync({target, *((target / file.name).parent for file in files)})
