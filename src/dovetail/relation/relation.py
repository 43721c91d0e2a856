"""``Relation``: the disk-resident side of a join, versioned, sharded, indexed."""

import datetime as dt
import importlib
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import fs

from dovetail.errors import PlanError, RelationConflict, RelationError, RelationNotFound, SchemaError
from dovetail.relation import keys, version_log
from dovetail.relation.changes import changed_codes
from dovetail.relation.files import RelationFiles, storage_errors
from dovetail.relation.format import CodeKind, Manifest, Operation, RelationStats, Shard, ShardStats
from dovetail.relation.io import Disk, IoMode
from dovetail.relation.local import ArrowSource
from dovetail.relation.relation_reader import RelationReader
from dovetail.relation.shard_reader import ShardReader
from dovetail.relation.shard_writer import remove_new_files
from dovetail.relation.version_log import VacuumReport, VersionLog

MAX_SHARDS = 65_536

Progress = Callable[[int, int], None]
"""Called with (parts done, parts in all) while a write goes on."""

_EMPTY_SHARD = Shard((), ShardStats(0, 0, 0, 0, 0))


class RowSource(Protocol):
    """Rows on their way into a relation: an Arrow table, or a Spark DataFrame behind the same two methods."""

    schema: pa.Schema
    spark_schema: dict[str, Any] | None

    def write(self, root: str, operation: Operation, base: Manifest, progress: Progress | None = None) -> list[Shard]:
        """Apply ``operation`` to every shard of ``base``."""


@dataclass(frozen=True)
class VersionInfo:
    """One line of a relation's history."""

    version: int
    parent: int | None
    operation: Operation
    created_at: str
    rows: int
    bytes: int


