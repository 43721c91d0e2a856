"""The changes of a Delta table as a stream: first its rows, then what each version changes.

With ``delta.enableChangeDataFeed`` the table's own feed is read. Without it, two versions are compared by their files:
the rows of a file that is gone are deleted, those of a new file are written. That reads whole files, also those that a
compaction has only moved.

An offset is a version. The same two versions give the same rows for as long as the table keeps their files.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import types as T
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from dovetail.core.errors import PlanError, StateError
from dovetail.spark.sources.table_feed import DELETE, UPSERT, feed_schema, groups, require_same_types, shaped

if TYPE_CHECKING:
    from deltalake import DeltaTable

__all__ = ["DeltaDataSource", "delta"]

_STORAGE = "storage."
_FEED = "delta.enableChangeDataFeed"
_TYPE, _VERSION = "_change_type", "_commit_version"
_ANEW = "Build the relation anew, and follow the table with a new checkpoint: it begins with the table's rows."
_BEFORE = ("delete", "update_preimage")


def delta(
    path: str | os.PathLike[str],
    *,
    versions_per_trigger: int | None = None,
    storage_options: Mapping[str, str] | None = None,
    spark: SparkSession | None = None,
) -> DataFrame:
    """The changes of a Delta table: its rows first, then what each version changes; needs the package ``deltalake``.

    The result is a streaming DataFrame with the table's columns and ``_operation``, ``_sequence`` and ``_problem``,
    which `dovetail.follow` understands. The key that follows it must be unique in the table.

    Parameters
    ----------
    path
        The table's directory, or an address that ``deltalake`` knows.
    versions_per_trigger
        At most this many versions per micro-batch.
    storage_options
        As for ``deltalake.DeltaTable``.
    spark
        The session; by default the active one.
    """
    session = spark or SparkSession.getActiveSession()
    if session is None:
        raise PlanError("There is no active Spark session.", hint="Pass spark=.")
    try:
        import deltalake
    except ModuleNotFoundError:
        raise PlanError("The package deltalake is not installed.", hint='Run pip install "dovetail[delta]".') from None
    text = os.fspath(path)
    if not deltalake.DeltaTable.is_deltatable(text, storage_options=dict(storage_options or {})):
        raise PlanError(f"{text} is no Delta table.", hint="Name the directory that has _delta_log.")
    if versions_per_trigger is not None and versions_per_trigger < 1:
        raise PlanError(f"versions_per_trigger={versions_per_trigger} must be 1 or more.")
    session.dataSource.register(DeltaDataSource)
    reader = session.readStream.format(DeltaDataSource.name()).option("path", text)
    if versions_per_trigger is not None:
        reader = reader.option("versionsPerTrigger", versions_per_trigger)
    return reader.options(**{_STORAGE + name: value for name, value in (storage_options or {}).items()}).load()


class DeltaDataSource(DataSource):  # type: ignore[misc]
    """The source as Spark sees it."""

    @classmethod
    def name(cls) -> str:
        return "dovetail.delta"

    def schema(self) -> T.StructType:
        place = _Place.of(self.options)
        return feed_schema(pa.schema(place.table().schema().to_arrow()), place.path)

    def streamReader(self, schema: T.StructType) -> "_DeltaReader":  # noqa: N802 -- Spark's name
        options = {name.lower(): value for name, value in self.options.items()}
        most = options.get("versionspertrigger")
        return _DeltaReader(_Place.of(self.options), schema, None if most is None else int(most))


@dataclass(frozen=True)
class _Place:
    path: str
    storage: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, options: Mapping[str, str]) -> "_Place":
        storage = {n[len(_STORAGE) :]: value for n, value in options.items() if n.lower().startswith(_STORAGE)}
        return cls(options["path"], tuple(storage.items()))

    def table(self, version: int | None = None) -> "DeltaTable":
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        try:
            return DeltaTable(self.path, version=version, storage_options=dict(self.storage))
        except DeltaError as error:
            raise self.gone(version, error) from None

    def gone(self, version: int | None, error: Exception) -> StateError:
        what = "The newest version" if version is None else f"Version {version}"
        return StateError(
            f"{what} of {self.path} cannot be read: {str(error).splitlines()[0]} Its retention may have passed.",
            hint=_ANEW,
        )


@dataclass
class _Files(InputPartition):  # type: ignore[misc]
    """Files of a version, all of whose rows are written or deleted."""

    version: int
    names: tuple[str, ...]
    operation: str
    sequence: int


@dataclass
class _Rows(InputPartition):  # type: ignore[misc]
    """All rows of a version, read by the library: it knows deletion vectors, and reads in one task."""

    version: int


@dataclass
class _Feed(InputPartition):  # type: ignore[misc]
    """The table's own feed, from one version to another, both included."""

    first: int
    last: int


