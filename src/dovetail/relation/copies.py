"""A copy of a relation that stays current: each time with the same rows, or with a new version that has others."""

import datetime as dt
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from dovetail.core.faultpoints import fault_point
from dovetail.relation import version_log
from dovetail.relation.format import Manifest
from dovetail.relation.relation import Relation
from dovetail.relation.version_log import VersionLog
from dovetail.storage.files import RelationFiles, storage_errors
from dovetail.storage.interface import Storage
from dovetail.storage.local import LOCAL

__all__ = ["copy_to"]


def copy_to(source: Relation, path: str | os.PathLike[str], storage: Storage = LOCAL) -> Relation:
    """Return the latest version of the relation at ``path``, which has the rows of ``source``.

    If there is none, or its rows are others, a version is added. It stays the same relation (`Relation.relation_id`) if
    columns, key and shards are the same. Rows are compared by the digests of segments: a build of the same rows has the
    same ones, unless keys are repeated and their rows come in another order.

    Examples
    --------
    >>> import tempfile, pyarrow as pa
    >>> root = tempfile.mkdtemp()
    >>> first = Relation.build(pa.table({"k": [1]}), root + "/first", on="k")
    >>> again = Relation.build(pa.table({"k": [1]}), root + "/again", on="k")
    >>> other = Relation.build(pa.table({"k": [2]}), root + "/other", on="k")
    >>> [copy_to(source, root + "/copy").version for source in (first, again, other)]
    [1, 1, 2]
    """
    files, rows = RelationFiles(path, storage=storage), source._manifest
    version_log.check_is_free(files)
    version_log.prepare(files)
    with files.writing(create=True) as root:
        log = VersionLog(files)
        newest = log.read() if log.numbers() else None
        if newest is not None and _layout(newest) == _layout(rows) and _digests(newest) == _digests(rows):
            return Relation(files, newest)
        with storage_errors(root):
            _copy_files(Path(source.path) / "data", root / "data", rows, storage)
        manifest = replace(
            rows,
            relation_id=newest.relation_id
            if newest is not None and _layout(newest) == _layout(rows)
            else rows.relation_id,
            version=1 if newest is None else newest.version + 1,
            parent=None if newest is None else newest.version,
            operation="build",
            created_at=dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
            origin=None,
        )
        log.commit(root, manifest)
        return Relation(files, manifest)


def _layout(manifest: Manifest) -> tuple[object, ...]:
    return manifest.schema, manifest.spark_schema, manifest.key, manifest.code_kind, len(manifest.shards)


def _digests(manifest: Manifest) -> list[list[tuple[str, str]]]:
    """What identifies the rows of each shard."""
    return [
        sorted(
            (segment.index_digest, segment.deletions.digest if segment.deletions else "") for segment in shard.segments
        )
        for shard in manifest.shards
    ]


def _copy_files(source: Path, target: Path, manifest: Manifest, storage: Storage) -> None:
    """Copy all files of a version, durably; where that is possible, without copying their bytes."""
    directories = {(target / name).parent for name in manifest.data_files()}
    for directory in directories:
        storage.make_directory(directory)
    for name in manifest.data_files():
        with suppress(FileExistsError):  # of a copy that was killed before its manifest
            storage.copy(source / name, target / name)
        fault_point("relation.copy.file")
    storage.sync(directories)