class Relation:
    """A table on disk that streams are joined with: sorted by join code inside shards, indexed, versioned.

    Make one with :meth:`build` or :meth:`open`. An object is one version and never changes: :meth:`append`,
    :meth:`upsert` and :meth:`delete` commit a new version and return it. Readers of older versions are not disturbed
    until :meth:`vacuum`.

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

    # ---------------------------------------------------------------- making one

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
            A Spark DataFrame, written by one Spark job; or an Arrow table, record batch or reader, written here. As
            with Spark's own file sources, every column of the relation can hold NULLs, whatever the source says.
        path
            A directory on a local disk (on a cluster: one that all nodes share). Created if needed.
        on
            The key: one column name or several.
        shards
            How many slices the relation has; fixed for its life. As a rule twice the cores that will join it.
        mode
            What to do if a relation is there: ``"error"``, or ``"overwrite"``, which adds a version with the new
            rows; the old versions stay readable until a vacuum.
        unique
            Declare that no two rows have the same key; a write that would break it is refused.
        progress
            Called with (parts done, parts in all).

        Raises
        ------
        PlanError, SchemaError
            A key column is missing or cannot be one, or an option has no such value.
        RelationError
            The path holds something else, or a relation already, or a declared unique key is not.
        """
        key = keys.normalize_key(on)
        if mode not in ("error", "overwrite"):
            raise PlanError(f'mode={mode!r} is not known: use "error" or "overwrite".')
        if isinstance(shards, bool) or not isinstance(shards, int) or not 1 <= shards <= MAX_SHARDS:
            raise PlanError(f"shards={shards!r}: a relation has from 1 to {MAX_SHARDS} shards.")
        rows = row_source(source)
        keys.check_schema(rows.schema, key)
        files = RelationFiles(path)
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
        """Open a version, by default the newest.

        Parameters
        ----------
        path
            The relation's directory, or a URI of a file system that ``pyarrow.fs`` knows.
        version
            A version number from :meth:`versions`.
        filesystem
            A ``pyarrow.fs.FileSystem`` to read ``path`` on.
        """
        files = RelationFiles(path, filesystem)
        return cls(files, VersionLog(files).read(version))

    # ---------------------------------------------------------------- changing it

    def append(self, source: Any, progress: Progress | None = None) -> Self:
        """Add rows to the newest version, whichever this object is, and return the new one."""
        return self._change(source, "append", progress)

    def upsert(self, source: Any, progress: Progress | None = None) -> Self:
        """Replace the rows of every key in ``source`` by the rows it gives for that key; add keys that are new."""
        return self._change(source, "upsert", progress)

    def delete(self, keys_source: Any, progress: Progress | None = None) -> Self:
        """Remove all rows of the keys in ``keys_source``, which needs the key columns only."""
        return self._change(keys_source, "delete", progress)

    def vacuum(self, keep: int = 3) -> VacuumReport:
        """Remove all but the newest ``keep`` versions and the files that only they, or a killed writer, left behind.

        Shards of a removed version that are open go on being read; it cannot be opened anew. Run it on the host that
        writes: the lock that keeps it from a writer's unfinished files does not reach other hosts.
        """
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise PlanError(f"keep={keep!r}: a vacuum keeps at least 1 version.")
        with self._files.writing() as root, storage_errors(root):
            return VersionLog(self._files).vacuum(root, keep)

    def _change(self, source: Any, operation: Operation, progress: Progress | None) -> Self:
        rows = row_source(source)
        with self._files.writing() as root:
            newest = VersionLog(self._files).read()
            _check_same_columns(newest, rows, operation)
            return self._commit(self._files, root, newest, rows, operation, progress)

    @classmethod
    def _commit(
        cls,
        files: RelationFiles,
        root: os.PathLike[str],
        base: Manifest,
        rows: RowSource,
        operation: Operation,
        progress: Progress | None,
    ) -> Self:
        shards = rows.write(os.fspath(root), operation, base, progress)
        manifest = replace(
            base,
            version=base.version + 1,
            parent=base.version or None,
            operation=operation,
            created_at=dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
            shards=tuple(shards),
        )
        log = VersionLog(files)
        try:
            log.commit(files.writable(), manifest)
        except RelationError as error:
            # A disk that fails after the manifest got its name leaves a version that needs its files.
            if isinstance(error, RelationConflict) or manifest.version not in log.numbers():
                remove_new_files(os.fspath(root), base, dict(enumerate(shards)))
            raise
        return cls(files, manifest)

    # ---------------------------------------------------------------- looking at it

    @property
    def path(self) -> str:
        """Where it is."""
        return self._files.root

    @property
    def filesystem(self) -> fs.FileSystem | None:
        """The file system that it is read on; None if that is a local one, whose files are mapped."""
        return None if self._files.local is not None else self._files.filesystem

    @property
    def relation_id(self) -> str:
        """Given by the build and inherited by every change: the same rows at another path, or other rows at this one,
        are told apart by it."""
        return self._manifest.relation_id

    @property
    def version(self) -> int:
        """The version that this object is."""
        return self._manifest.version

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
        """How many shards it has."""
        return len(self._manifest.shards)

    @property
    def schema(self) -> pa.Schema:
        """Its columns, as an Arrow schema."""
        return self._manifest.schema

    @property
    def spark_schema(self) -> Any:
        """Its columns as Spark's JSON schema, if Spark built it, else None."""
        return self._manifest.spark_schema

    @property
    def stats(self) -> RelationStats:
        """Its counts, in all and per shard."""
        return self._manifest.stats

    @property
    def index_bytes(self) -> int:
        """Bytes of its index that stay in memory while all shards are open."""
        return sum(self.shard(number, columns=[]).index_bytes for number in range(self.num_shards))

    @property
    def version_info(self) -> VersionInfo:
        """How and when this version was made."""
        return _version_info(self._manifest)

    def versions(self) -> list[VersionInfo]:
        """Its history, oldest version first, as far as it was not vacuumed."""
        log = VersionLog(self._files)
        found = []
        for number in log.numbers():
            # Removed by a vacuum since its name was read.
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
            Also give the rows whose key has a NULL, after the others. They match nothing by equality.
        """
        if not 0 <= number < self.num_shards:
            raise PlanError(f"shard {number} does not exist: {self.path} has shards 0 to {self.num_shards - 1}.")
        return ShardReader(self._files, self._manifest, number, columns, io, include_null_keys)

    def reader(self, columns: Sequence[str] | None = None, io: IoMode | Disk = "map") -> RelationReader:
        """Open all shards for reading, behind the interface of one.

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
        """Which of these join codes may have other rows in this version than in another one of the same relation."""
        return changed_codes(self._files, earlier._manifest, self._manifest, codes)

    def to_df(self, spark: Any) -> Any:
        """Its rows as a Spark DataFrame, one partition per shard, with the types that Spark gave it or would give it.

        Parameters
        ----------
        spark
            The ``SparkSession`` to read with.
        """
        return importlib.import_module("dovetail.spark.relation_jobs").read(self, spark)

    def to_arrow(self) -> pa.Table:
        """All rows as an Arrow table: for relations that fit in memory."""
        batches = [
            block.rows
            for number in range(self.num_shards)
            for block in self.shard(number, include_null_keys=True).blocks(65_536)
        ]
        return pa.Table.from_batches(batches, schema=self.schema)

    def __repr__(self) -> str:
        key, stats = ", ".join(self.key), self.stats
        return (
            f"Relation({self.path!r}, version={self.version}, key=({key}), rows={stats.rows}, shards={self.num_shards})"
        )


def row_source(source: Any) -> RowSource:
    """Rows to write, from whatever the caller has."""
    if isinstance(source, pa.Table | pa.RecordBatch | pa.RecordBatchReader):
        return ArrowSource(source)
    if type(source).__module__.startswith("pyspark.sql.") and hasattr(source, "isStreaming"):
        # Looked up by name: reading a relation must not need Spark.
        job = importlib.import_module("dovetail.spark.relation_jobs")
        return job.DataFrameSource(source)  # type: ignore[no-any-return]
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
            "the column that has another name."
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
                f"{operation}: column {name!r} has type {here}, in the relation it has type {there}. Cast it first."
            )
    if base.spark_schema is not None and rows.spark_schema is not None:
        # Several Spark types travel as the same Arrow type: an interval of months is stored as an integer.
        ours, theirs = _spark_types(base.spark_schema), _spark_types(rows.spark_schema)
        differing = [name for name in wanted if ours[name] != theirs[name]]
        if differing:
            name = differing[0]
            raise SchemaError(
                f"{operation}: column {name!r} has the Spark type {theirs[name]}, in the relation it has {ours[name]}. "
                "Cast it first."
            )


def _spark_types(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The types in Spark's JSON schema, without comments and other metadata."""
    return {field["name"]: _bare(field["type"]) for field in schema["fields"]}


def _bare(kind: Any) -> Any:
    if isinstance(kind, dict):
        return {name: _bare(value) for name, value in kind.items() if name != "metadata"}
    return [_bare(part) for part in kind] if isinstance(kind, list) else kind
