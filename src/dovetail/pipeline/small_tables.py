"""Small tables, read into this process: a relation of a few thousand rows needs no shuffle and no Python workers.

A Spark job that writes a relation of three rows takes seconds, most of them for starting workers and compiling code.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import types as T

__all__ = ["MOST_BYTES", "read_if_small"]

MOST_BYTES = 4_000_000
"""Of the files. Compressed ones may be many times as large in memory, which then is still little."""
_PLAIN = (
    T.BooleanType,
    T.ByteType,
    T.ShortType,
    T.IntegerType,
    T.LongType,
    T.FloatType,
    T.DoubleType,
    T.DecimalType,
    T.BinaryType,
    T.DateType,
    T.TimestampType,
    T.TimestampNTZType,
)
_COMPRESSED = (".gz", ".bz2", ".zst", ".xz", ".snappy", ".lz4", ".deflate")


def read_if_small(rows: DataFrame, most_bytes: int = MOST_BYTES) -> DataFrame | pa.Table:
    """The rows themselves if they are those of small local files, else the DataFrame as it was given.

    A relation built from either has the same columns and rows: where Arrow has no equal of a column's type, the
    DataFrame is returned.
    """
    size = _bytes_of(rows.inputFiles())
    if size is None or size > most_bytes or not _survives_arrow(rows.schema):
        return rows
    return rows.toArrow()


def _bytes_of(addresses: Iterable[str]) -> int | None:
    """The size of local files; None if some are elsewhere, or compressed as a whole."""
    total = 0
    for address in addresses:
        path = local_path_of(address)
        if path is None or path.endswith(_COMPRESSED) or not Path(path).is_file():
            return None
        total += os.path.getsize(path)
    return total


def local_path_of(address: str) -> str | None:
    """The path of a file's address; None if it is not on this host, or cannot be told.

    >>> local_path_of("file:///tmp/customers.csv")
    '/tmp/customers.csv'
    >>> local_path_of("s3a://bucket/customers.csv") is None
    True
    """
    scheme, _, rest = address.partition(":")
    path = "/" + rest.lstrip("/")
    return path if scheme == "file" and "%" not in path else None


def _survives_arrow(schema: T.StructType) -> bool:
    """Whether the columns have the same types after a way through Arrow, which carries no metadata of columns."""
    return all(_is_plain(field.dataType) and not field.metadata for field in schema)


def _is_plain(kind: T.DataType) -> bool:
    if isinstance(kind, T.ArrayType):
        return _is_plain(kind.elementType)
    # Strings with a collation, and those of a declared length, are kinds of their own.
    return isinstance(kind, _PLAIN) or kind == T.StringType()
