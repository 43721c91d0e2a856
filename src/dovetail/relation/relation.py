"""``Relation``: the table on disk that a stream is joined with. Versioned, sharded, indexed."""

import datetime as dt
import importlib
import os
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import fs

from dovetail.core.errors import PlanError, RelationConflict, RelationError, RelationNotFound, SchemaError
from dovetail.relation import keys, version_log
from dovetail.relation.change_set import ChangeSet
from dovetail.relation.changes import changed_codes
from dovetail.relation.format import CodeKind, Manifest, Operation, RelationStats, Shard, ShardStats
from dovetail.relation.io import Disk, IoMode
from dovetail.relation.local import ArrowSource
from dovetail.relation.looking import first_rows, rows_of_keys
from dovetail.relation.relation_reader import RelationReader
from dovetail.relation.shard_reader import ShardReader
from dovetail.relation.shard_writer import remove_new_files
from dovetail.relation.table_sources import table_reader
from dovetail.relation.upkeep import Upkeep
from dovetail.relation.version_log import VacuumReport, VersionLog
from dovetail.storage.files import RelationFiles, storage_errors
from dovetail.storage.interface import Storage
from dovetail.storage.local import LOCAL

MAX_SHARDS = 65_536

Progress = Callable[[int, int], None]
"""Called with (parts done, total parts) during a write."""

_EMPTY_SHARD = Shard((), ShardStats(0, 0, 0, 0, 0))


class RowSource(Protocol):
    """Rows to write to a relation: an Arrow table, or a Spark DataFrame behind the same interface."""

    schema: pa.Schema
    spark_schema: dict[str, Any] | None

    def write(self, root: str, operation: Operation, base: Manifest, progress: Progress | None = None) -> list[Shard]:
        """Apply ``operation`` to every shard of ``base``."""


@dataclass(frozen=True)
class VersionInfo:
    """One version in a relation's history."""

    version: int
    parent: int | None
    operation: Operation
    created_at: str
    rows: int
    bytes: int


