"""Rows of Delta and Iceberg tables, to build a relation from: a path, a catalog's name, or an object of their library.

The table's log says which of its files' rows are current; files read without it would give deleted rows, too.
"""

import os
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from dovetail.core.errors import PlanError
from dovetail.core.table_formats import table_format_of

__all__ = ["table_reader"]


def table_reader(source: Any) -> pa.RecordBatchReader | None:
    """The current rows of a table; None if ``source`` names none and is none.

    ``source`` is the directory of a Delta or Iceberg table, the name ``namespace.table`` of one in the default catalog
    of pyiceberg, or a ``deltalake.DeltaTable`` or ``pyiceberg.table.Table``.
    """
    library = type(source).__module__.partition(".")[0]
    if library == "deltalake" and hasattr(source, "scan"):
        return pa.RecordBatchReader.from_stream(source.scan())
    if library == "pyiceberg" and hasattr(source, "scan"):
        return source.scan().to_arrow_batch_reader()
    if not isinstance(source, str | os.PathLike):
        return None
    text = os.path.expanduser(os.fspath(source)).removeprefix("file://")
    if "://" in text:
        raise PlanError(
            f"{os.fspath(source)} is not a local path.",
            hint="Pass a deltalake.DeltaTable or a pyiceberg Table that was opened with the storage's options.",
        )
    if not os.path.isdir(text):
        return _in_catalog(text)
    readers: dict[str | None, Callable[[str], pa.RecordBatchReader]] = {"Delta": _delta, "Iceberg": _iceberg}
    reader = readers.get(table_format_of(text))
    if reader is None:
        raise PlanError(
            f"{text} is neither a Delta nor an Iceberg table.",
            hint="Read other files with Spark or Arrow, and pass the DataFrame or the table.",
        )
    return reader(text)


def _delta(path: str) -> pa.RecordBatchReader:
    try:
        from deltalake import DeltaTable
    except ModuleNotFoundError:
        raise _no_package("deltalake", "delta") from None
    return pa.RecordBatchReader.from_stream(DeltaTable(path).scan())


def _iceberg(path: str) -> pa.RecordBatchReader:
    try:
        from pyiceberg.table import StaticTable
    except ModuleNotFoundError:
        raise _no_package("pyiceberg", "iceberg") from None
    directory = os.path.join(path, "metadata")
    names = [name for name in os.listdir(directory) if name.endswith(".metadata.json")]
    # 00007-<uuid>.metadata.json, or v7.metadata.json
    numbers = {name: name.removeprefix("v").partition("-")[0].partition(".")[0] for name in names}
    known = sorted((int(number), name) for name, number in numbers.items() if number.isdigit())
    newest = [name for number, name in known if number == known[-1][0]]
    if len(newest) != 1:
        raise PlanError(
            f"{directory} does not tell which metadata is the newest: {', '.join(newest[:2]) or names[0]}.",
            hint="Name the table as its catalog does, or pass it as pyiceberg loads it.",
        )
    table = StaticTable.from_metadata(os.path.join(directory, newest[0]))
    return table.scan().to_arrow_batch_reader()


def _in_catalog(name: str) -> pa.RecordBatchReader:
    unknown = PlanError(
        f"There is no directory {name!r}.", hint="Name a Delta or Iceberg table: its directory, or namespace.table."
    )
    if os.sep in name or name.count(".") < 1 or not all(name.split(".")):
        raise unknown
    try:
        from pyiceberg.catalog import load_catalog
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
    except ModuleNotFoundError:
        raise unknown from None
    try:
        return load_catalog().load_table(name).scan().to_arrow_batch_reader()
    except (NoSuchTableError, NoSuchNamespaceError):
        raise PlanError(f"The default Iceberg catalog has no table {name!r}.", hint="Check the name.") from None
    except ValueError as error:
        raise PlanError(
            f"{name!r} is no directory, and pyiceberg has no default catalog: {error}",
            hint="Configure the catalog in ~/.pyiceberg.yaml, or pass the table as pyiceberg loads it.",
        ) from None


def _no_package(name: str, extra: str) -> PlanError:
    return PlanError(f"The package {name} is not installed.", hint=f'Run pip install "dovetail[{extra}]".')
