"""The layout of a relation on disk: manifests, shards, segments and their statistics.

::

    <path>/RELATION                         marks the directory as a relation
    <path>/writer.lock                      held by the one writer of this host
    <path>/versions/00000001.json           one manifest per version, created exclusively; only an erasure changes it
    <path>/versions/00000001.leaving        one that a vacuum is about to remove
    <path>/data/<shard>/<segment>.rows      Arrow IPC stream, record batches sorted by code
    <path>/data/<shard>/<segment>.codes     the same rows' codes, int64 little-endian
    <path>/data/<shard>/<segment>.index     sparse fences, batch offsets, digests, page checksums (Arrow IPC, one row)
    <path>/data/<shard>/<segment>-<id>.deleted   bitmap of the rows deleted by later versions
    <path>/pins/...                         versions that a vacuum keeps, see `dovetail.relation.pins`

Segments are immutable and shared by versions. A manifest lists all files of its version with sizes and digests. A
reader never lists a directory and never reads a file that no manifest lists.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import pyarrow as pa

from dovetail.core.errors import RelationCorrupt
from dovetail.storage.digests import canonical, digest_of

FORMAT_VERSION = 1
"""Increased whenever an older reader could misread the output of a newer writer."""

FENCE_STRIDE = 128
"""Rows per fence of the sparse index: 8 resident bytes per 128 rows, and 1 KiB of codes to search per fence."""

CODE_COLUMN = "__code"
SHARD_COLUMN = "__shard"
RESERVED_COLUMNS = frozenset({CODE_COLUMN, SHARD_COLUMN})

CodeKind = Literal["value", "xxhash64"]
Operation = Literal["build", "append", "upsert", "delete"]


@dataclass(frozen=True, slots=True)
class Deletions:
    """The rows of a segment that a version no longer has, as a bitmap file."""

    name: str
    count: int
    digest: str


@dataclass(frozen=True, slots=True)
class Segment:
    """An immutable run of rows sorted by code. ``is_keyed`` is false for rows whose key has a NULL."""

    name: str
    rows: int
    rows_bytes: int
    codes_bytes: int
    index_bytes: int
    index_digest: str
    min_code: int
    max_code: int
    is_keyed: bool
    deletions: Deletions | None = None

    @property
    def live_rows(self) -> int:
        return self.rows - (self.deletions.count if self.deletions else 0)

    def file_names(self) -> list[str]:
        names = [f"{self.name}.rows", f"{self.name}.index"]
        if self.is_keyed:
            names.append(f"{self.name}.codes")
        if self.deletions:
            names.append(self.deletions.name)
        return names


@dataclass(frozen=True, slots=True)
class ShardStats:
    """Statistics of one shard, or of a whole relation.

    ``rows`` includes ``null_key_rows``; ``distinct_codes`` and ``max_multiplicity`` do not. With hashed codes two keys
    may share a code, so ``is_unique`` can be false for a unique key, but is never true for one that is not unique.
    """

    rows: int
    bytes: int
    distinct_codes: int
    max_multiplicity: int
    null_key_rows: int

    @property
    def is_unique(self) -> bool:
        return self.max_multiplicity <= 1

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "is_unique": self.is_unique}


@dataclass(frozen=True, slots=True)
class Shard:
    """The segments and counts of one shard in one version."""

    segments: tuple[Segment, ...]
    stats: ShardStats


@dataclass(frozen=True)
class RelationStats:
    """Statistics of a relation: totals, and the same per shard."""

    rows: int
    bytes: int
    distinct_codes: int
    max_multiplicity: int
    null_key_rows: int
    shards: tuple[ShardStats, ...]

    @property
    def is_unique(self) -> bool:
        """Whether all codes are distinct."""
        return self.max_multiplicity <= 1

    @classmethod
    def of(cls, shards: tuple[ShardStats, ...]) -> "RelationStats":
        """Sum up the shards. A code is in only one shard, so distinct codes add up too."""
        return cls(
            rows=sum(s.rows for s in shards),
            bytes=sum(s.bytes for s in shards),
            distinct_codes=sum(s.distinct_codes for s in shards),
            max_multiplicity=max((s.max_multiplicity for s in shards), default=0),
            null_key_rows=sum(s.null_key_rows for s in shards),
            shards=shards,
        )

    def as_dict(self) -> dict[str, Any]:
        """The statistics as plain data, for ``--json`` and logs."""
        totals = {k: v for k, v in asdict(self).items() if k != "shards"}
        return {**totals, "is_unique": self.is_unique, "shards": [s.as_dict() for s in self.shards]}


@dataclass(frozen=True)
class Manifest:
    """One version of a relation. ``relation_id`` is set by a build and inherited by every change.

    ``origin`` is what its writer recorded about where its changes are from; see `dovetail.warehouse.folding`.
    """

    relation_id: str
    version: int
    parent: int | None
    operation: Operation
    created_at: str
    key: tuple[str, ...]
    code_kind: CodeKind
    is_unique_key: bool
    schema: pa.Schema
    spark_schema: Mapping[str, Any] | None
    shards: tuple[Shard, ...]
    origin: Mapping[str, Any] | None = None

    @property
    def stats(self) -> RelationStats:
        return RelationStats.of(tuple(s.stats for s in self.shards))

    def data_files(self) -> set[str]:
        """All data files of the version, relative to ``data/``."""
        return {
            f"{number}/{name}"
            for number, shard in enumerate(self.shards)
            for segment in shard.segments
            for name in segment.file_names()
        }

    def to_json(self) -> str:
        body = {
            "format": FORMAT_VERSION,
            "relation": self.relation_id,
            "version": self.version,
            "parent": self.parent,
            "operation": self.operation,
            "created_at": self.created_at,
            "key": {"columns": list(self.key), "code": self.code_kind, "unique": self.is_unique_key},
            "schema": {
                "arrow": base64.b64encode(self.schema.serialize().to_pybytes()).decode(),
                "spark": self.spark_schema,
            },
            "shard_count": len(self.shards),
            "shards": [asdict(shard) for shard in self.shards],
        }
        if self.origin is not None:
            body["origin"] = dict(self.origin)
        return json.dumps({**body, "digest": digest_of(canonical(body))}, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str) -> "Manifest":
        """Parse and verify a manifest; ``where`` names it in errors."""
        try:
            document = json.loads(text)
            if not isinstance(document, dict) or "format" not in document:
                raise ValueError("it is not a manifest")
        except ValueError as error:
            raise RelationCorrupt(
                f"{where} cannot be read: {error}. Open an earlier version, or build the relation again."
            ) from None
        if document["format"] != FORMAT_VERSION:
            raise RelationCorrupt(
                f"{where} has format {document['format']}, this release of dovetail reads format {FORMAT_VERSION}. "
                "Upgrade dovetail, or build the relation again with this release."
            )
        recorded = document.pop("digest", None)
        if recorded != digest_of(canonical(document)):
            raise RelationCorrupt(
                f"{where} does not match its own digest, so it was damaged or edited. Open an earlier version, or "
                "build the relation again."
            )
        try:
            return cls._of(document)
        except (KeyError, TypeError, ValueError, pa.ArrowInvalid) as error:
            raise RelationCorrupt(
                f"{where} has a missing or invalid field ({error}): it was not written by this release. Build the "
                "relation again."
            ) from None

    @classmethod
    def _of(cls, document: Mapping[str, Any]) -> "Manifest":
        return cls(
            relation_id=document["relation"],
            version=document["version"],
            parent=document["parent"],
            operation=document["operation"],
            created_at=document["created_at"],
            key=tuple(document["key"]["columns"]),
            code_kind=document["key"]["code"],
            is_unique_key=document["key"]["unique"],
            schema=pa.ipc.read_schema(pa.py_buffer(base64.b64decode(document["schema"]["arrow"]))),
            spark_schema=document["schema"]["spark"],
            shards=tuple(shard_from_dict(shard) for shard in document["shards"]),
            origin=document.get("origin"),
        )


def shard_from_dict(shard: Mapping[str, Any]) -> Shard:
    """The inverse of ``dataclasses.asdict`` for a shard."""
    return Shard(
        segments=tuple(
            Segment(**{**s, "deletions": Deletions(**s["deletions"]) if s["deletions"] else None})
            for s in shard["segments"]
        ),
        stats=ShardStats(**shard["stats"]),
    )