class Relation(Upkeep):
    """A table on disk that streams are joined with: sharded, sorted by join code within each shard, indexed, versioned.

    Create one with :meth:`build` or :meth:`open`. An object represents one version and never changes: :meth:`append`,
    :meth:`upsert` and :meth:`delete` commit a new version and return it. Older versions stay readable until
    :meth:`vacuum`.

    Examples
    --------
    >>> import tempfile, pyarrow as pa
    >>> path = tempfile.mkdtemp() + "/customers"
    >>> customers = Relation.build(pa.table({"id": [1, 2, 3], "city": ["Rome", "Oslo", None]}), path, on="id", shards=2)
    >>> customers.stats.rows, customers.stats.is_unique
    (3, True)
    >>> customers.upsert(pa.table({"id": [2, 4], "city": ["Bergen", "Lima"]})).stats.rows
    4
    >>> [(v.version, v.operation, v.rows) for v in customers.versions()]
    [(1, 'build', 3), (2, 'upsert', 4)]
    >>> Relation.open(path, version=1).stats.rows
    3
    """

    def __init__(self, files: RelationFiles, manifest: Manifest) -> None:
        self._files = files
        self._manifest = manifest

    # ---------------------------------------------------------------- creation

    @classmethod
    def build(
        cls,
        source: Any,
        path: str | os.PathLike[str],
        on: str | Sequence[str],
        shards: int = 8,
        mode: Literal["error", "overwrite"] = "error",
        unique: bool = False,
        progress: Progress | None = None,
    ) -> Self:
        """Write a relation.

        Parameters
        ----------
        source
            A Spark DataFrame, written by one Spark job; or an Arrow table, record batch or reader, written in this
            process; or a Delta or Iceberg table, read into this process: its directory, ``namespace.table`` in the
            default Iceberg catalog, or the object of its library. As with Spark's file sources, every column of the
            relation is nullable.
        path
            A directory on a local disk (on a cluster: one shared by all nodes). Created if missing.
        on
            The key: one column name or several.
        shards
            The number of shards, fixed for the life of the relation. Rule of thumb: twice the cores that will join it.
        mode
            If there is already a relation: ``"error"``, or ``"overwrite"``, which adds a version with the new rows.
            The old versions stay readable until a vacuum.
        unique
            Declare that no two rows have the same key. A write that would violate this is refused.
        progress
            Called with (parts done, total parts).

        Raises
        ------
        PlanError, SchemaError
            A key column is missing or has an unsupported type, or an option has an invalid value.
        RelationError
            The path contains other files or already a relation, or a key declared unique has duplicates.
        """
        key = keys.normalize_key(on)
        if mode not in ("error", "overwrite"):
            raise PlanError(f'mode={mode!r} is not known: use "error" or "overwrite".')
        if isinstance(shards, bool) or not isinstance(shards, int) or not 1 <= shards <= MAX_SHARDS:
            raise PlanError(f"shards={shards!r}: a relation has from 1 to {MAX_SHARDS} shards.")
        rows = row_source(source)
        keys.check_schema(rows.schema, key)
        return cls._build(RelationFiles(path), rows, key, shards, mode, unique, progress)

    @classmethod
    def _build(
        cls,
        files: RelationFiles,
        rows: RowSource,
        key: tuple[str, ...],
        shards: int,
        mode: Literal["error", "overwrite"] = "error",
        unique: bool = False,
        progress: Progress | None = None,
    ) -> Self:
        version_log.check_is_free(files)
        version_log.prepare(files)
        with files.writing(create=True) as root:
            log = VersionLog(files)
            versions = log.numbers()
            if versions and mode == "error":
                raise RelationError(
                    f'{root} already holds a relation (version {versions[-1]}): use mode="overwrite" to replace its '
                    "rows, Relation.open to use it, or another path."
                )
            base = Manifest(
                relation_id=uuid.uuid4().hex,
                version=versions[-1] if versions else 0,
                parent=None,
                operation="build",
                created_at="",
                key=key,
                code_kind=keys.code_kind(rows.schema, key),
                is_unique_key=unique,
                schema=rows.schema,
                spark_schema=rows.spark_schema,
                shards=(_EMPTY_SHARD,) * shards,
            )
            return cls._commit(files, root, base, rows, "build", progress)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], version: int | None = None, filesystem: fs.FileSystem | None = None
    ) -> Self:
        """Open a version, by default the latest.

        Parameters
        ----------
        path
            The relation's directory, or a URI of a file system that ``pyarrow.fs`` supports.
        version
            A version number from :meth:`versions`.
        filesystem
            A ``pyarrow.fs.FileSystem`` to read ``path`` on.
        """
        files = RelationFiles(path, filesystem)
        return cls(files, VersionLog(files).read(version))

    # ---------------------------------------------------------------- changes

    def append(self, source: Any, progress: Progress | None = None) -> Self:
        """Add rows to the latest version, regardless of this object's version, and return the new version."""
        return self._change(source, "append", progress)

    def upsert(self, source: Any, progress: Progress | None = None) -> Self:
        """Replace the rows of every key in ``source`` with its rows for that key; add new keys."""
        return self._change(source, "upsert", progress)

    def upsert_if_latest(self, source: Any, origin: Mapping[str, Any] | None = None) -> Self:
        """As `upsert`, but only if this object's version is the latest; else a `RelationConflict`.

        ``origin`` is recorded in the new version, ready for JSON; see :attr:`origin`.

        Examples
        --------
        >>> import tempfile, pyarrow as pa
        >>> first = Relation.build(pa.table({"id": [1], "n": [1]}), tempfile.mkdtemp() + "/r", on="id")
        >>> first.upsert_if_latest(pa.table({"id": [1], "n": [2]}), {"flow": "f"}).origin
        {'flow': 'f'}
        >>> first.upsert_if_latest(pa.table({"id": [1], "n": [3]})).version
        Traceback (most recent call last):
        dovetail.core.errors.RelationConflict: ... has version 2 by now, this change was planned on version 1. ...
        """
        return self._change(source, "upsert", None, self.version, origin)

    def delete(self, keys_source: Any, progress: Progress | None = None) -> Self:
        """Remove all rows of the keys in ``keys_source``, which needs only the key columns."""
        return self._change(keys_source, "delete", progress)

    def vacuum(self, keep: int = 3, also: Collection[int] = ()) -> VacuumReport:
        """Remove versions, and all files that no remaining version uses.

        Versions that running queries and flows have pinned stay, see `dovetail.relation.pins`. Open shards of a removed
        version stay readable, but the version cannot be opened again. Run it on the host that
        writes: the lock that protects a writer's unfinished files does not reach other hosts.

        Parameters
        ----------
        keep
            How many of the newest versions stay.
        also
            Versions that stay besides.
        """
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise PlanError(f"keep={keep!r}: a vacuum keeps at least 1 version.")
        with self._files.writing() as root, storage_errors(root):
            return VersionLog(self._files).vacuum(root, keep, also)

    def _change(
        self,
        source: Any,
        operation: Operation,
        progress: Progress | None,
        expected: int | None = None,
        origin: Mapping[str, Any] | None = None,
    ) -> Self:
        rows = row_source(source, self._files.storage)
        with self._files.writing() as root:
            newest = VersionLog(self._files).read()
            if expected not in (None, newest.version):
                raise RelationConflict(
                    f"{root} has version {newest.version} by now, this change was planned on version {expected}. "
                    "Nothing was changed; open the latest version and try again."
                )
            _check_same_columns(newest, rows, operation)
            return self._commit(self._files, root, newest, rows, operation, progress, origin)

    @classmethod
    def _commit(
        cls,
        files: RelationFiles,
        root: os.PathLike[str],
        base: Manifest,
        rows: RowSource,
        operation: Operation,
        progress: Progress | None,
        origin: Mapping[str, Any] | None = None,
    ) -> Self:
        shards = rows.write(os.fspath(root), operation, base, progress)
        manifest = replace(
            base,
            version=base.version + 1,
            parent=base.version or None,
            operation=operation,
            created_at=dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
            shards=tuple(shards),
            origin=origin,
        )
        log = VersionLog(files)
        try:
            log.commit(files.writable(), manifest)
        except RelationError as error:
            # If the disk fails after the manifest was linked, the version exists and needs its files.
            if isinstance(error, RelationConflict) or manifest.version not in log.numbers():
                remove_new_files(os.fspath(root), base, dict(enumerate(shards)), files.storage)
            raise
        return cls(files, manifest)

    # ---------------------------------------------------------------- properties and reading

    @property
    def path(self) -> str:
        """The directory of the relation."""
        return self._files.root

    @property
    def filesystem(self) -> fs.FileSystem | None:
        """The file system it is read from; None if it is local and its files are mapped."""
        return None if self._files.local is not None else self._files.filesystem

    @property
    def relation_id(self) -> str:
        """Set by the build and inherited by every change. Identifies the relation regardless of its path."""
        return self._manifest.relation_id

    @property
    def version(self) -> int:
        """The version of this object."""
        return self._manifest.version

    @property
    def origin(self) -> Mapping[str, Any] | None:
        """What the writer of this version recorded about where its changes are from; None: nothing."""
        return self._manifest.origin

    @property
    def key(self) -> tuple[str, ...]:
        """The key columns."""
        return self._manifest.key

    @property
    def code_kind(self) -> CodeKind:
        """``"value"`` if the key is its own join code, ``"xxhash64"`` if the code is a hash of it."""
        return self._manifest.code_kind

    @property
    def is_unique_key(self) -> bool:
        """Whether the key was declared unique."""
        return self._manifest.is_unique_key

    @property
    def num_shards(self) -> int:
        """The number of shards."""
        return len(self._manifest.shards)

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema."""
        return self._manifest.schema

    @property
    def spark_schema(self) -> Any:
        """The schema as Spark's JSON, if Spark built the relation, else None."""
        return self._manifest.spark_schema

    @property
    def stats(self) -> RelationStats:
        """Statistics: totals and per shard."""
        return self._manifest.stats

    @property
    def index_bytes(self) -> int:
        """Bytes of the index that are resident while all shards are open."""
        return sum(self.shard(number, columns=[]).index_bytes for number in range(self.num_shards))

    @property
    def version_info(self) -> VersionInfo:
        """How and when this version was created."""
        return _version_info(self._manifest)

    def versions(self) -> list[VersionInfo]:
        """The versions that have not been vacuumed, oldest first."""
        log = VersionLog(self._files)
        found = []
        for number in log.numbers():
            # A vacuum may have removed it after its name was listed.
            with suppress(RelationNotFound):
                found.append(_version_info(log.read(number)))
        return found

    def shard(
        self,
        number: int,
        columns: Sequence[str] | None = None,
        io: IoMode | Disk = "map",
        include_null_keys: bool = False,
    ) -> ShardReader:
        """Open one shard for reading.

        Parameters
        ----------
        number
            From 0 to ``num_shards - 1``.
        columns
            The columns to return, by default all.
        io
            ``"map"``, ``"buffered"``, ``"direct"``, or a :class:`~dovetail.relation.io.SimulatedDisk`.
        include_null_keys
            Also return the rows whose key has a NULL, after the others. They match nothing by equality.
        """
        if not 0 <= number < self.num_shards:
            raise PlanError(f"shard {number} does not exist: {self.path} has shards 0 to {self.num_shards - 1}.")
        return ShardReader(self._files, self._manifest, number, columns, io, include_null_keys)

    def reader(self, columns: Sequence[str] | None = None, io: IoMode | Disk = "map") -> RelationReader:
        """Open all shards for reading, behind the interface of a single shard.

        Parameters
        ----------
        columns, io
            See :meth:`shard`.

        Examples
        --------
        >>> import tempfile, numpy as np, pyarrow as pa
        >>> rows = pa.table({"k": [1, 2, 3], "name": ["a", "b", "c"]})
        >>> relation = Relation.build(rows, tempfile.mkdtemp() + "/r", on="k", shards=2)
        >>> reader = relation.reader(columns=["name"])
        >>> _, positions = reader.lookup(np.array([3, 1]))
        >>> reader.gather(positions).column("name").to_pylist()
        ['c', 'a']
        """
        return RelationReader([self.shard(number, columns, io) for number in range(self.num_shards)])

    def changed_codes(self, earlier: "Relation", codes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which of these join codes may have different rows in this version than in ``earlier``."""
        return changed_codes(self._files, earlier._manifest, self._manifest, codes)

    def to_df(self, spark: Any) -> Any:
        """Return the rows as a Spark DataFrame, one partition per shard.

        Parameters
        ----------
        spark
            The ``SparkSession`` to read with.
        """
        return importlib.import_module("dovetail.spark.plan.relation_jobs").read(self, spark)

    def to_arrow(self) -> pa.Table:
        """Return all rows as an Arrow table. For relations that fit in memory."""
        batches = [
            block.rows
            for number in range(self.num_shards)
            for block in self.shard(number, include_null_keys=True).blocks(65_536)
        ]
        return pa.Table.from_batches(batches, schema=self.schema)

    def head(self, rows: int = 5) -> pa.Table:
        """Return a few rows, to look at.

        Examples
        --------
        >>> import tempfile, pyarrow as pa
        >>> table = pa.table({"k": [1, 2, 3], "name": ["a", "b", "c"]})
        >>> Relation.build(table, tempfile.mkdtemp() + "/r", on="k", shards=1).head(2).to_pylist()
        [{'k': 1, 'name': 'a'}, {'k': 2, 'name': 'b'}]
        """
        shards = (self.shard(number, include_null_keys=True) for number in range(self.num_shards))
        return first_rows(shards, rows, self.schema)

    def lookup(self, keys: Any) -> pa.Table:
        """Return all rows of some keys, in the order of the keys.

        Parameters
        ----------
        keys
            Values of the key; for a key of several columns, tuples of them; or an Arrow table with the key's columns.

        Examples
        --------
        >>> import tempfile, pyarrow as pa
        >>> table = pa.table({"k": ["x", "y", "y"], "n": [1, 2, 3]})
        >>> Relation.build(table, tempfile.mkdtemp() + "/r", on="k", shards=2).lookup(["y", "z"]).to_pylist()
        [{'k': 'y', 'n': 2}, {'k': 'y', 'n': 3}]
        """
        return rows_of_keys(self.reader(), self.schema, self.key, keys)

    def __repr__(self) -> str:
        key, stats = ", ".join(self.key), self.stats
        return (
            f"Relation({self.path!r}, version={self.version}, key=({key}), rows={stats.rows}, shards={self.num_shards})"
        )


def row_source(source: Any, storage: Storage = LOCAL) -> RowSource:
    """Wrap the source of a write. Spark's workers write to the local storage."""
    if isinstance(source, pa.Table | pa.RecordBatch | pa.RecordBatchReader):
        return ArrowSource(source, storage)
    if isinstance(source, ChangeSet):
        return source
    if type(source).__module__.startswith("pyspark.sql.") and hasattr(source, "isStreaming"):
        # Imported by name: reading a relation must not require Spark.
        job = importlib.import_module("dovetail.spark.plan.relation_jobs")
        return job.DataFrameSource(source)  # type: ignore[no-any-return]
    reader = table_reader(source)
    if reader is not None:
        return ArrowSource(reader, storage)
    raise PlanError(
        f"a {type(source).__name__} cannot be written to a relation: pass a Spark DataFrame or an Arrow table."
    )


def _version_info(manifest: Manifest) -> VersionInfo:
    stats = manifest.stats
    return VersionInfo(
        manifest.version, manifest.parent, manifest.operation, manifest.created_at, stats.rows, stats.bytes
    )


def _check_same_columns(base: Manifest, rows: RowSource, operation: Operation) -> None:
    schema = rows.schema
    keys.check_names(schema.names)
    wanted = list(base.key) if operation == "delete" else base.schema.names
    missing = [name for name in wanted if name not in schema.names]
    if missing:
        raise SchemaError(
            f"{operation}: column {missing[0]!r} is missing; the data has {', '.join(schema.names)}. Add it, or rename "
            "the column that holds it."
        )
    surplus = [name for name in schema.names if name not in base.schema.names]
    if surplus and operation != "delete":
        raise SchemaError(
            f"{operation}: column {surplus[0]!r} is not in the relation, whose columns are "
            f"{', '.join(base.schema.names)}. Drop it, or build the relation again with it."
        )
    for name in wanted:
        here, there = schema.field(name).type, base.schema.field(name).type
        if here != there:
            raise SchemaError(
                f"{operation}: column {name!r} has type {here}, but {there} in the relation. Cast it first."
            )
    if base.spark_schema is not None and rows.spark_schema is not None:
        # Several Spark types map to the same Arrow type: an interval of months is stored as an integer.
        ours, theirs = _spark_types(base.spark_schema), _spark_types(rows.spark_schema)
        differing = [name for name in wanted if ours[name] != theirs[name]]
        if differing:
            name = differing[0]
            raise SchemaError(
                f"{operation}: column {name!r} has the Spark type {theirs[name]}, but {ours[name]} in the relation. "
                "Cast it first."
            )


def _spark_types(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The types in Spark's JSON schema, without comments and other metadata."""
    return {field["name"]: _bare(field["type"]) for field in schema["fields"]}


def _bare(kind: Any) -> Any:
    if isinstance(kind, dict):
        return {name: _bare(value) for name, value in kind.items() if name != "metadata"}
    return [_bare(part) for part in kind] if isinstance(kind, list) else kind