class _DeltaReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    def __init__(self, place: _Place, schema: T.StructType, versions_per_trigger: int | None) -> None:
        self._place, self._schema, self._most = place, schema, versions_per_trigger
        self._end: int | None = None

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 -- Spark's name
        self._end = self._place.table().version()

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 -- Spark's name
        return {"version": -1}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802 -- Spark's name
        here = start["version"]
        newest = self._place.table().version() if self._end is None else self._end
        if newest < here and self._end is None:
            raise StateError(
                f"{self._place.path} is at version {newest}, and was at {here}: it was replaced by another table.",
                hint=_ANEW,
            )
        # The first micro-batch has the rows of a version, however many came before it.
        most = newest if here < 0 or self._most is None else min(newest, here + self._most)
        return {"version": max(here, most)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        first, last = start["version"], end["version"]
        if last <= first:
            return []
        table = self._place.table(last)
        require_same_types(self._schema, pa.schema(table.schema().to_arrow()), self._place.path, last)
        if first < 0:
            names = _file_names(table)
            if names is None:
                return [_Rows(last)]
            return [_Files(last, group, UPSERT, 2 * last + 1) for group in groups(sorted(names))]
        if _has_feed(table):
            self._require_log(first + 1, last)
            before = self._place.table(first)
            if _has_feed(before):
                return [_Feed(first + 1, last)]
        return self._compared(first, last)

    def _require_log(self, first: int, last: int) -> None:
        """Say plainly that versions are gone; elsewhere than on local disks the library says it in its words."""
        log = os.path.join(self._place.path.removeprefix("file://"), "_delta_log")
        if os.path.isdir(log):
            for version in range(first, last + 1):
                if not os.path.exists(os.path.join(log, f"{version:020d}.json")):
                    raise self._place.gone(version, FileNotFoundError("its entry of the log was removed."))

    def _compared(self, first: int, last: int) -> Sequence[InputPartition]:
        before, after = _file_names(self._place.table(first)), _file_names(self._place.table(last))
        if before is None or after is None:
            raise StateError(
                f"{self._place.path} marks deleted rows in files that stay, so two versions cannot be compared by "
                "their files.",
                hint=f"Set {_FEED} = true in the table, and follow it with a new checkpoint.",
            )
        gone = [_Files(first, group, DELETE, 2 * last) for group in groups(sorted(before - after))]
        return [*gone, *(_Files(last, group, UPSERT, 2 * last + 1) for group in groups(sorted(after - before)))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from deltalake.exceptions import DeltaError

        try:
            if isinstance(partition, _Feed):
                reader = self._place.table().load_cdf(partition.first, partition.last)
                yield from shaped(pa.RecordBatchReader.from_stream(reader), self._schema, _operations, _sequences)
            elif isinstance(partition, _Rows):
                rows = pa.RecordBatchReader.from_stream(self._place.table(partition.version).scan())
                yield from shaped(rows, self._schema, UPSERT, 2 * partition.version + 1)
            elif isinstance(partition, _Files):
                yield from shaped(self._rows_of(partition), self._schema, partition.operation, partition.sequence)
        except (DeltaError, FileNotFoundError) as error:
            version = partition.first if isinstance(partition, _Feed) else partition.version
            raise self._place.gone(version, error) from None

    def _rows_of(self, files: _Files) -> Iterator[pa.RecordBatch]:
        dataset = self._place.table(files.version).to_pyarrow_dataset()
        wanted = set(files.names)
        for fragment in dataset.get_fragments():
            if fragment.path in wanted:
                yield from fragment.to_batches(schema=dataset.schema)


def _has_feed(table: "DeltaTable") -> bool:
    return str(table.metadata().configuration.get(_FEED, "false")).lower() == "true"


def _file_names(table: "DeltaTable") -> set[str] | None:
    """The files of a version; None if it marks deleted rows in files, which Arrow does not read."""
    from deltalake.exceptions import DeltaProtocolError

    if table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none":
        return None
    try:
        return {fragment.path for fragment in table.to_pyarrow_dataset().get_fragments()}
    except DeltaProtocolError:
        return None


def _operations(batch: pa.RecordBatch) -> pa.Array:
    kinds = batch.column(_TYPE).cast(pa.string())
    return pc.if_else(pc.is_in(kinds, pa.array(_BEFORE)), DELETE, UPSERT)


def _sequences(batch: pa.RecordBatch) -> pa.Array:
    version = batch.column(_VERSION).cast(pa.int64())
    is_written = pc.invert(pc.is_in(batch.column(_TYPE).cast(pa.string()), pa.array(_BEFORE)))
    return pc.add(pc.multiply(version, 2), is_written.cast(pa.int64()))
