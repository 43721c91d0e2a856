"""The changes of an Iceberg table as a stream: first its rows, then what later snapshots change.

If only appends came between two snapshots, their files are read. Otherwise the two are compared by their data files and
the delete files that belong to them: the rows of a data file that is gone or has other deletes are deleted, those of a
new one, or as they are after the other deletes, are written.

An offset is a snapshot. The same two snapshots give the same rows for as long as the table keeps them.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from dovetail.core.errors import PlanError, StateError
from dovetail.spark.sources.table_feed import DELETE, UPSERT, feed_schema, groups, require_same_types, shaped

if TYPE_CHECKING:
    from pyiceberg.table import FileScanTask, Table
    from pyiceberg.table.snapshots import Snapshot

__all__ = ["IcebergDataSource", "iceberg"]

_PROPERTY = "catalog."
_NONE = -1
_ANEW = "Build the relation anew, and follow the table with a new checkpoint: it begins with the table's rows."


def iceberg(
    table: str,
    *,
    catalog: str = "default",
    properties: Mapping[str, str] | None = None,
    spark: SparkSession | None = None,
) -> DataFrame:
    """The changes of an Iceberg table: its rows first, then what later snapshots change; needs ``pyiceberg``.

    The result is a streaming DataFrame with the table's columns and ``_operation``, ``_sequence`` and ``_problem``,
    which `dovetail.follow` understands. The key that follows it must be unique in the table.

    Parameters
    ----------
    table
        ``namespace.table``; of format version 2 or later.
    catalog, properties
        As for `dovetail.sinks.iceberg`. Properties are options of Spark's reader here, which its plans may show; put
        secrets into ``~/.pyiceberg.yaml`` on every node.
    spark
        The session; by default the active one.
    """
    session = spark or SparkSession.getActiveSession()
    if session is None:
        raise PlanError("There is no active Spark session.", hint="Pass spark=.")
    place = _Place(table, catalog, tuple((properties or {}).items()))
    try:
        found = place.table()
    except ModuleNotFoundError:
        raise PlanError(
            "The package pyiceberg is not installed.", hint='Run pip install "dovetail[iceberg]".'
        ) from None
    if found.format_version < 2:
        raise PlanError(f"{table} has Iceberg's format 1, whose snapshots have no order.", hint="Upgrade it to 2.")
    session.dataSource.register(IcebergDataSource)
    reader = session.readStream.format(IcebergDataSource.name()).option("table", table).option("catalog", catalog)
    return reader.options(**{_PROPERTY + name: value for name, value in place.properties}).load()


class IcebergDataSource(DataSource):  # type: ignore[misc]
    """The source as Spark sees it."""

    @classmethod
    def name(cls) -> str:
        return "dovetail.iceberg"

    def schema(self) -> T.StructType:
        place = _Place.of(self.options)
        return feed_schema(place.table().schema().as_arrow(), place.name)

    def streamReader(self, schema: T.StructType) -> "_IcebergReader":  # noqa: N802 -- Spark's name
        return _IcebergReader(_Place.of(self.options), schema)


@dataclass(frozen=True)
class _Place:
    name: str
    catalog: str
    properties: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "_Place":
        properties = {n[len(_PROPERTY) :]: value for n, value in options.items() if n.lower().startswith(_PROPERTY)}
        return cls(options["table"], options["catalog"], tuple(properties.items()))

    def table(self) -> "Table":
        from pyiceberg.catalog import load_catalog
        from pyiceberg.exceptions import NoSuchTableError

        catalog = load_catalog(self.catalog, **dict(self.properties))
        try:
            return catalog.load_table(self.name)
        except NoSuchTableError:
            raise PlanError(f"The catalog {self.catalog!r} has no table {self.name!r}.", hint="Check both.") from None
        finally:
            catalog.close()


@dataclass
class _Files(InputPartition):  # type: ignore[misc]
    """Files of a snapshot, all of whose rows are written or deleted."""

    snapshot: int
    names: tuple[str, ...]
    operation: str
    sequence: int


class _IcebergReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    def __init__(self, place: _Place, schema: T.StructType) -> None:
        self._place, self._schema = place, schema
        self._end: int | None = None

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 -- Spark's name
        self._end = self._newest()

    def _newest(self) -> int:
        snapshot = self._place.table().current_snapshot()
        return _NONE if snapshot is None else snapshot.snapshot_id

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 -- Spark's name
        return {"snapshot": _NONE}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802 -- Spark's name
        newest = self._newest() if self._end is None else self._end
        return start if newest == _NONE else {"snapshot": newest}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        first, last = start["snapshot"], end["snapshot"]
        if first == last:
            return []
        table = self._place.table()
        after = self._snapshot(table, last)
        schema = table.schemas()[after.schema_id] if after.schema_id is not None else table.schema()
        require_same_types(self._schema, schema.as_arrow(), self._place.name, last)
        number = after.sequence_number or 0
        if first == _NONE:
            gone: list[str] = []
            new = sorted(_tasks(table, last))
        else:
            before = self._snapshot(table, first)
            if (before.sequence_number or 0) > number:
                raise StateError(
                    f"{self._place.name} was rolled back from snapshot {first} to {last}, which is older.", hint=_ANEW
                )
            gone, new = self._changed(table, before, after)
        written = [_Files(last, group, UPSERT, 2 * number + 1) for group in groups(new)]
        return [*(_Files(first, group, DELETE, 2 * number) for group in groups(gone)), *written]

    def _changed(self, table: "Table", before: "Snapshot", after: "Snapshot") -> tuple[list[str], list[str]]:
        """The files whose rows are deleted and written between two snapshots."""
        first, last = before.snapshot_id, after.snapshot_id
        if _has_only_appends(table, before, after):
            scan = table.incremental_append_scan(from_snapshot_id_exclusive=first, to_snapshot_id_inclusive=last)
            return [], sorted(_name(task) for task in scan.plan_files())
        old, new = set(_tasks(table, first)), set(_tasks(table, last))
        return sorted(old - new), sorted(new - old)

    def _snapshot(self, table: "Table", number: int) -> "Snapshot":
        found = table.snapshot_by_id(number)
        if found is None:
            raise StateError(f"Snapshot {number} of {self._place.name} has expired.", hint=_ANEW)
        return found

    def read(self, partition: _Files) -> Iterator[pa.RecordBatch]:
        from pyiceberg.expressions import AlwaysTrue
        from pyiceberg.io.pyarrow import ArrowScan

        table = self._place.table()
        self._snapshot(table, partition.snapshot)
        scan = table.scan(snapshot_id=partition.snapshot)
        tasks = _tasks(table, partition.snapshot)
        chosen = [tasks[name] for name in partition.names]
        rows = ArrowScan(table.metadata, table.io, scan.projection(), AlwaysTrue()).to_record_batches(chosen)
        try:
            yield from shaped(rows, self._schema, partition.operation, partition.sequence)
        except FileNotFoundError as error:
            raise StateError(
                f"A file of snapshot {partition.snapshot} of {self._place.name} was removed: {error}", hint=_ANEW
            ) from None


def _tasks(table: "Table", snapshot: int) -> dict[str, "FileScanTask"]:
    """The files of a snapshot with their deletes, by a name that differs if the deletes do."""
    found: dict[str, Any] = {_name(task): task for task in table.scan(snapshot_id=snapshot).plan_files()}
    return found


def _name(task: Any) -> str:
    deletes = sorted(f"{file.file_path}#{getattr(file, 'content_offset', None)}" for file in task.delete_files)
    return os.linesep.join([task.file.file_path, *deletes])


def _has_only_appends(table: "Table", before: "Snapshot", after: "Snapshot") -> bool:
    """Whether the second snapshot descends from the first by appends."""
    here: Snapshot | None = after
    while here is not None and here.snapshot_id != before.snapshot_id:
        if here.summary is None or here.summary.operation.value != "append":
            return False
        here = None if here.parent_snapshot_id is None else table.snapshot_by_id(here.parent_snapshot_id)
    return here is not None
