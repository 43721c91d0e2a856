"""Input rows from files: their format, whether they exist, and reading them with Spark.

Everything that can be checked without Spark is checked first, so that a wrong path fails immediately.
"""

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dovetail.cli.failures import SourceError
from dovetail.core.table_formats import table_format_of
from dovetail.spark.plan.spark_errors import explain_spark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

_FORMAT_OF_EXTENSION = {
    "avro": "avro",
    "csv": "csv",
    "json": "json",
    "jsonl": "json",
    "ndjson": "json",
    "orc": "orc",
    "parquet": "parquet",
    "pq": "parquet",
    "tsv": "csv",
    "xml": "xml",
}
_COMPRESSIONS = frozenset({"bz2", "deflate", "gz", "lz4", "snappy", "xz", "zst", "zstd"})
_TEXT_FORMATS = frozenset({"csv", "json", "xml"})
_SPARK_PATTERN = re.compile(r"([{}\[\]*?\\])")


@dataclass(frozen=True)
class Source:
    """Files to read rows from, with reader options."""

    paths: tuple[str, ...]
    format: str
    options: Mapping[str, str] = field(default_factory=dict)
    schema: str | None = None

    def reader_options(self) -> dict[str, str]:
        """Spark's reader options: our defaults, overridden by the user's.

        By default Spark turns values that it cannot parse into NULL, and assigns the columns of a CSV file by position,
        regardless of the header. That must not happen to a master table.
        """
        ours: dict[str, str] = {}
        if self.format in _TEXT_FORMATS:
            ours["mode"] = "FAILFAST"
        if self.format == "csv":
            ours["enforceSchema"] = "false"
            if all(path.lower().rpartition(".")[2] == "tsv" for path in self.paths):
                ours["sep"] = "\t"
        theirs = {name.lower() for name in self.options}
        return {**{name: value for name, value in ours.items() if name.lower() not in theirs}, **self.options}


# -------------------------------------------------------------------- before Spark


def find_source(
    paths: Sequence[str],
    format: str | None = None,
    options: Mapping[str, str] | None = None,
    schema: str | None = None,
    *,
    is_local: bool = True,
) -> Source:
    """Check that the paths (files, directories or patterns) exist and determine their format.

    Paths with a scheme (``s3a://``) are left to Spark, and all of them if not ``is_local``: then Spark runs elsewhere.
    The format is by default inferred from the file names. A `SourceError` if a path does not exist, or the format is
    unclear.

    >>> find_source(["s3a://bucket/orders.csv.gz"]).format
    'csv'
    """
    found: list[str] = []
    formats: set[str] = set()
    for path in paths:
        is_here = is_local and "://" not in path
        local = _existing(path) if is_here else []
        if format is None or format.lower() == "parquet":
            _require_no_table_format(local)
        found.extend(map(_quoted_for_spark, local) if is_here else [path])
        if format is None:
            files = [name for one in local for name in _data_files(one)] if is_here else [path]
            if not files:
                raise SourceError(f"{path} has no data files.")
            formats.update(filter(None, map(_format_of_name, files)))
    if format is None:
        format = _only(formats, paths)
    return Source(tuple(found), format.lower(), dict(options or {}), schema)


def _existing(path: str) -> list[str]:
    if os.path.exists(os.path.expanduser(path)):
        return [os.path.abspath(os.path.expanduser(path))]
    matches = sorted(glob.glob(os.path.expanduser(path)))
    if not matches:
        raise SourceError(f"{path} does not exist.", hint="The relation's path comes first, the data after it.")
    return list(map(os.path.abspath, matches))


def _require_no_table_format(paths: Sequence[str]) -> None:
    """A table's Parquet files read as they are would give deleted rows, too."""
    for path in paths:
        table = table_format_of(path)
        if table is not None:
            raise SourceError(
                f"{path} is a {table} table: its Parquet files also hold rows that were deleted or replaced.",
                hint=f"Export the table's rows as Parquet, or read it with --format {table.lower()} where Spark has "
                "that connector.",
            )


def _quoted_for_spark(path: str) -> str:
    """Escape all pattern characters: patterns are already expanded."""
    return _SPARK_PATTERN.sub(r"\\\1", path)


def _data_files(path: str) -> Iterator[str]:
    """The files at a path that Spark would read: not those that start with ``_`` or ``.``."""
    if not os.path.isdir(path):
        yield path
        return
    for directory, inside, names in os.walk(path):
        inside[:] = [name for name in inside if not name.startswith((".", "_"))]
        yield from (os.path.join(directory, name) for name in names if not name.startswith((".", "_")))


def _format_of_name(name: str) -> str | None:
    stem, _, extension = os.path.basename(name).lower().rpartition(".")
    if extension in _COMPRESSIONS:
        extension = stem.rpartition(".")[2]
    return _FORMAT_OF_EXTENSION.get(extension)


def _only(formats: set[str], paths: Sequence[str]) -> str:
    if len(formats) == 1:
        return next(iter(formats))
    if formats:
        raise SourceError(
            f"The data is in several formats: {', '.join(sorted(formats))}.", hint="Name the files of one format."
        )
    raise SourceError(
        f"The format of {paths[0]} cannot be inferred from its name.",
        hint="Name it with --format: parquet, csv, json, orc or any other format of Spark.",
    )


# -------------------------------------------------------------------- with Spark


def read_source(spark: "SparkSession", source: Source, types: "StructType | None" = None) -> "DataFrame":
    """Read the rows as a Spark DataFrame.

    ``types`` are those of the relation to be changed: text files have no types, so their columns are read with the
    types of the relation's columns of the same name.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        reader = spark.read.format(source.format).options(**source.reader_options())
        if source.schema is not None:
            reader = reader.schema(source.schema)
        rows = reader.load(list(source.paths))
        if types is not None and source.schema is None and source.format in _TEXT_FORMATS:
            rows = reader.schema(_typed(rows.schema, types)).load(list(source.paths))
    except (PySparkException, Py4JJavaError) as error:
        raise SourceError(f"The data cannot be read as {source.format}: {explain_spark(error)}") from error
    _check_names(rows, source)
    return rows


def _typed(found: "StructType", types: "StructType") -> "StructType":
    from pyspark.sql.types import StructType

    known = {column.name: column for column in types}
    return StructType([known.get(column.name, column) for column in found])


def _check_names(rows: "DataFrame", source: Source) -> None:
    if not rows.columns:
        raise SourceError("The data has no columns: its files are empty.")
    options = {name.lower(): value.lower() for name, value in source.options.items()}
    has_header = options.get("header") == "true"
    if source.format == "csv" and not has_header and source.schema is None:
        raise SourceError(
            f"The CSV files have no column names: they would be called {', '.join(rows.columns[:3])}.",
            hint="If the first line has the names, add --option header=true; otherwise name them with --schema.",
        )
